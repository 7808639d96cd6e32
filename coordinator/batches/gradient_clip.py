"""By what the results of a batch are multiplied, so that its gradient is no longer than `[pipeline] clip`.  Pure.

Called when the round of the batch, or those of all stages, are at their end and wait for nothing but the record.
How long each chunk's result is, its maker said and whoever holds it has proven (rounds/round.py), to the bit; here
they are added up, and what follows is recorded: all peers multiply by the same number (`factor_of`).

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
from farflung.protocol.outer_numbers import factor_of, total

HARDLY_ANYTHING = 1e-3  # of a gradient's length: people are told


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
