"""The coordinator's relay in the simulated world: frames of pairs that it was told pass it, while it lives.

Used by the world.  What a relay may do to ciphertext (delay, drop, damage) is a frame that comes late or never, which
the world does to all frames; here it also dies, for a moment or for long, and comes back.  It has a chance of its own,
so that worlds without it are what they were.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from farflung.coordinator.reach.tickets import pair_of
from farflung.coordinator.reach.ways import RelayNow, Usage
from farflung.coordinator.run.effects import Effect
from farflung.coordinator.run.machine import RunMachine
from farflung.peer.simulator.peer import VirtualPeer
from farflung.peer.simulator.scenario import Scenario

PORT = 7
BYTES_PER_S = 1e6
BACK_WITHIN_S = 3.0  # a shorter death the machine does not hear of, as in life
LIVES_S, DEAD_S = (0.5, 4.0), (0.2, 6.0)


@dataclass
class VirtualRelay:
    scenario: Scenario
    seed: int
    pairs: frozenset[bytes] = frozenset()
    passed: int = 0  # frames
    refused: int = 0
    deaths: int = 0
    _dead_from_s: float = field(init=False)
    _dead_until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"relay {self.seed}")
        self._dead_from_s = self._random.uniform(*LIVES_S)
        self._dead_until_s = self._dead_from_s + self._random.uniform(*DEAD_S)

    def is_dead(self, now: float) -> bool:
        if self.scenario.relay != "dies" or now >= self.scenario.faults_until_s:
            return False
        if now >= self._dead_until_s:
            self.deaths += 1
            self._dead_from_s = now + self._random.uniform(*LIVES_S)
            self._dead_until_s = self._dead_from_s + self._random.uniform(*DEAD_S)
        return now >= self._dead_from_s

    def on_tick(self, machine: RunMachine, now: float) -> list[Effect]:
        if not self.scenario.relay:
            return []
        machine.core.prove = lambda statement: bytes(96)  # who checks it here is nobody
        gone = self.is_dead(now) and now - self._dead_from_s >= BACK_WITHIN_S
        relay = None if gone else RelayNow(PORT, BYTES_PER_S)
        return machine.on_relay(relay, "it is dead" if gone else "", Usage(), now)

    def carries(self, one: VirtualPeer | None, other: VirtualPeer | None, now: float) -> bool:
        """A frame from one to the other."""
        if not self.scenario.relay or one is None or other is None:
            return False
        fits = pair_of(one.me.key, other.me.key) in self.pairs and not self.is_dead(now)
        self.passed += fits
        self.refused += not fits
        return fits
