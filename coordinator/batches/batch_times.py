"""What a batch of this length costs: seconds of counting, seconds of its round, seats that were lost in it.  Pure.

Told by `batches.py` at every turn, read by the status alone; nothing is decided by it.

A batch that is counted for T seconds and whose round takes R spends R / T of its time on rounds.  Who is lost takes
half a batch of one seat with it: T / 2 of the n seats of its stage, once in M seconds, which is T / (2 M n).  The sum
is least where T = sqrt(2 M n R).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.protocol.limits import MICROS_PER_BATCH

_SMOOTHED = 0.5  # of the newest batch in what is told


@dataclass
class BatchTimes:
    since: float = -1.0  # the first look
    lost: int = 0  # seats that took counted microbatches with them
    passed_over: int = 0  # batches in a row of which nothing was left
    counting_s: float = 0.0  # 0: no batch was seen from its begin to its end
    round_s: float = 0.0
    _version: int = -1  # of the batch that is open
    _begun_at: float = -1.0  # below 0: it was not seen
    _full_at: float = -1.0

    def look(self, version: int | None, complete: bool, now: float) -> None:
        """Every turn.  `version`: of the batch; None: there is none."""
        if self.since < 0:
            self.since = now
        if version is not None and version != self._version:
            self.passed_over = 0
            if self._begun_at >= 0 and self._full_at >= 0 and version == self._version + 1:
                self.counting_s = _smooth(self.counting_s, self._full_at - self._begun_at)
                self.round_s = _smooth(self.round_s, now - self._full_at)
            self._begun_at = now if self._version >= 0 or version == 0 else -1.0
            self._version, self._full_at = version, -1.0
        elif version is not None and not complete:
            self._full_at = -1.0  # somebody was lost after all were counted
        elif version is not None and self._full_at < 0:
            self._full_at = now

    def told(self, microbatches: int, seats: int, now: float) -> dict[str, object] | None:
        """`microbatches`: as the run asks for them; `seats`: of the stage with the fewest.  None: not known yet."""
        if self.counting_s <= 0 or self.round_s <= 0:
            return None
        costs = costs_of(self.counting_s, self.round_s, self._between_deaths_s(now), seats)
        best = costs.best_s / self.counting_s if costs.best_s is not None else None
        return {
            "counting_s": round(self.counting_s, 3),
            "round_s": round(self.round_s, 3),
            "rounds_cost": round(costs.rounds, 4),
            "deaths_cost": round(costs.deaths, 4),
            "lost_seats": self.lost,
            "batch": microbatches,
            "best": None if best is None else min(MICROS_PER_BATCH, max(1, round(best * microbatches))),
        }

    def _between_deaths_s(self, now: float) -> float | None:
        return (now - self.since) / self.lost if self.lost else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Shares of the time in which microbatches are counted."""

    rounds: float
    deaths: float
    # A batch of so many seconds costs least; None: nobody was lost, so the longer the better.
    best_s: float | None


def costs_of(counting_s: float, round_s: float, between_deaths_s: float | None, seats: int) -> Costs:
    if between_deaths_s is None:
        return Costs(round_s / counting_s, 0.0, None)
    spread_s = 2 * between_deaths_s * max(1, seats)
    return Costs(round_s / counting_s, counting_s / spread_s, math.sqrt(spread_s * round_s))


def _smooth(old: float, new: float) -> float:
    return new if old <= 0 else old + _SMOOTHED * (new - old)
