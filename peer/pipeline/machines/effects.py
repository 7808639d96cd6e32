"""What a trainer's machine of synchronous batches tells its shell to do, besides what any trainer's does.  Types only.

Made by the machines beside it; carried out by their loops on a model, and by the simulator's trainers on numbers that
can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.peer.local.words import MicrobatchWork
from farflung.peer.trainer.effects import Effect


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add the gradient of these samples to the sums of the batch, each token as much as any other."""

    version: int
    micro: int  # its number in the batch
    epoch: int
    start: int  # positions [start, stop) of the epoch's order
    stop: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work on a microbatch of one stage: from the slots of its place, or from the data set, into the slot for it."""

    word: MicrobatchWork


@dataclass(frozen=True, slots=True)
class WriteSums:
    """Write the sums into the slot, divided by the tokens in them, as what falls if they are taken; and keep them."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LocalStep:
    """Take a step of the inner optimizer on the mean gradient of the tokens in the sums; then those are zero.

    run_step  the run's own step, which the rate follows from (optim/schedule.py)
    share     of the rate: a step of fewer microbatches than others is smaller by as much
    """

    run_step: int
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class WriteLearned:
    """Write what the local steps have moved since the anchor was loaded into the slot, as what falls if it is taken."""

    slot: int


@dataclass(frozen=True, slots=True)
class DropSums:
    """The sums are zero again."""


SumsEffect = Effect | Accumulate | StageWork | WriteSums | LocalStep | WriteLearned | DropSums
