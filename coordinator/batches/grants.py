"""How many microbatches a seat is granted now: enough to be busy, and at the end so that all end together; and what is
counted of them.  Pure.

Called by `batches.py` at every beat.  It knows rates and counts, and nothing of seats, members or records.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from statistics import median

from farflung.collectives.pipeline.seats import Traffic, borders_of, seat_pace, traffic_of
from farflung.coordinator.batches.batch_book import spans_of_mask
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.model_schema import ModelSchema

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


# ---- rates -------------------------------------------------------------------------------------------------
# How many microbatches a second a peer does in a stage, and all seats of it together. Pure.
#
# Called by whoever moves peers between stages (rebalancing.py) and by the batches, which tell the wiring of
# each seat's share. Must not know seats, records or members: it is given what each peer says of itself.
#
# A peer's rate is one over the slowest of three: computing a microbatch, sending what it gives, receiving
# what it gets. What members say of themselves is believed within bounds of what is usual, so that a liar
# gains nothing by it: nobody counts for more than `BELIEVED` times the median of its stage, and no line for
# more than so many times the usual one.

SHARE_STEADY = 1.25  # the wiring is told of new shares when one differs by this factor


@dataclass(frozen=True)
class Mate:
    """One peer in its stage, as it describes itself."""

    peer: str
    stage: int
    unit_s: float = 0.0  # busy seconds for one microbatch; 0: not known
    up_bytes_per_s: float = 0.0  # 0: not known
    down_bytes_per_s: float = 0.0


def traffic_of_stages(model: ModelSchema | None, pipeline: PipelineSection) -> list[Traffic]:
    """Of one seat of each stage, for one microbatch."""
    borders = borders_of(model, pipeline.micro) if model is not None and model.stages else ()
    codecs = pipeline.codec, pipeline.gradient_codec
    return [traffic_of(borders, stage, *codecs) for stage in range(pipeline.stages)]


class SeatRates:
    def __init__(self, crew: Iterable[Mate], traffic: Sequence[Traffic]) -> None:
        """`crew`: of all stages; `traffic`: of each."""
        self.crew, self._traffic = tuple(crew), traffic
        units = [
            [believed_unit_s(mate.unit_s) for mate in self.of_stage(n) if mate.unit_s > 0]
            for n in range(self.stages)
        ]
        # Before each stage that is served has measured something, peers and stages count alike.
        self.measured = all(units[mate.stage] for mate in self.crew)
        self._costs = [median(each) if each and self.measured else 1.0 for each in units]
        self._up, self._down = (
            _most(getattr(mate, name) for mate in self.crew)
            for name in ("up_bytes_per_s", "down_bytes_per_s")
        )
        self.sums = [sum(self.of(mate, n) for mate in self.of_stage(n)) for n in range(self.stages)]

    @property
    def stages(self) -> int:
        return len(self._traffic)

    def of_stage(self, stage: int) -> list[Mate]:
        return [mate for mate in self.crew if mate.stage == stage]

    def of(self, mate: Mate, stage: int) -> float:
        """That it has, or would have, in this stage."""
        here = self._costs[mate.stage]
        unit_s = mate.unit_s if self.measured and mate.unit_s > 0 else here
        unit_s = max(unit_s, here / BELIEVED, UNIT_LEAST_S) / here * self._costs[stage]
        if not self.measured:  # a unit is no second then
            return 1.0 / unit_s
        up, down = min(mate.up_bytes_per_s, self._up), min(mate.down_bytes_per_s, self._down)
        return seat_pace(unit_s, self._traffic[stage], up, down).micros_per_s or 0.0

    def after(self, mate: Mate, to: int) -> float:
        """The slowest stage's rate once it has moved there."""
        moved = list(self.sums)
        moved[mate.stage] -= self.of(mate, mate.stage)
        moved[to] += self.of(mate, to)
        return min(moved)

    def shares(self) -> dict[str, float]:
        """By peer: of the microbatches of its stage, as the wiring is to spread them; 1 is a usual one's."""
        found: dict[str, float] = {}
        for stage in range(self.stages):
            rates = {mate.peer: self.of(mate, stage) for mate in self.of_stage(stage)}
            usual = median(rates.values()) if rates else 1.0
            for peer, rate in rates.items():
                found[peer] = round(min(BELIEVED, max(1 / BELIEVED, rate / usual)), 3)
        return found


def news_of_shares(told: Mapping[str, float], due: Mapping[str, float]) -> dict[str, float]:
    """All of `due`, if one of them is worth a table; nothing while what was told is near enough."""
    far = any(
        not 1 / SHARE_STEADY < share / told[peer] < SHARE_STEADY
        for peer, share in due.items()
        if peer in told
    )
    return {peer: share for peer, share in due.items() if peer in told} if far else {}


def _most(rates: Iterable[float]) -> float:
    """That a line is believed to carry."""
    known = [rate for rate in rates if rate > 0]
    return BELIEVED * median(known) if known else 0.0
