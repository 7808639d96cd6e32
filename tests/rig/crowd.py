"""A run machine with many members, let in without the ceremony: what is large about a run is there, and no process.

Used by tests/whole/test_large_runs.py and by benchmarks/page.py.
"""

from __future__ import annotations

from farflung.coordinator.ledger.records import Genesis, ModelFixed
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol import limits
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest, MergeSection, RoundSection, RunSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Contact
from rig.showing import let_all_be_shown, showing

MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
GENESIS = hash_bytes(b"version 0")


def crowd(
    count: int, ready: bool = False, loss: float | None = 2.123456789012345, group: int = 0
) -> RunMachine:
    """Many members at version 0, let in without the ceremony, with figures as long as they come."""
    manifest = Manifest(
        run=RunSection(name="demo", min_peers=2, max_peers=limits.MAX_PEERS),
        round=RoundSection(group=group),
        merge=MergeSection(audit=0.0) if group else MergeSection(),
    )
    machine = RunMachine(
        manifest,
        bytes(16),
        [ModelFixed(model=MODEL, peer="?"), Genesis(digest=GENESIS, peer="?")],
        lambda size: bytes(size),
    )
    machine.start(0.0, 4000)
    let_all_be_shown(machine.core.ledger)
    for number in range(count):
        key = hash_bytes(str(number).encode())
        contact = Contact(key.hex()[:16], "indigo-falcon", key, f"host:{number}")
        member = machine.core.members.admit(contact, key[:16], key[16:], 0.0)
        machine.core.members.on_dialled(contact.peer, key[:16], reached=True)
        for standing in member.standings.values():
            standing.verified, standing.ready_since = True, 0.0
        member.beat = m.Beat(
            session=key[:16],
            seq=1,
            roster_no=0,
            fragments=(showing(machine.core.ledger, m.FragmentBeat(0, 0, GENESIS, 0, 0, 0, ready, ())),),
            phase="inner",
            step=1 << 40,
            tokens=limits.TOKENS_MAX,
            loss=loss,
            tx_bytes=1 << 61,
            rx_bytes=1 << 61,
            up_bytes_per_s=0,
            down_bytes_per_s=0,
            have=(),
            want=0,
            samples=0,
            rough=False,
            era=0,
            saved=-1,
            unsure=False,
            leaving=False,
            data=b"",
        )
    return machine
