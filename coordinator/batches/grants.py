"""How many microbatches a seat is granted now: enough to be busy, and at the end so that all end together; and what is
counted of them.  Pure.

Called by `batches.py` at every beat.  It knows rates and counts, and nothing of seats, members or records.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from statistics import median

from farflung.coordinator.batches.batch_book import spans_of_mask

BEATS_AHEAD = 2.0  # a seat has work for so many heartbeats
AHEAD_LEAST = 2  # microbatches
PATIENCE_UNITS = 10.0  # a seat may take so many times its usual for one microbatch
PATIENCE_FIRST = 5.0  # and so many times the deadline for its first one, before which a trainer may compile
BELIEVED = 4.0  # nobody is believed to be so many times faster or slower than others in the middle
UNIT_LEAST_S = 1e-6  # nobody is believed to be faster
SHARE_MOST = 4.0  # nobody holds more than so many times its equal share, however fast it says it is


def believed_unit_s(said_s: float) -> float:
    """Busy seconds for one microbatch as a seat says them; 0: not known.  The smallest numbers that there are have no
    finite rate, and one that has none could be told to nobody."""
    return max(UNIT_LEAST_S, said_s) if said_s > 0 else 0.0


def patience_s(deadline_s: float, unit_s: float, others: Iterable[float]) -> float:
    """How long a seat that holds microbatches may count none.  What it says of itself could hold its batch for ever, so
    the `others` of its stage are the measure, and where nobody else has counted one, what a first one may take."""
    known = [each for each in others if each > 0.0]
    first_s = PATIENCE_FIRST * deadline_s
    if not unit_s:
        return first_s
    most_s = PATIENCE_UNITS * BELIEVED * median(known) if known else first_s
    return max(deadline_s, min(PATIENCE_UNITS * unit_s, most_s))


@dataclass(frozen=True)
class GrantPace:
    """One seat."""

    open: int  # granted and not counted
    unit_s: float  # busy seconds for one microbatch; 0: not known

    def unit(self, usual_s: float) -> float:
        return max(UNIT_LEAST_S, self.unit_s or usual_s)

    def ahead(self, heartbeat_s: float, usual_s: float, on_the_way: int) -> int:
        return on_the_way + max(AHEAD_LEAST, math.ceil(BEATS_AHEAD * heartbeat_s / self.unit(usual_s)))


def first_of(free: int, count: int) -> list[tuple[int, int]]:
    """The first so many microbatches of a mask, as ranges [first, stop)."""
    spans = []
    for first, stop in spans_of_mask(free):
        if count <= 0:
            break
        spans.append((first, min(stop, first + count)))
        count -= stop - first
    return spans


def to_grant(
    asking: int, paces: Mapping[int, GrantPace], free: int, heartbeat_s: float, on_the_way: int = 0
) -> int:
    """To the seat `asking`, one of `paces`; `free`: microbatches that nobody has; `on_the_way`: so many of a seat's own
    may be in other stages, where it has no work with them.

    While there is plenty each seat gets what keeps it busy.  When there is not, each microbatch belongs to the seat
    that would end it first, and a slow one gets none that the others would have to wait for.
    """
    known = sorted(pace.unit_s for pace in paces.values() if pace.unit_s)
    usual_s = known[len(known) // 2] if known else heartbeat_s
    left = free + sum(pace.open for pace in paces.values())
    most = max(AHEAD_LEAST, math.ceil(SHARE_MOST * left / len(paces)))
    room = {
        number: max(0, min(pace.ahead(heartbeat_s, usual_s, on_the_way), most) - pace.open)
        for number, pace in paces.items()
    }
    if sum(room.values()) <= free:
        return room[asking]
    ends = [((pace.open + 1) * pace.unit(usual_s), number, pace.open + 1) for number, pace in paces.items()]
    heapq.heapify(ends)
    mine = 0
    for _ in range(free):
        _, number, done = ends[0]
        unit_s = paces[number].unit(usual_s)
        heapq.heapreplace(ends, ((done + 1) * unit_s, number, done + 1))
        mine += number == asking
    return min(mine, room[asking])


@dataclass
class Masks:
    """What is counted.  Asked for with every beat, so it is not made of all seats each time."""

    stamp: object  # of which seats
    of_stage: list[int]
    _everywhere: int | None = None

    @property
    def everywhere(self) -> int:
        """In every stage."""
        if self._everywhere is None:
            self._everywhere = reduce(and_, self.of_stage)
        return self._everywhere

    def add(self, stage: int, counted: int) -> None:
        if counted & ~self.of_stage[stage]:
            self.of_stage[stage] |= counted
            self._everywhere = None
