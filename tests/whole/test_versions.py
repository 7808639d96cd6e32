"""Seeded runs in which some peers speak the last version of the protocol and some this one, and upgrade when they are
started again: P1 to P7 hold, and nobody is told a word that it does not know.

More seeds: FARFLUNG_SEEDS=3000 FARFLUNG_LONG=1 pytest tests/whole/test_versions.py, or
`python benchmarks/seeds.py versions`.  A failing seed replays with
`python -m farflung.peer.simulator.world SEED versions`.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from farflung.peer.simulator.scenario import Scenario
from farflung.peer.simulator.world import COORDINATOR, World
from farflung.protocol import envelope
from farflung.protocol.limits import LAST_PROTOCOL, PROTOCOL_VERSION
from farflung.protocol.messages import Message
from rig.last_protocol import unknown_in
from rig.pieces import pieces

SEEDS = int(os.environ.get("FARFLUNG_SEEDS", "300")) // 15
BATCHES = 2


class Mixed(World):
    """Everything that passes between the coordinator and a peer of the last version is read as that version reads."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Scenario.of_versions(seed))
        self.spoken: Counter[int] = Counter()

    def _deliver(
        self,
        source: str,
        target: str,
        message: Message,
        allowed: frozenset[str],
        key: bytes = b"",
        version: int = 0,
    ) -> None:
        peer = self.peers.get(target if source == COORDINATOR else source)
        if peer is not None and peer.world.protocol == LAST_PROTOCOL:
            said_in = version or peer.machine.doorway.protocol
            unknown = unknown_in(envelope.encode(message, said_in))
            assert not unknown, f"{source} says to {target} what is not known there: {unknown}"
        super()._deliver(source, target, message, allowed, key, version)

    def observe(self) -> None:
        if self.coordinator is not None:
            self.spoken.update(each.protocol for each in self.coordinator.core.members.alive.values())


def run(seed: int) -> Mixed:
    world = Mixed(seed)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"seed {seed}; replay: python -m farflung.peer.simulator.world {seed} versions")
        raise
    world.observe()
    return world


@pytest.mark.parametrize("batch", pieces(BATCHES))
def test_no_promise_is_broken_where_two_versions_are_spoken(batch: int) -> None:
    seeds = range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES)
    spoken = sum((world.spoken for world in map(run, seeds)), Counter())
    assert spoken[LAST_PROTOCOL] and spoken[PROTOCOL_VERSION], "at the end of these runs both are spoken"
