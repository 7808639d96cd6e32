"""A run whose chance is bytes: what a fuzzer that sees which lines are reached turns until a promise breaks.

The first byte says what kind of small run it is.  Each further pair of bytes is one draw of the world: how long a
frame takes, whether it is lost or doubled, who dies before which effect, which frame comes again.  Where they end,
chance that follows from them goes on.  The machines of the coordinator and of the peers are those of production, and
all promises are looked at after each event.
"""

from __future__ import annotations

import random

from farflung.simulator.scenario import Scenario, SimulationReport
from rig.replays import ReplayingWorld

_USUAL = Scenario(
    peers=2, chunks=2, rounds=2, end_s=120.0, faults_until_s=12.0, drop=0.05, duplicate=0.05, slow=0.1
)
KINDS = (
    _USUAL,
    Scenario(
        peers=3, chunks=2, rounds=3, end_s=200.0, faults_until_s=15.0, drop=0.02, duplicate=0.1, slow=0.1,
        kill_per_effect=0.004, every_rounds=1, one_store=True, go_back_after_s=4.0,
    ),
    Scenario(
        peers=3, chunks=2, fragments=2, rounds=2, end_s=200.0, faults_until_s=15.0, drop=0.02, slow=0.1,
        trainer_crash_per_s=0.1, leave_per_s=0.02,
    ),
    Scenario(
        peers=3, chunks=2, rounds=3, end_s=200.0, faults_until_s=15.0, drop=0.02, slow=0.1, every_rounds=1,
        blackout_at_s=6.0, go_back_after_s=4.0,
    ),
)  # fmt: skip


class Steering(random.Random):
    """Draws from bytes, as long as there are any."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self._raw, self._at = raw, 0

    def random(self) -> float:
        if self._at + 2 > len(self._raw):
            return super().random()
        self._at += 2
        return int.from_bytes(self._raw[self._at - 2 : self._at], "big") / (1 << 16)

    def getrandbits(self, k: int) -> int:
        return int(self.random() * (1 << min(k, 53))) << max(0, k - 53)


class SteeredWorld(ReplayingWorld):
    def __init__(self, raw: bytes) -> None:
        kind = raw[0] if raw else 0
        super().__init__(kind, KINDS[kind % len(KINDS)])
        self.random = self._chance = Steering(raw[1:])


def steered(raw: bytes) -> SimulationReport:
    return SteeredWorld(raw).run()
