"""Where a list of parts is cut into stages.

Owns: the cuts with the least largest stage, the check of cuts given by hand, what stages need and borders carry.
Called by: whoever fixes the cuts of a run, and the benchmark of pipelines.
Must not know: how the facts about parts were found, the network.

A stage's work is its forward pass four times: once on the way there, once more on the way back, and a backward pass,
which costs twice a forward one.  The last stage goes back at once and saves one of the four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from farflung.peer.pipeline.part_checks import PartFacts, Signature
from farflung.protocol.errors import UserError

_PASSES, _PASSES_OF_THE_LAST = 4, 3


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Parts [first, stop), what they need of a device, and what passes to the next stage (nothing after the last)."""

    first: int
    stop: int
    work_flops: int  # for one sample
    memory_bytes: int  # parameters, buffers and sums; activations come on top
    gives: tuple[Signature, ...]

    @property
    def border_bytes(self) -> int:
        """For one sample, uncompressed, one way."""
        return sum(signature.bytes for signature in self.gives)


def plan_stages(
    facts: Sequence[PartFacts], stages: int, cuts: Sequence[int] | Literal["auto"]
) -> list[StagePlan]:
    """`cuts`: the numbers of the parts at which stages 1, 2, ... begin."""
    if stages > len(facts):
        raise UserError(
            f"[pipeline] stages is {stages}, and the model has {len(facts)} parts: each stage holds at least one; take "
            f"at most {len(facts)} stages, or cut the model into more parts"
        )
    chosen = best_cuts(facts, stages) if cuts == "auto" else checked_cuts(cuts, stages, len(facts))
    borders = [0, *chosen, len(facts)]
    return [_stage(facts, first, stop) for first, stop in pairwise(borders)]


def checked_cuts(cuts: Sequence[int], stages: int, parts: int) -> list[int]:
    if len(cuts) != stages - 1:
        raise UserError(f"[pipeline] cuts {list(cuts)}: {stages} stages need {stages - 1}, found {len(cuts)}")
    for before, cut in pairwise([0, *cuts]):
        if cut <= before:
            raise UserError(
                f"[pipeline] cuts {list(cuts)}: {cut} after {before}; each stage begins after the one before"
            )
        if cut >= parts:
            raise UserError(
                f"[pipeline] cuts {list(cuts)}: there is no part {cut}, the last one of this model is {parts - 1}"
            )
    return list(cuts)


def best_cuts(facts: Sequence[PartFacts], stages: int) -> list[int]:
    """Cuts whose largest stage is least; of these, those that carry the fewest bytes; of these, the earliest."""
    upto = [0, *accumulate(fact.flops for fact in facts)]
    carried = [sum(signature.bytes for signature in fact.gives) for fact in facts]
    largest = _least_largest(upto, stages)
    return _fewest_bytes(upto, carried, stages, largest)


def stage_work(upto: Sequence[int], first: int, stop: int) -> int:
    """`upto[n]`: the FLOPs of the first n parts."""
    passes = _PASSES_OF_THE_LAST if stop == len(upto) - 1 else _PASSES
    return passes * (upto[stop] - upto[first])


def _least_largest(upto: Sequence[int], stages: int) -> int:
    count = len(upto) - 1
    least = [0, *([math.inf] * count)]  # of the first n parts in so many stages
    for stage in range(1, stages + 1):
        least = [
            min(
                (max(least[first], stage_work(upto, first, stop)) for first in range(stage - 1, stop)),
                default=math.inf,
            )
            for stop in range(count + 1)
        ]
    return int(least[count])


def _fewest_bytes(upto: Sequence[int], carried: Sequence[int], stages: int, largest: int) -> list[int]:
    """Backwards: what parts from `first` on cost in so many stages, none of which is larger than `largest`."""
    count = len(upto) - 1
    Way = tuple[float, list[int]]  # bytes at the borders, cuts
    nothing: Way = (math.inf, [])
    best: list[Way] = [nothing] * count + [(0, [])]
    for left in range(1, stages + 1):
        now = [nothing] * (count + 1)
        for first in range(count):
            # The last stage ends with the last part; any other leaves a part to each stage after it.
            for stop in [count] if left == 1 else range(first + 1, count):
                if stage_work(upto, first, stop) <= largest:
                    border = 0 if left == 1 else carried[stop - 1]
                    rest_bytes, rest = best[stop]
                    way = (border + rest_bytes, [stop, *rest] if left > 1 else [])
                    now[first] = min(now[first], way)
        best = now
    return best[0][1]


def _stage(facts: Sequence[PartFacts], first: int, stop: int) -> StagePlan:
    upto = [0, *accumulate(fact.flops for fact in facts)]
    return StagePlan(
        first=first,
        stop=stop,
        work_flops=stage_work(upto, first, stop),
        memory_bytes=sum(fact.memory_bytes for fact in facts[first:stop]),
        gives=facts[stop - 1].gives if stop < len(facts) else (),
    )
