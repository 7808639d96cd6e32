"""The numbered table of seats: who has which place in which stage, who is gone, and what follows from that.  Pure.

The coordinator writes it (each change is durable and has the next number) and tells it as a snapshot; the machine of a
member (stage_scheduler.py) reads it.  Must not know microbatches, frames or how anybody was found to be gone.

R1: a microbatch changes hands only when a table shows that its holder is gone.  So all that this file answers is who
lives, who went, and by which number; nobody decides by a timeout of its own.  The number of a seat is never used again:
a peer that comes back, or whose trainer died, sits down under another one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from farflung.collectives.pipeline.crossing import INTEGER_BYTES
from farflung.protocol.limits import MEMBERS_PER_ROUND
from farflung.protocol.model_schema import BorderTensor, ModelSchema
from farflung.protocol.round_words import BITS_PER_VALUE


@dataclass(frozen=True, slots=True)
class Seat:
    number: int  # never used again
    peer: str
    stage: int
    share: float  # of the microbatches of its stage, as the coordinator would have them spread
    since: int  # the table that showed it first
    gone: int = 0  # the table that showed that it is gone; 0: it is here

    @property
    def lives(self) -> bool:
        return not self.gone


class Table:
    """A snapshot.  A seat that it does not list is gone for so long that nobody needs to know when."""

    def __init__(self, number: int = 0, seats: tuple[Seat, ...] = ()) -> None:
        self.number = number
        self.seats = {seat.number: seat for seat in seats}
        self._check(seats)

    def _check(self, seats: tuple[Seat, ...]) -> None:
        """ValueError for what no coordinator would say: a journal or a tick that is not ours."""
        if len(self.seats) != len(seats):
            raise ValueError("a table of seats lists a number twice")
        sitting = [seat.peer for seat in seats if seat.lives]
        if len(set(sitting)) != len(sitting):
            raise ValueError("a table of seats gives a peer two places")
        for seat in seats:
            went = seat.gone or self.number
            if seat.number < 1 or not 0 < seat.since <= went <= self.number or not seat.share > 0:
                raise ValueError(f"a table of seats with number {self.number} lists {seat}")

    # ---- what a member asks ---------------------------------------------------------------------------------

    def lives(self, number: int) -> bool:
        seat = self.seats.get(number)
        return seat is not None and seat.lives

    @functools.cached_property
    def _living(self) -> dict[int, tuple[Seat, ...]]:
        stages: dict[int, list[Seat]] = {}
        for seat in self.seats.values():
            if seat.lives:
                stages.setdefault(seat.stage, []).append(seat)
        return {stage: tuple(seats) for stage, seats in stages.items()}

    def living(self, stage: int) -> tuple[Seat, ...]:
        return self._living.get(stage, ())

    def last_loss(self, stage: int) -> int:
        """The number of the last table that showed somebody of the stage gone; 0: nobody went."""
        return max((seat.gone for seat in self.seats.values() if seat.stage == stage), default=0)

    def last_change(self, stage: int) -> int:
        """The number of the last table that showed somebody new in the stage, or somebody gone."""
        return max((max(s.gone, s.since) for s in self.seats.values() if s.stage == stage), default=0)

    # ---- what the coordinator writes: each makes the next table ----------------------------------------------

    def seated(self, number: int, peer: str, stage: int, share: float = 1.0) -> Table:
        if number <= max(self.seats, default=0):
            raise ValueError(f"seat {number} is not new")
        if len(self.living(stage)) >= MEMBERS_PER_ROUND:
            raise ValueError(f"stage {stage} has {MEMBERS_PER_ROUND} seats, and no room for another")
        seat = Seat(number, peer, stage, share, since=self.number + 1)
        return Table(self.number + 1, (*self.seats.values(), seat))

    def unseated(self, number: int) -> Table:
        if not self.lives(number):
            raise ValueError(f"seat {number} is not there to be given up")
        gone = replace(self.seats[number], gone=self.number + 1)
        return Table(self.number + 1, tuple({**self.seats, number: gone}.values()))

    def of_next_batch(self, shares: Mapping[int, float]) -> Table:
        """Whoever went is of no interest any more: nothing of the committed batch changes hands.  `shares`: by number,
        where the wiring is to spread work otherwise."""
        living = (seat for seat in self.seats.values() if seat.lives)
        seats = (replace(seat, share=shares.get(seat.number, seat.share)) for seat in living)
        return Table(self.number + 1, tuple(seats))


@dataclass(frozen=True, slots=True)
class SeatPlace:
    """Of one member's machine (stage_scheduler.py): what stays for its life."""

    run_tag: bytes
    seat: Seat
    stages: int
    hands_most: int = 2  # works that the trainer has at once
    open_most: int = 0  # of a source: microbatches on their way; 0: as many as keep the line full

    @property
    def is_last(self) -> bool:
        return self.seat.stage == self.stages - 1


# ---- stage rates -------------------------------------------------------------------------------------------
# How fast one seat can be, and which stage of a model holds the others up: arithmetic of bytes and seconds.
# Pure.
#
# Called by the coordinator for the status, and by `farflung doctor` before anybody joins. Must not know
# members, seats' numbers or crossings' payloads: it is given the run's schema and what was measured.
#
# A seat computes each microbatch once, there and back. Meanwhile its line carries what comes over the borders
# of its stage and what goes: activations onwards, gradients back. All three go on at the same time, so the
# slowest says how fast the seat is. The seats of a stage add up, and the stage with the least sum says how
# fast the run is.

