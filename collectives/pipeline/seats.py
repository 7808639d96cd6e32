"""The numbered table of seats: who has which place in which stage, who is gone, and what follows from that.  Pure.

The coordinator writes it (each change is durable and has the next number) and tells it as a snapshot; the machine of a
member (stage_scheduler.py) reads it.  Must not know microbatches, frames or how anybody was found to be gone.

R1: a microbatch changes hands only when a table shows that its holder is gone.  So all that this file answers is who
lives, who went, and by which number; nobody decides by a timeout of its own.  The number of a seat is never used again:
a peer that comes back, or whose trainer died, sits down under another one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from farflung.protocol.limits import MEMBERS_PER_ROUND


@dataclass(frozen=True, slots=True)
class Seat:
    number: int  # never used again
    peer: str
    stage: int
    share: float  # of the microbatches of its stage, as the coordinator would have them spread
    since: int  # the table that showed it first
    gone: int = 0  # the table that showed that it is gone; 0: it is here

    @property
    def lives(self) -> bool:
        return not self.gone


class Table:
    """A snapshot.  A seat that it does not list is gone for so long that nobody needs to know when."""

    def __init__(self, number: int = 0, seats: tuple[Seat, ...] = ()) -> None:
        self.number = number
        self.seats = {seat.number: seat for seat in seats}
        self._check(seats)

    def _check(self, seats: tuple[Seat, ...]) -> None:
        """ValueError for what no coordinator would say: a journal or a tick that is not ours."""
        if len(self.seats) != len(seats):
            raise ValueError("a table of seats lists a number twice")
        sitting = [seat.peer for seat in seats if seat.lives]
        if len(set(sitting)) != len(sitting):
            raise ValueError("a table of seats gives a peer two places")
        for seat in seats:
            went = seat.gone or self.number
            if seat.number < 1 or not 0 < seat.since <= went <= self.number or not seat.share > 0:
                raise ValueError(f"a table of seats with number {self.number} lists {seat}")

    # ---- what a member asks ---------------------------------------------------------------------------------

    def lives(self, number: int) -> bool:
        seat = self.seats.get(number)
        return seat is not None and seat.lives

    @functools.cached_property
    def _living(self) -> dict[int, tuple[Seat, ...]]:
        stages: dict[int, list[Seat]] = {}
        for seat in self.seats.values():
            if seat.lives:
                stages.setdefault(seat.stage, []).append(seat)
        return {stage: tuple(seats) for stage, seats in stages.items()}

    def living(self, stage: int) -> tuple[Seat, ...]:
        return self._living.get(stage, ())

    def last_loss(self, stage: int) -> int:
        """The number of the last table that showed somebody of the stage gone; 0: nobody went."""
        return max((seat.gone for seat in self.seats.values() if seat.stage == stage), default=0)

    def last_change(self, stage: int) -> int:
        """The number of the last table that showed somebody new in the stage, or somebody gone."""
        return max((max(s.gone, s.since) for s in self.seats.values() if s.stage == stage), default=0)

    # ---- what the coordinator writes: each makes the next table ----------------------------------------------

    def seated(self, number: int, peer: str, stage: int, share: float = 1.0) -> Table:
        if number <= max(self.seats, default=0):
            raise ValueError(f"seat {number} is not new")
        if len(self.living(stage)) >= MEMBERS_PER_ROUND:
            raise ValueError(f"stage {stage} has {MEMBERS_PER_ROUND} seats, and no room for another")
        seat = Seat(number, peer, stage, share, since=self.number + 1)
        return Table(self.number + 1, (*self.seats.values(), seat))

    def unseated(self, number: int) -> Table:
        if not self.lives(number):
            raise ValueError(f"seat {number} is not there to be given up")
        gone = replace(self.seats[number], gone=self.number + 1)
        return Table(self.number + 1, tuple({**self.seats, number: gone}.values()))

    def of_next_batch(self, shares: Mapping[int, float]) -> Table:
        """Whoever went is of no interest any more: nothing of the committed batch changes hands.  `shares`: by number,
        where the wiring is to spread work otherwise."""
        living = (seat for seat in self.seats.values() if seat.lives)
        seats = (replace(seat, share=shares.get(seat.number, seat.share)) for seat in living)
        return Table(self.number + 1, tuple(seats))


@dataclass(frozen=True, slots=True)
class SeatPlace:
    """Of one member's machine (stage_scheduler.py): what stays for its life."""

    run_tag: bytes
    seat: Seat
    stages: int
    hands_most: int = 2  # works that the trainer has at once
    open_most: int = 0  # of a source: microbatches on their way; 0: as many as keep the line full

    @property
    def is_last(self) -> bool:
        return self.seat.stage == self.stages - 1
