"""The end of a batch with one slow seat, in virtual time: with and without taking back what that seat has not begun.

    python tests/rig/flow_tail.py [--runs 20]

Three stages of three even seats, and lines on which a crossing takes 5 to 40 ms.  Somewhere within the batch one seat
behind the first stage becomes four times as slow, for good; or it was so from the start, and the shares of the table
say so.  "best": as long as the work takes if the seats of the narrow stage never wait and all end at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.flow_world import SLOW_TIMES, Room, Scenario, World

STAGES, SEATS, RUNS = 3, 3, 20
# Times `unit_s` that a microbatch takes in each stage: the last one goes there and back at once.
UNITS = (1 + 3, 1 + 3, 3)
SIZES = ((0.01, 96), (0.1, 96), (0.5, 96), (0.5, 384))  # `unit_s`, microbatches


@dataclass(frozen=True)
class Tail:
    best_s: float
    took_s: float
    given_back: int


class SlowSeat(World):
    """At `slow_at_s` one seat of a stage becomes slow; from the start on if that is 0, and its share is known then."""

    def __init__(self, seed: int, scenario: Scenario, stage: int, slow_at_s: float) -> None:
        self._stage, self._slow_at_s = stage, slow_at_s
        self.committed_at_s = 0.0
        super().__init__(seed, scenario, Room())

    def join(self, stage: int, peer: str = "") -> None:
        super().join(stage, peer)
        if not self._slow_at_s and self.table.seats[self.last_seat] == self._slow_one():
            self.table = self.table.of_next_batch({self.last_seat: 1.0 / SLOW_TIMES})
            self.hosts[self.last_seat].unit_s *= SLOW_TIMES

    def _slow_one(self) -> Any:
        return self.table.living(self._stage)[0] if self.table.living(self._stage) else None

    def misfortunes(self) -> None:
        def slows() -> None:
            self.hosts[self._slow_one().number].unit_s *= SLOW_TIMES

        if self._slow_at_s:
            self.after(self._slow_at_s, slows)

    def check_commit(self) -> None:
        super().check_commit()
        self.committed_at_s = self.now


def tail(seed: int, unit_s: float, count: int, late: bool, takes_back: bool) -> Tail:
    """`late`: it becomes slow within the batch."""
    draw = random.Random(f"tail {seed}")
    stage = draw.randrange(1, STAGES)
    even_s = count * max(UNITS) * unit_s / SEATS
    slow_at_s = draw.uniform(0.2, 0.8) * even_s if late else 0.0
    scenario = Scenario(
        stages=STAGES,
        per_stage=SEATS,
        count=count,
        batches=1,
        unit_s=unit_s,
        paces=(1.0,),
        shares=(1.0,),
        takes_back=takes_back,
    )
    world = SlowSeat(seed, scenario, stage, slow_at_s)
    world.run()
    left = count - SEATS * slow_at_s / (UNITS[stage] * unit_s)
    slowed_s = slow_at_s + left * UNITS[stage] * unit_s / (SEATS - 1 + 1 / SLOW_TIMES)
    return Tail(max(even_s, slowed_s), world.committed_at_s, world.told["given back"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    print("| a seat is slow | a microbatch takes | in a batch | best | without | with | given back |")
    print("|---|---|---|---|---|---|---|")
    for late in (True, False):
        for unit_s, count in SIZES if late else SIZES[:3]:
            off, on = (
                [tail(seed, unit_s, count, late, takes_back) for seed in range(runs)]
                for takes_back in (False, True)
            )
            best, without, with_it = (
                statistics.mean(values)
                for values in (
                    [each.best_s for each in on],
                    [each.took_s for each in off],
                    [each.took_s for each in on],
                )
            )
            told = "in mid-batch" if late else "from the start"
            back = statistics.mean(each.given_back for each in on)
            row = [told, f"{4 * unit_s:g} s", count, *(f"{each:.1f} s" for each in (best, without, with_it))]
            print("|", *(f"{each} |" for each in row), f"{back:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