# What a seat, or a stage, is as fast as.
COMPUTE, LINE_UP, LINE_DOWN, FEW_SEATS = "compute", "line up", "line down", "too few seats"
_AS_MANY = 0.9  # of the next slowest stage's rate


@dataclass(frozen=True, slots=True)
class BorderTraffic:
    """What one microbatch carries over one border."""

    values: int  # that a codec makes smaller, both ways
    raw_bytes: int  # integers and riders, onwards only

    def onwards_bytes(self, codec: str) -> int:
        return math.ceil(self.values * BITS_PER_VALUE[codec] / 8) + self.raw_bytes

    def back_bytes(self, codec: str) -> int:
        return math.ceil(self.values * BITS_PER_VALUE[codec] / 8)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the line of a seat, for one microbatch."""

    up_bytes: int
    down_bytes: int


@dataclass(frozen=True, slots=True)
class SeatPace:
    """Microbatches a second, None: not known; and what it would have to be better in to be faster."""

    micros_per_s: float | None
    by: str = ""


def borders_of(model: ModelSchema, samples: int) -> tuple[BorderTraffic, ...]:
    """Between each stage and the next one, for a microbatch of so many samples."""
    return tuple(_crossed((*stage.gives,), model.riders, samples) for stage in model.stages[:-1])


def _crossed(gives: Sequence[BorderTensor], riders: Sequence[BorderTensor], samples: int) -> BorderTraffic:
    raw = [each for each in (*gives, *riders) if each.dtype in INTEGER_BYTES]
    floats = [each for each in gives if each.dtype not in INTEGER_BYTES]
    return BorderTraffic(
        values=samples * sum(math.prod(each.shape) for each in floats),
        raw_bytes=samples * sum(math.prod(each.shape) * INTEGER_BYTES[each.dtype] for each in raw),
    )


def border_after(borders: Sequence[BorderTraffic], stage: int) -> BorderTraffic:
    """Nothing crosses before the first stage, behind the last one, or while the model is not known."""
    return borders[stage] if 0 <= stage < len(borders) else BorderTraffic(0, 0)


def traffic_of(borders: Sequence[BorderTraffic], stage: int, codec: str) -> Traffic:
    before, after = border_after(borders, stage - 1), border_after(borders, stage)
    return Traffic(
        up_bytes=after.onwards_bytes(codec) + before.back_bytes(codec),
        down_bytes=before.onwards_bytes(codec) + after.back_bytes(codec),
    )


def seat_pace(unit_s: float, traffic: Traffic, up_bytes_per_s: float, down_bytes_per_s: float) -> SeatPace:
    """`unit_s`: busy seconds for one microbatch.  What is 0 is not known; without `unit_s` nothing is."""
    if unit_s <= 0:
        return SeatPace(None)
    seconds = {COMPUTE: unit_s}
    if up_bytes_per_s > 0:
        seconds[LINE_UP] = traffic.up_bytes / up_bytes_per_s
    if down_bytes_per_s > 0:
        seconds[LINE_DOWN] = traffic.down_bytes / down_bytes_per_s
    slowest = max(seconds, key=seconds.__getitem__)
    return SeatPace(1.0 / seconds[slowest], slowest)


def line_rate(traffic: Traffic, up_bytes_per_s: float, down_bytes_per_s: float) -> tuple[float, str]:
    """(microbatches a second that a line can carry, which way it is the narrower one)."""
    up = up_bytes_per_s / traffic.up_bytes if traffic.up_bytes else math.inf
    down = down_bytes_per_s / traffic.down_bytes if traffic.down_bytes else math.inf
    return (up, LINE_UP) if up <= down else (down, LINE_DOWN)


def stage_rate(seats: Sequence[SeatPace]) -> float | None:
    """Of all of them together; None as long as one of them says nothing."""
    known = [each.micros_per_s for each in seats if each.micros_per_s is not None]
    return sum(known) if known and len(known) == len(seats) else None


def narrowest(
    stages: Sequence[Sequence[SeatPace]], here: Sequence[int], least: int
) -> tuple[int, str] | None:
    """(the stage that holds the run up, why); None while that can't be said.  `here`: who could serve each stage.

    A stage that fewer than `least` serve holds everybody up, whatever they can.  Of others the slowest: because its
    seats are too few, if as many as the others have would do, or else because of what most of its seats would have to
    be better in.
    """
    short = [number for number, count in enumerate(here) if count < least]
    if short:
        return min(short, key=lambda number: here[number]), FEW_SEATS
    rates = [rate for rate in map(stage_rate, stages) if rate is not None]
    if not rates or len(rates) < len(stages):
        return None
    slowest = rates.index(min(rates))
    seats, others = stages[slowest], [len(stage) for stage in (*stages[:slowest], *stages[slowest + 1 :])]
    as_many = rates[slowest] * median(others) / len(seats) if others else 0.0
    if others and median(others) > len(seats) and as_many >= _AS_MANY * sorted(rates)[1]:
        return slowest, FEW_SEATS
    kinds = [pace.by for pace in seats]
    return slowest, max(kinds, key=kinds.count)
