"""The run's own clock.  A fold over records.  Pure.

Part of the ledger.  It counts the seconds since the run began: while a coordinator runs by its monotonic clock, which
nobody can set; while none runs by the wall clock of its machine, and never backwards.  No peer's clock takes part, and
no peer is told a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.coordinator.ledger.records import CommittedBatch, Record, Started


@dataclass
class RunClock:
    newest_s: float = 0.0  # the newest reading in any record
    began_s: float = 0.0  # when the newest coordinator started
    wall_s: float = 0.0  # and the wall clock of its machine then

    def apply(self, record: Record) -> None:
        match record:
            case Started(clock_s=clock_s, wall_s=wall_s):
                self._saw(clock_s)
                self.began_s, self.wall_s = clock_s, wall_s
            case CommittedBatch(rounds=rounds):
                self._saw(rounds[-1].at_s)
            case _:
                self._saw(getattr(record, "at_s", 0.0))

    def at_start(self, wall_s: float) -> float:
        """Of a coordinator that starts now: time went on while there was none."""
        away_s = wall_s - self.wall_s if self.wall_s and wall_s else 0.0
        return max(self.newest_s, self.began_s + away_s)

    def _saw(self, at_s: float) -> None:
        self.newest_s = max(self.newest_s, at_s)
