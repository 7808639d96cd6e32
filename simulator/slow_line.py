"""A peer of the simulated world whose line is far slower than all others': its bulk passes one after the other.

Read by the world, which asks how long a frame is on its way besides what the network does to it.  The lines' rates are
what the peers tell the coordinator, as if they had been measured; vectors of a dozen values are long enough here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.frames import FrameKind
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import AUTO, BITS_PER_VALUE, LADDER
from farflung.simulator.scenario import Scenario

FAST_TIMES = 100.0  # faster are all other lines
# What takes its time.  State that others ask for does not: the real data plane sends no second copy of what waits.
CONTRIBUTED, RESULTS = {"CONTRIBUTION", "AHEAD"}, {"RESULT", "LOGGED"}


def of_slow_line(seed: int) -> Scenario:
    """The world of the seed, without checkpoints, in which each chunk of the first peer takes it most of a second."""
    drawn = Scenario.of(seed)
    return replace(
        drawn,
        peers=max(4, drawn.peers),
        chunks=max(3, drawn.chunks),
        rounds=8,
        min_peers=min(2, drawn.min_peers),
        codec=("fp32", "int8", "int4", "auto")[seed % 4],
        undialable=0,
        blackout_at_s=0.0,
        every_rounds=0,
        slow_line_s=(0.6, 0.8, 0.5)[seed % 3],
    )


def calm_slow_line(seed: int, **changes: object) -> Scenario:
    """The same where nothing else happens to anybody."""
    calm = dict.fromkeys(
        ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s", "leave_per_s"),
        0.0,
    )
    return replace(of_slow_line(seed), fragments=1, schedule="blocking", period_s=0.0, **(calm | changes))  # type: ignore[arg-type]


class SlowLine:
    def __init__(self, scenario: Scenario, peer: str, model: ModelSchema) -> None:
        self._takes_s, self.peer = scenario.slow_line_s, peer
        codec = LADDER[0] if scenario.codec == AUTO else scenario.codec
        self._chunk_bytes = model.chunk_elements * BITS_PER_VALUE[codec] / 8
        self._free_at = {"up": 0.0, "down": 0.0}

    def prepare(self, machine: RunMachine) -> None:
        """Of a coordinator that begins."""
        if self._takes_s:
            for driver in machine.drivers:
                cast(Any, driver.lines).least_bytes = 0.0  # of EarlyUploads, where the mode is there

    def up_bytes_per_s(self, peer: str, otherwise: Callable[[], int]) -> int:
        """What a peer tells of its line."""
        drawn = otherwise()  # what else is drawn must not change
        if not self._takes_s:
            return drawn
        slow = self._chunk_bytes / self._takes_s
        return math.ceil(slow if peer == self.peer else FAST_TIMES * slow)

    def waits_s(self, source: str, target: str, kind: FrameKind, now: float) -> float:
        """How long this frame takes until it is through."""
        kinds = CONTRIBUTED if source == self.peer else RESULTS
        if not self._takes_s or self.peer not in (source, target) or kind.name not in kinds:
            return 0.0
        # What comes in is a quarter of the time on its way: home lines are faster that way.
        way, takes_s = ("up", self._takes_s) if source == self.peer else ("down", self._takes_s / 4)
        self._free_at[way] = max(now, self._free_at[way]) + takes_s
        return self._free_at[way] - now
