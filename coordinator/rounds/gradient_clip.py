"""By what the results of a batch are multiplied, so that its gradient is no longer than `[pipeline] clip`.  Pure.

Called when the round of the batch, or those of all stages, are at their end and wait for nothing but the record, and by
the replay of a run, which computes the factor anew from the results that were kept (console/history/audit_factors.py).
How long each chunk's result is, its maker said and whoever holds it has proven (round.py), to the bit; here they
are added up, in one place, and what follows is recorded: all peers multiply by the same number.

    norm    the root of the sum of squares over every chunk of every stage, without buffers: fsum, so in any order
    factor  min(1, clip / (norm + 1e-6)), rounded once to fp32: what torch.nn.utils.clip_grad_norm_ multiplies by

What a liar could gain.  The length of a result can be told falsely only where nobody else holds it, or all who do lie
alike: in a round of one, or among liars.  Those make up their part of the gradient anyway.  With a length that is too
large they shorten the batch's step, as they can by a gradient of that length; with one that is too small their own
gradient counts unclipped, as it does in a run without `clip`.  Where hardly anything is left, people are told of whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from farflung.coordinator.rounds.steps import Done
from farflung.protocol.outer_numbers import fp32

SMALL = 1e-6  # as torch has it
HARDLY_ANYTHING = 1e-3  # of a gradient's length: people are told


def factor_of(squares: Sequence[float], clip: float) -> float:
    """`squares`: of the lengths of all parts of one gradient."""
    norm = math.sqrt(total(squares))
    return min(1.0, fp32(clip / (norm + SMALL))) if math.isfinite(norm) else 0.0


def clipped(stages: Sequence[Done], clip: float) -> list[Done]:
    """The ends of the rounds that one record commits; as they are where nothing is to be clipped."""
    if math.isinf(clip):
        return list(stages)
    squares = [total(done.lengths) for done in stages]
    factor = factor_of(squares, clip)
    return [
        replace(
            done,
            commit=structs.replace(done.commit, factor=factor),
            norm=math.sqrt(square) if math.isfinite(square) else None,
        )
        for done, square in zip(stages, squares, strict=True)
    ]


def warning(stages: Sequence[Done], of: Callable[[int], str]) -> str:
    """For people, where hardly anything of a gradient is left: whose results are so long.  Empty: all is well.  `of`:
    a fragment in words."""
    factor = stages[0].commit.factor
    if factor >= HARDLY_ANYTHING:
        return ""
    commit, norm = max(
        ((done.commit, math.inf if done.norm is None else done.norm) for done in stages),
        key=lambda each: each[1],
    )
    told = f"{norm:.3g}" if math.isfinite(norm) else "longer than numbers go"
    return (
        f"hardly anything is learned by version {commit.version}: its gradient is multiplied by {factor:.3g}, since "
        f"the results{of(commit.fragment)} are {told}; has the model diverged, or does somebody there lie?"
    )


def total(squares: Sequence[float]) -> float:
    """Of the chunks of a stage, or of all stages: rounded once, so in any order."""
    try:
        return math.fsum(squares)
    except OverflowError:  # of lengths that nobody else holds: no result is so long
        return math.inf
