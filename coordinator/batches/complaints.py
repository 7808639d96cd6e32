"""Which seat is given up where neighbours say that they can't work with each other.  Pure.

Asked by `batches.py` at every turn.  What a seat says of its neighbours comes with every beat and is what it sees
now: one does not answer, or what comes from it is damaged.  Nobody can prove either, so nobody is believed alone.
What hangs between two seats moves only when one of them is gone (collectives/pipeline/seats.py, R1), so one of them
goes, and the other one keeps what it has counted:

1. whoever complains of most seats of a stage, two at least, while others of its own stage get on with them: its line;
2. whoever most seats of a stage complain of, two at least, where those have another one to turn to;
3. of two that are left, the one who complains, if others get on with whom it complains of: one word never suffices;
4. else whom it complains of, if there is another one to turn to; of two that complain of each other, the younger.

Where neither has anybody beside it a seat that is given up would throw sums away and mend no line: the batch waits, and
people are told which pair it waits for.  Must not know members, rounds, or how a seat is given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.protocol.messages import Complaint

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
