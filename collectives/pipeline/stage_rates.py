"""How fast one seat can be, and which stage of a model holds the others up: arithmetic of bytes and seconds.  Pure.

Called by the coordinator for the status, and by `farflung doctor` before anybody joins.  Must not know members, seats'
numbers or crossings' payloads: it is given the run's schema and what was measured.

A seat computes each microbatch once, there and back.  Meanwhile its line carries what comes over the borders of its
stage and what goes: activations onwards, gradients back.  All three go on at the same time, so the slowest says how
fast the seat is.  The seats of a stage add up, and the stage with the least sum says how fast the run is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from farflung.collectives.pipeline.crossing import INTEGER_BYTES
from farflung.protocol.model_schema import BorderTensor, ModelSchema
from farflung.protocol.round_words import BITS_PER_VALUE

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

    def back_bytes(self, gradient_codec: str) -> int:
        return math.ceil(self.values * BITS_PER_VALUE[gradient_codec] / 8)


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


def traffic_of(borders: Sequence[BorderTraffic], stage: int, codec: str, gradient_codec: str) -> Traffic:
    before, after = border_after(borders, stage - 1), border_after(borders, stage)
    return Traffic(
        up_bytes=after.onwards_bytes(codec) + before.back_bytes(gradient_codec),
        down_bytes=before.onwards_bytes(codec) + after.back_bytes(gradient_codec),
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
