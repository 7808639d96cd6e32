"""Mutants of a run whose records are in etcd, and of the coordinator that stands by.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

STORE = ("tests/coordinator/store/test_etcd_store.py", "tests/coordinator/store/test_run_stores.py")
WAITING = ("tests/coordinator/store/test_waiting.py",)

STANDBY = (
    Mutant(
        "every write is fenced by the leader's key",
        "coordinator/store/etcd_store.py",
        "fence = [made_at(leader, self._fence), *compared]",
        "fence = [*compared]",
        STORE,
    ),
    Mutant(
        "a write that came through is not taken for somebody else's",
        "coordinator/store/etcd_store.py",
        "if not there or there[0].value != value:",
        "if True:",
        STORE,
    ),
    Mutant(
        "one leads",
        "coordinator/store/etcd_store.py",
        "if not found or found[0].lease != self._lease_no:",
        "if not found:",
        STORE,
    ),
    Mutant(
        "records in a store count without a gap",
        "coordinator/store/etcd_store.py",
        'if name != f"j/{self._position + 1:016x}":',
        "if False:",
        STORE,
    ),
    Mutant(
        "a lease counts from the question",
        "coordinator/store/lease.py",
        "self._until = asked_at + length_s",
        "self._until = asked_at + length_s + 1.0",
        WAITING,
    ),
    Mutant(
        "a lease that the store forgot is over",
        "coordinator/store/lease.py",
        "if left_s <= 0:",
        "if False:",
        WAITING,
    ),
    Mutant(
        "a standby takes over its own run alone",
        "coordinator/store/waiting.py",
        "if sight.kept.key != self._key:",
        "if False:",
        WAITING,
    ),
    Mutant(
        "who may not lead any more says nothing more",
        "coordinator/server.py",
        "self._journal.check()",
        "pass",
        ("tests/coordinator/test_durability.py",),
    ),
    Mutant(
        "a coordinator that stands by is not the one that is looked for",
        "peer/line/control.py",
        "if not isinstance(message, StandsBy):",
        "if True:",
        ("tests/peer/line/test_control_link.py",),
    ),
    Mutant(
        "nobody loses patience with a standby",
        "peer/machine/getting_in.py",
        "self._again_at = min(self._again_at, now + STANDBY_RETRY_S)",
        "self._again_at += 0.0",
        ("tests/peer/machine/test_seeking.py",),
    ),
)
