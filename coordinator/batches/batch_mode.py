"""Synchronous batches, also of a model that is cut into stages: where the mode begins.  Pure.

The core knows rounds, and fragments that are committed together; this says what the next version is made of, who
computes which microbatches, and which stage a newcomer holds.  Without this folder a run whose `[pipeline]` has a batch
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from farflung.coordinator.batches.batch_book import OF_BATCHES, BatchBook
from farflung.coordinator.batches.batch_members import BatchMembers
from farflung.coordinator.batches.batches import Batches
from farflung.coordinator.batches.seat_choice import held_by_newcomer, loads_of
from farflung.coordinator.modes.registry import CoordinatorMode, LossMode, ModeTools
from farflung.coordinator.rounds.round_policy import Done, RoundPolicy, SeatShare
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver, newest_held
from farflung.protocol.errors import AbortCause
from farflung.protocol.messages import Beat, Hello, Sent
from farflung.protocol.mode_words import BatchTick, ServeTick
from farflung.protocol.outer_numbers import factor_of, total

# ---- gradient clip -----------------------------------------------------------------------------------------
# By what the results of a batch are multiplied, so that its gradient is no longer than `[pipeline] clip`.
# Pure.
#
# Called when the round of the batch, or those of all stages, are at their end and wait for nothing but the
# record. How long each chunk's result is, its maker said and whoever holds it has proven (rounds/round.py),
# to the bit; here they are added up, and what follows is recorded: all peers multiply by the same number
# (`factor_of`).
#
# What a liar could gain. The length of a result can be told falsely only where nobody else holds it, or all
# who do lie alike: in a round of one, or among liars. Those make up their part of the gradient anyway. With a
# length that is too large they shorten the batch's step, as they can by a gradient of that length; with one
# that is too small their own gradient counts unclipped, as it does in a run without `clip`. Where hardly
# anything is left, people are told of whom.

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


# ---- batch mode --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPolicy(RoundPolicy):
    """Of the rounds of one stage."""

    core: Core
    batches: Batches
    stage: int
    names_members = True

    @property
    def is_begun(self) -> bool:
        return self.batches.book.batch is not None

    @property
    def under_way(self) -> bool:
        return self.batches.under_way

    def shares(self) -> tuple[Mapping[str, SeatShare], str]:
        return self.batches.shares(self.stage)

    def problem(self, share: SeatShare | None, sent: Sent) -> str:
        return self.batches.problem(share, sent)

    def finished(self, dones: Sequence[Done]) -> Sequence[Done]:
        """One factor for all of them: the gradient is that of the whole model."""
        ends = clipped(dones, self.core.manifest.batch_clip)
        self.core.warn(warning(ends, self.core.of))
        return ends

    def give_up(self, peers: Iterable[str], why: str) -> None:
        self.batches.give_up(peers, why)


class BatchMode(CoordinatorMode):
    whole_roster = True  # everybody may be everybody's neighbour

    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core, self._drivers, members = core, drivers, core.members
        house = BatchMembers(
            living=lambda: members.trainers,
            fits=tools.fits,
            in_round=lambda peer: any(each.may_use_work_of(peer) for each in drivers),
            flying=lambda stage: drivers[stage].round is not None,
            abort=lambda stage, why: drivers[stage].abort(AbortCause.SHARE_LOST, why),
            saved_by=core.saved_by,
            meet=lambda one, other: members.ways.meets(one, other),
            losses_for=lambda: [mode for mode in core.modes if isinstance(mode, LossMode)],
        )
        self.batches = Batches(core, house)

    def fragments_of(self, hello: Hello, peer: str) -> tuple[int, ...] | None:
        moves, pipeline = self.batches.moves, self._core.manifest.pipeline
        if pipeline.stages == 1:
            return None
        due = moves.goes_to(peer)
        if due is not None and due in hello.fragments:
            return (due,)
        first, living = self._drivers[hello.fragments[0]], self._core.members.alive
        here = {each.peer: each.stage for each in living.values() if moves.serves(each)}
        # After a restart those who have seats are not here yet, and come back to them.
        here = {seat.peer: seat.stage for seat in self.batches.book.seats.values()} | here
        others = [each for each in here if each != peer]
        held = [here[each] for each in others]
        # Of those who are not back yet nobody knows: they count as dialable.
        reached = {here[each] for each in others if each not in living or living[each].place.claimed}
        known = bool(hello.digest) and first.book.digests.get(hello.version) == hello.digest
        newest = newest_held(first) if known else hello.version
        loads = loads_of(held, reached, self.batches.units_s, pipeline.stages)
        return held_by_newcomer(pipeline, hello, loads, newest)

    def tell(self, peer: str, beat: Beat) -> Sequence[BatchTick | ServeTick]:
        member = self._core.members.members[peer]
        batch, due = self.batches.on_beat(member, beat), self.batches.moves.goes_to(peer)
        serve = ServeTick(due) if due is not None and due not in member.standings else None
        return [each for each in (batch, serve) if each is not None]

    def policy(self, fragment: int) -> RoundPolicy:
        return BatchPolicy(self._core, self.batches, fragment)

    def on_turn(self) -> bool:
        return self.batches.advance()

    def status(self) -> Mapping[str, Any]:
        return {"batch": self.batches.told()}

    def status_of_fragments(self) -> Sequence[Mapping[str, Any]]:
        return self.batches.told_of_stages() if self.batches.stages > 1 else ()

    def status_of(self, peer: str) -> Mapping[str, Any]:
        share = self.batches.share_of(peer) if self._core.members.members[peer].alive else {}
        return {"batch": share} if share else {}


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> BatchMode | None:
    return BatchMode(core, drivers, tools) if core.manifest.pipeline.batch else None


LedgerPart = BatchBook
RECORDS = OF_BATCHES
