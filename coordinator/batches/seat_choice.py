"""Who gets a seat in which stage, and which seat is given up where neighbours do not get on.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.coordinator.batches.batch_members import BatchMembers, BatchWorker
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.messages import Hello
from farflung.protocol.mode_words import Complaint

# ---- stage choice ------------------------------------------------------------------------------------------
# Which stage of the model a newcomer gets, of those that it could hold. Pure.
#
# Called by the run machine with every hello of a run in stages. Must not know members, seats or schemas: it
# is given who holds each stage, and how long members need for a microbatch there. No two newcomers jump into
# one gap: one decides.


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


# ---- complaints --------------------------------------------------------------------------------------------
# Which seat is given up where neighbours say that they can't work with each other. Pure.
#
# Asked by `batches.py` at every turn. What a seat says of its neighbours comes with every beat and is what it
# sees now: one does not answer, or what comes from it is damaged. Nobody can prove either, so nobody is
# believed alone. What hangs between two seats moves only when one of them is gone
# (collectives/pipeline/seats.py, R1), so one of them goes, and the other one keeps what it has counted:
#
# 1. whoever complains of most seats of a stage, two at least, while others of its own stage get on with them:
# its line; 2. whoever most seats of a stage complain of, two at least, where those have another one to turn
# to; 3. of two that are left, the one who complains, if others get on with whom it complains of: one word
# never suffices; 4. else whom it complains of, if there is another one to turn to; of two that complain of
# each other, the younger.
#
# Where neither has anybody beside it a seat that is given up would throw sums away and mend no line: the
# batch waits, and people are told which pair it waits for. Must not know members, rounds, or how a seat is
# given up.

HEAR_OTHERS_S = 10.0  # so long those beside a seat have to find out whether they get on with its neighbour
SETTLED_BEATS = 2.0  # heartbeats that a complaint stands, whatever else is known
GONE_MOST = 2  # seats that a peer gives up for this in one batch; then it gets no other one
OUT_MOST = 16  # batches; nor in the one after, and each time in twice as many, up to so many

Pair = tuple[int, int]  # (the seat that complains, the seat that it complains of)


@dataclass(frozen=True)
class GivesUp:
    seat: int
    about: int  # the seat at the other end
    by: int  # how many complained of the seat that goes; 0: it goes for its own complaints
    damaged: bool  # most said that what comes from it is damaged


@dataclass
class Complaints:
    heartbeat_s: float
    _since: dict[Pair, float] = field(default_factory=dict)
    _damaged: set[Pair] = field(default_factory=set)
    _gone: Counter[str] = field(default_factory=Counter)  # by peer: seats given up, in this batch
    _out: dict[str, int] = field(default_factory=dict)  # by peer: for so many batches it gets no seat
    _out_last: dict[str, int] = field(default_factory=dict)

    def hear(self, seat: int, said: Iterable[Complaint], now: float) -> None:
        """All that this seat says now: what it does not repeat is over."""
        about = {each.seat: each.damaged for each in said}
        self._since = {pair: at for pair, at in self._since.items() if pair[0] != seat or pair[1] in about}
        self._damaged = {pair for pair in self._damaged if pair[0] != seat}
        for other, damaged in about.items():
            self._since.setdefault((seat, other), now)
            if damaged:
                self._damaged.add((seat, other))

    def forget(self) -> None:
        """Another batch begins."""
        self._since.clear()
        self._damaged.clear()
        self._gone.clear()
        self._out = {peer: batches - 1 for peer, batches in self._out.items() if batches > 1}

    def on_gone(self, number: int) -> None:
        self._since = {pair: at for pair, at in self._since.items() if number not in pair}
        self._damaged = {pair for pair in self._damaged if number not in pair}

    def on_given_up(self, peer: str) -> None:
        """It gives a seat up for this."""
        self._gone[peer] += 1
        if self._gone[peer] == GONE_MOST:
            times = min(OUT_MOST, 2 * self._out_last.get(peer, 1))
            self._out[peer] = self._out_last[peer] = times

    def bars(self, peer: str) -> bool:
        """It gave seats up again and again: it gets none as long as somebody else of its stage has one."""
        return peer in self._out

    def doubted(self, seats: Mapping[int, BookedSeat]) -> list[int]:
        """Somebody complains of these: others are to look whether they get on with them."""
        return sorted({about for _, about in self._standing(seats)})

    def stuck(self, seats: Mapping[int, BookedSeat], now: float) -> list[Pair]:
        """Pairs that nothing helps but their line."""
        if self.verdict(seats, now) is not None:
            return []
        return [p for p in self._standing(seats) if now - self._since[p] >= self._patience_s(p, seats)]

    def verdict(self, seats: Mapping[int, BookedSeat], now: float) -> GivesUp | None:
        """`seats`: all living ones, by number.  One at a time: what others say may be over then."""
        standing = self._standing(seats)
        for pair in standing:
            found = self._of_most(pair, standing, seats, now)
            if found is not None:
                return found
        for pair in standing:
            if now - self._since[pair] >= self._patience_s(pair, seats):
                found = self._of_two(pair, standing, seats)
                if found is not None:
                    return found
        return None

    def _standing(self, seats: Mapping[int, BookedSeat]) -> list[Pair]:
        """Oldest first.  A complaint of a seat that is no neighbour, or nobody's, is none."""
        near = [
            pair
            for pair in self._since
            if pair[0] in seats and pair[1] in seats and abs(_stages_on(pair, seats)) == 1
        ]
        return sorted(near, key=lambda pair: (self._since[pair], pair))

    def _patience_s(self, pair: Pair, seats: Mapping[int, BookedSeat]) -> float:
        others = _beside(pair[0], seats)
        asked = any((other, pair[1]) not in self._since for other in others)
        return self.heartbeat_s * SETTLED_BEATS + (HEAR_OTHERS_S if asked else 0.0)

    def _of_most(
        self, pair: Pair, standing: list[Pair], seats: Mapping[int, BookedSeat], now: float
    ) -> GivesUp | None:
        who, about = pair
        mine, its = seats[who].stage, seats[about].stage
        settled = now - self._since[pair] >= self.heartbeat_s * SETTLED_BEATS
        complains = [p for p in standing if p[0] == who and seats[p[1]].stage == its]
        if settled and len(complains) >= 2 and 2 * len(complains) > _count(its, seats):
            # Others of its own stage get on with at least one of those that it complains of.
            if any((other, p[1]) not in self._since for other in _beside(who, seats) for p in complains):
                patient = now - self._since[pair] >= self._patience_s(pair, seats)
                return GivesUp(who, about, 0, False) if patient else None
            return None
        accusers = [p for p in standing if p[1] == about and seats[p[0]].stage == mine]
        most = len(accusers) >= 2 and 2 * len(accusers) > _count(mine, seats)
        if settled and most and all(self._has_another(p, seats) for p in accusers):
            damaged = sum(p in self._damaged for p in accusers)
            return GivesUp(about, who, len(accusers), damaged >= 2 and 2 * damaged > _count(mine, seats))
        return None

    def _of_two(self, pair: Pair, standing: list[Pair], seats: Mapping[int, BookedSeat]) -> GivesUp | None:
        who, about = pair
        others_get_on = any((other, about) not in self._since for other in _beside(who, seats))
        has_another = self._has_another(pair, seats)
        if others_get_on and has_another and (about, who) in standing:
            return GivesUp(max(pair), min(pair), int(max(pair) == about), False)
        if others_get_on:
            return GivesUp(who, about, 0, False)
        return GivesUp(about, who, 1, False) if has_another else None

    def _has_another(self, pair: Pair, seats: Mapping[int, BookedSeat]) -> bool:
        """Whoever complains has somebody else of that stage, of whom it does not complain."""
        who, about = pair
        return any((who, other) not in self._since for other in _beside(about, seats))


def _stages_on(pair: Pair, seats: Mapping[int, BookedSeat]) -> int:
    return seats[pair[1]].stage - seats[pair[0]].stage


def _count(stage: int, seats: Mapping[int, BookedSeat]) -> int:
    return sum(seat.stage == stage for seat in seats.values())


def _beside(number: int, seats: Mapping[int, BookedSeat]) -> list[int]:
    """The other seats of its stage."""
    return [n for n, seat in seats.items() if n != number and seat.stage == seats[number].stage]
