"""Mutants of a run whose records are in etcd, and of the coordinator that stands by.  Read by mutant_list.py."""

from __future__ import annotations

from mutant import Mutant

STORE = ("tests/coordinator/standby/test_etcd_store.py", "tests/coordinator/standby/test_run_stores.py")
RESTORED = ("tests/coordinator/standby/test_restored_store.py",)
WAITING = ("tests/coordinator/standby/test_standby_rules.py",)

STANDBY = (
    Mutant(
        "every write is fenced by the leader's key",
        "coordinator/standby/etcd_store.py",
        "fence = [made_at(leader, self._fence), *compared]",
        "fence = [*compared]",
        STORE,
    ),
    Mutant(
        "a write that came through is not taken for somebody else's",
        "coordinator/standby/etcd_store.py",
        "if not there or there[0].value != value:",
        "if True:",
        STORE,
    ),
    Mutant(
        "one leads",
        "coordinator/standby/etcd_store.py",
        "if not found or found[0].lease != self._lease_no:",
        "if not found:",
        STORE,
    ),
    Mutant(
        "records in a store count without a gap",
        "coordinator/standby/etcd_store.py",
        'if name not in ("fold", _name_at(chain.position + 1)):',
        "if False:",
        STORE,
    ),
    Mutant(
        "an append that arrives after a fold is refused",
        "coordinator/standby/etcd_store.py",
        "self._write(place, head, [made_at(place, 0), self._since_fold()], [])",
        "self._write(place, head, [made_at(place, 0)], [])",
        STORE,
    ),
    Mutant(
        "an older fold takes no newer one's place",
        "coordinator/standby/etcd_store.py",
        'self._fold_made = self._write(self._key("fold"), head, [self._since_fold()], gone)',
        'self._fold_made = self._write(self._key("fold"), head, [], gone)',
        STORE,
    ),
    Mutant(
        "what a fold has taken up is not read again",
        "coordinator/standby/etcd_store.py",
        'if name == "leader" or name in parts or (name.startswith("j/") and name <= taken_up):',
        'if name == "leader" or name in parts:',
        STORE,
    ),
    Mutant(
        "a fold whose answer was lost is known",
        "coordinator/standby/etcd_store.py",
        "return there[0].changed",
        "return there[0].changed + 1",
        STORE,
    ),
    Mutant(
        "a claim whose answers were lost is taken back before the next look",
        "coordinator/standby/etcd_store.py",
        "if not self._is_unsure:",
        "if True:",
        STORE,
    ),
    Mutant(
        "a claim whose answers were lost is taken back at the end",
        "coordinator/standby/etcd_store.py",
        "if self._is_unsure or (self._lease is not None and not self._lease.why_over(self._clock())):",
        "if self._lease is not None and not self._lease.why_over(self._clock()):",
        STORE,
    ),
    Mutant(
        "a host that no name server knows is passed over",
        "coordinator/standby/gateway.py",
        "except (OSError, http.client.HTTPException, json.JSONDecodeError, UnicodeError) as error:",
        "except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:",
        STORE,
    ),
    Mutant(
        "an answer without a header is no etcd's",
        "coordinator/standby/gateway.py",
        'if "error" not in told and not isinstance(said["header"], dict):',
        "if False:",
        STORE,
    ),
    Mutant(
        "each operation has an answer",
        "coordinator/standby/gateway.py",
        "if len(found) != len(then if held else otherwise):",
        "if False:",
        STORE,
    ),
    Mutant(
        "a stream that cannot go on is asked for again",
        "coordinator/standby/gateway.py",
        'if "error" in told:  # such a stream says with 200 that it cannot go on',
        "if False:",
        STORE,
    ),
    Mutant(
        "a store that was restored is not gone on with before peers were asked",
        "coordinator/standby/standby.py",
        "    if not asked.restored:",
        "    if True:",
        RESTORED,
    ),
    Mutant(
        "whoever asks peers for a store ends with its lease",
        "coordinator/standby/standby.py",
        "store.check()  # Deposed, as soon as its lease is over: then it is another one's turn to ask",
        "pass",
        RESTORED,
    ),
    Mutant(
        "what peers give back is written into the store",
        "coordinator/standby/standby.py",
        "store.append(found.records)",
        "pass",
        RESTORED,
    ),
    Mutant(
        "a folder's store gets its own run back",
        "coordinator/standby/standby.py",
        'if run_id not in ("", found.run_id.hex()):',
        "if False:",
        RESTORED,
    ),
    Mutant(
        "no new key is made for a store that was lost",
        "coordinator/standby/standby.py",
        "if asked.restored and kept is None:",
        "if False:",
        RESTORED,
    ),
    Mutant(
        "a lease counts from the question",
        "coordinator/standby/etcd_store.py",
        "self._until = asked_at + length_s",
        "self._until = asked_at + length_s + 1.0",
        WAITING,
    ),
    Mutant(
        "a lease that the store forgot is over",
        "coordinator/standby/etcd_store.py",
        "if left_s <= 0:",
        "if False:",
        WAITING,
    ),
    Mutant(
        "a standby takes over its own run alone",
        "coordinator/standby/standby_rules.py",
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
        "peer/machine/handshake.py",
        "self._again_at = min(self._again_at, now + STANDBY_RETRY_S)",
        "self._again_at += 0.0",
        ("tests/peer/restoring/test_fellow_search.py",),
    ),
)
