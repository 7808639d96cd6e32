"""Which samples of a batch are a rank's, and which ranks see the same ones.  Pure.

Called by `run.batches`.  Must not know leases beyond spans of positions, meshes, or how a batch is made.

A batch of an island is as long as the batches of its data ranks together.  Each of them takes its part of it, without
a word to the others: they all hold the same leases.  Ranks that work on one batch together (tensor, context or pipeline
parallel) are one data rank.

Where nothing more is leased a batch may be short.  All ranks must take the step all the same, since they sum gradients
together: one for which no sample is left reads one of the others' once more, and it weighs nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from farflung.peer.data.leased_data import Span
from farflung.protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Of each batch, the one with this number of so many."""

    number: int = 0
    of: int = 1
    counts: bool = True  # of the ranks that see the same samples, the one that says how many they were

    def bounds(self, samples: int) -> tuple[int, int, bool]:
        """[first, stop) of so many samples, and whether they are this rank's own: else one of another's."""
        first, stop = samples * self.number // self.of, samples * (self.number + 1) // self.of
        if first < stop or not samples:
            return first, stop, True
        return self.number % samples, self.number % samples + 1, False

    def weight(self, samples: int) -> float:
        """By how much this rank's mean over its samples counts in the mean over all ranks' means."""
        first, stop, own = self.bounds(samples)
        return (stop - first) * self.of / samples if samples and own else 0.0

    def spans(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Of the spans of a batch, one behind the other, those of this part."""
        first, stop, _ = self.bounds(sum(span.stop - span.start for span in spans))
        found: list[Span] = []
        before = 0
        for span in spans:
            size = span.stop - span.start
            start, end = max(first - before, 0), min(stop - before, size)
            if start < end:
                found.append(replace(span, start=span.start + start, stop=span.start + end))
            before += size
        return tuple(found)


WHOLE = BatchPart()


def agreed_part(
    gather: Callable[[bytes], Sequence[bytes]],
    rank: int,
    said: tuple[int, int] | None,
    sharers: tuple[int, ...],
) -> BatchPart:
    """This rank's, as all ranks find it at the same time: by what the script says, or by who shares a batch."""
    told = [
        msgspec.msgpack.decode(each, type=tuple[tuple[int, int] | None, tuple[int, ...]])
        for each in gather(msgspec.msgpack.encode((said, sharers)))
    ]
    by_script = [theirs for theirs, _ in told if theirs is not None]
    if by_script and len(by_script) < len(told):
        raise UserError("data_rank: some ranks say it and some do not; say it on every rank or on none")
    meshes = [shared for _, shared in told]
    return part_of(by_script or [data_ranks(meshes, each) for each in range(len(told))], rank)


def part_of(said: Sequence[tuple[int, int]], rank: int) -> BatchPart:
    """`said`: of each rank, which data rank it is, and of how many.  UserError where they do not fit together."""
    counts = {of for _, of in said}
    numbers = {number for number, _ in said}
    if len(counts) != 1 or numbers != set(range(next(iter(counts)))):
        told = ", ".join(f"rank {r}: {number} of {of}" for r, (number, of) in enumerate(said))
        raise UserError(
            f"data_rank: every rank must say which part of each batch is its, the parts counted from 0 and none left "
            f"out; found {told}"
        )
    number, of = said[rank]
    first = next(other for other, (theirs, _) in enumerate(said) if theirs == number)
    return BatchPart(number, of, counts=first == rank)


def data_ranks(sharers: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """`sharers`: of each rank, those that see the same samples, itself among them.  Its data rank, and of how many."""
    groups = sorted({tuple(sorted(each)) for each in sharers})
    if sorted(each for group in groups for each in group) != list(range(len(sharers))):
        raise UserError(
            f"the meshes do not say which ranks work on one batch together: {list(map(list, sharers))}; say it "
            "yourself, data_rank=(number, of)"
        )
    return next(number for number, group in enumerate(groups) if rank in group), len(groups)


# ---- looks -------------------------------------------------------------------------------------------------
# How many steps the ranks of an island take between two looks at the agent. Pure.
#
# Rank 0 has the pace and says with each look when the next one is, so that all look at the same step. Called
# by island.py; an outlook is made by the trainer's machine. Must not know models, gloo, or what the words
# mean.
#
# A look is an exchange that all ranks wait for. After every step it would take a good part of a short one,
# and for what it brings a moment is nothing: an agent's words come over a network, a few times in a period.
# What follows from the count of steps alone is never late: all ranks know that it is due, and look at that
# step.

SHARE = 0.003  # of the time of training, for looks
LATEST_S = 0.5  # a word waits no longer than this, as far as the pace of the last steps tells
MOST_STEPS = 32  # whatever they take: a step may suddenly take far longer
SEEN = 8  # steps, and looks, by which both are measured; the first steps are all looked at


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of a step that is taken and not counted yet: the same on all ranks.

    due_at   by the clock: the shell is to hear the time by then
    """

    is_due: bool  # something may follow from this very step, by its count
    steps: int = MOST_STEPS  # so many may pass after it without a word
    due_at: float = math.inf


class LookPace:
    """How long steps and looks take on rank 0."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=SEEN)
        self._looks_s: deque[float] = deque(maxlen=SEEN)
        self._began: float | None = None  # of the step that is under way

    def on_step(self, now: float) -> None:
        """It is over."""
        if self._began is not None:
            self._steps_s.append(now - self._began)
        self._began = now

    def on_look(self, began: float, now: float) -> None:
        """After a step; what is waited for a slower rank counts, too."""
        self._looks_s.append(now - began)
        self._began = now

    def on_waited(self) -> None:
        """For words, or for what others write: that is no part of a step."""
        self._began = None

    def steps(self, outlook: Outlook, now: float) -> int:
        """From one look to the next."""
        if len(self._steps_s) < SEEN or not self._looks_s:
            return 1
        step_s = statistics.median(self._steps_s)
        if step_s <= 0.0:
            return 1
        # Up to a moment of the clock half of the way each time: steps are not all alike.
        room_s = min(LATEST_S, 0.5 * (outlook.due_at - now))
        wanted = math.ceil(statistics.fmean(self._looks_s) / (SHARE * step_s))
        return max(1, min(wanted, int(room_s / step_s), outlook.steps, MOST_STEPS))
