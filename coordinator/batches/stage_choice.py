"""Which stage of the model a newcomer gets, of those that it could hold.  Pure.

Called by the run machine with every hello of a run in stages.  Must not know members, seats or schemas: it is given who
holds each stage, and how long members need for a microbatch there.  No two newcomers jump into one gap: one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.coordinator.batches.batch_members import BatchMembers, BatchWorker
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.messages import Hello


@dataclass(frozen=True)
class StageLoad:
    """A stage as it is held now."""

    members: int  # that are here
    cost: float  # of one microbatch, in any unit that all stages have
    reached: bool = True  # some of them can be dialled


def loads_of(
    held: Sequence[int], reached: Collection[int], unit_s: Mapping[int, Sequence[float]], stages: int
) -> list[StageLoad]:
    """`held`: the stage of each member that is here; `reached`: stages in which somebody can be dialled; `unit_s`: by
    stage, what seats measured."""
    costs = enumerate(_costs(unit_s, stages))
    return [StageLoad(held.count(stage), cost, stage in reached) for stage, cost in costs]


def _costs(unit_s: Mapping[int, Sequence[float]], stages: int) -> list[float]:
    """Of one microbatch in each stage, by what members measured; alike, while that is not known of all stages."""
    measured = [[each for each in unit_s.get(stage, ()) if each > 0] for stage in range(stages)]
    return [median(each) for each in measured] if all(measured) else [1.0] * stages


def chosen(
    offered: Sequence[int], on_disk: bool, loads: Sequence[StageLoad], least: int, dialable: bool = True
) -> int:
    """Of the stages `offered`; `on_disk`: the state of the first one is with the newcomer; `least`: members that each
    stage needs; `dialable`: it says that others can dial it.

    A stage that nobody holds, or too few, comes first: without it no batch begins.  Then whoever has a state need not
    fetch another.  Then a stage whose state a single member has: it must not be lost with that one.  Else the stage
    with the fewest members for what it costs: the run is as fast as its slowest stage.
    Peers that nobody can dial can't talk to each other: where there are only such, no other one comes if it may go
    elsewhere, and the first one that can be dialled does.
    """
    alone = [stage for stage in offered if loads[stage].members and not loads[stage].reached]
    if not dialable:
        others = [stage for stage in offered if stage not in alone] or offered
        on_disk, offered = on_disk and others[0] == offered[0], others
    short = [stage for stage in offered if loads[stage].members < least]
    if short:
        fewest = min(loads[stage].members for stage in short)
        emptiest = [stage for stage in short if loads[stage].members == fewest]
        return offered[0] if on_disk and offered[0] in emptiest else min(emptiest)
    if dialable and alone:
        return offered[0] if on_disk and offered[0] in alone else min(alone)
    if on_disk:
        return offered[0]
    singles = [stage for stage in offered if loads[stage].members == 1]
    return min(singles or offered, key=lambda stage: (loads[stage].members / loads[stage].cost, stage))


def held_by_newcomer(
    pipeline: PipelineSection,
    hello: Hello,
    loads: Sequence[StageLoad],
    newest: int,
) -> tuple[int, ...]:
    """Which fragment it holds from now on: one stage of those that it offers.

    `newest`: the newest version of its first stage that somebody here holds.  Whoever brings a newer one brings it to
    that stage, or the run would go back behind it.
    """
    if hello.version > newest:
        return hello.fragments[:1]
    on_disk, least = hello.version >= 0, pipeline.min_per_stage
    return (chosen(hello.fragments, on_disk, loads, least, bool(hello.address)),)


# ---- stage reach -------------------------------------------------------------------------------------------
# Stages in which nobody can be dialled: how many seats such a stage may have. Pure.
#
# Asked by `batches.py`. Two peers behind routers that let nobody in talk to each other only where they met
# past these, or at a relay. A stage can make a round together if somebody can be dialled whom all of them
# dial, or if one of them meets all the others. While that is not so, one seat has the stage for itself, since
# a round of one needs no line; else a batch that is counted could never be summed up. Must not know how
# anybody was found to be dialable, or to meet others.

WHY_GIVEN_UP = (
    "nobody of its stage can be dialled, nor meets all others there, and an older seat has it for itself"
)


@dataclass
class StageReach:
    """Which stages nobody can dial into, and since when: a dialable peer that reconnects is soon back."""

    _without_since: dict[int, float] = field(default_factory=dict)  # by stage: nobody there can be dialled

    def may_sit(self, worker: BatchWorker, served: Iterable[BookedSeat], house: BatchMembers) -> bool:
        """`served`: the seats of its stage."""
        mates = {seat.peer for seat in served}
        there = (each for each in house.living().values() if each.stage == worker.stage)
        return (
            not mates
            or any(each.dialable and each.verified for each in there)
            or _make_a_round({worker.peer, *mates}, house.meet)
        )

    def too_many(
        self, seats: Iterable[BookedSeat], house: BatchMembers, now: float, patience_s: float
    ) -> list[BookedSeat]:
        """Seats that can have no part in a round, the stage's oldest one excepted, whoever comes back within the
        patience."""
        sitting: dict[int, list[BookedSeat]] = {}
        for seat in seats:
            sitting.setdefault(seat.stage, []).append(seat)
        reached = _reached(house.living())
        without = [
            stage
            for stage, there in sitting.items()
            if stage not in reached and not _make_a_round({seat.peer for seat in there}, house.meet)
        ]
        self._without_since = {stage: self._without_since.get(stage, now) for stage in without}
        return [
            seat
            for stage, since in self._without_since.items()
            if now - since >= patience_s
            for seat in sorted(sitting[stage], key=lambda seat: seat.number)[1:]
        ]

    def why_no_way(self, stages: int, house: BatchMembers) -> str:
        """Neighbouring stages of which nobody can be dialled, nor meets anybody of the other, in words; empty: there is
        a way."""
        workers = house.living()
        held, reached = {worker.stage for worker in workers.values()}, _reached(workers)
        shut = [stage for stage in range(stages) if stage in held and stage not in reached]
        for stage in shut:
            if stage + 1 in shut and not _meet_somewhere(stage, workers, house.meet):
                return (
                    f"nobody of stages {stage} and {stage + 1} can be dialled, and they don't meet past their routers "
                    "or at a relay, so that they can't reach each other: one peer there needs an open port "
                    "(farflung doctor)"
                )
        return ""


Meet = Callable[[str, str], bool]


def _make_a_round(peers: Collection[str], meet: Meet) -> bool:
    """One of them meets all the others, and can own the chunks of all."""
    return any(all(other == one or meet(one, other) for other in peers) for one in peers)


def _meet_somewhere(stage: int, workers: Mapping[str, BatchWorker], meet: Meet) -> bool:
    """Somebody of this stage and somebody of the next one."""
    here, there = (
        [peer for peer, worker in workers.items() if worker.stage == at] for at in (stage, stage + 1)
    )
    return any(meet(one, other) for one in here for other in there)


def _reached(workers: Mapping[str, BatchWorker]) -> set[int]:
    """In one pass, or a thousand workers in 32 stages would be looked at 32 times."""
    return {worker.stage for worker in workers.values() if worker.dialable and worker.verified}
