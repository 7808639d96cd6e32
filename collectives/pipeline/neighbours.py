"""A member's neighbours: which seat a microbatch goes to, how many may wait where, and who fails to answer.  Pure."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable

from farflung.collectives.pipeline.seats import Seat

# ---- credits -----------------------------------------------------------------------------------------------
# How many activations may wait where: room given to senders, room spent at receivers, a source's window.
# Pure.
#
# Used by the machine of microbatches (stage_scheduler.py). Gradients never need room, activations do. So what
# waits drains towards the sources, and no circle of waits exists. Room is told as a number of activations in
# all, which only grows: a word of it that is lost, late or doubled does no harm. Must not know frames, tables
# or who anybody is.

WAITING_LEAST = 4
WAITING_S = 2.0  # so long a receiver's own work may wait in front of it
_USED_SMOOTHED = 0.8


class CreditsGiven:
    """At a receiver.  Whoever may send has one activation that nobody else can take from it.

    The limit never falls within a batch, and grows by one with every new sender: room that was given is not taken back,
    so that otherwise idle senders could hold all of it, for ever.
    """

    def __init__(self) -> None:
        self._base = WAITING_LEAST
        self._ever: set[int] = set()  # seats that were given room
        self._given: dict[int, int] = {}  # living senders
        self._received: dict[int, set[int]] = {}  # microbatches
        self._used: dict[int, float] = {}

    @property
    def limit(self) -> int:
        return self._base + len(self._ever)

    def on_unit(self, unit_s: float) -> None:
        """The trainer takes so long for one."""
        if unit_s > 0:
            self._base = max(self._base, int(WAITING_S / unit_s))

    def on_senders(self, seats: Iterable[int]) -> None:
        living = set(seats)
        self._ever |= living
        self._given = {seat: self._given.get(seat, 0) for seat in living}

    def admits(self, seat: int, micro: int) -> bool:
        received = self._received.get(seat, ())
        return micro in received or len(received) < self._given.get(seat, 0)

    def on_received(self, seat: int, micro: int) -> None:
        """Whether it was new or not: its sender has spent room on it."""
        received = self._received.setdefault(seat, set())
        if micro not in received and len(received) < self._given.get(seat, 0):
            received.add(micro)
            for each in self._used:
                self._used[each] *= _USED_SMOOTHED
            self._used[seat] = self._used.get(seat, 0.0) + 1.0

    def on_given_back(self, seat: int, micro: int) -> None:
        """It waits here no longer, and its sender has that room again."""
        self._received.get(seat, set()).discard(micro)

    def _open(self, seat: int) -> int:
        return self._given[seat] - len(self._received.get(seat, ()))

    def more(self, waiting: int) -> set[int]:
        """So many wait here: give what is free, first to whoever has none, then by what they used last."""
        free = self.limit - waiting - sum(self._open(seat) for seat in self._given)
        told: set[int] = set()
        while free > 0 and self._given:
            seat = min(sorted(self._given), key=self._claim)
            without = sum(not self._open(each) for each in self._given)
            if self._open(seat) and free <= without:
                break
            self._given[seat] += 1
            free -= 1
            told.add(seat)
        return told

    def _claim(self, seat: int) -> tuple[bool, float]:
        held = self._open(seat)
        return held > 0, (held + 1) / (1.0 + self._used.get(seat, 0.0))

    def total(self, seat: int) -> int:
        return self._given.get(seat, 0)

    @property
    def unspent(self) -> list[int]:
        """Seats that may not know yet what they were given."""
        return sorted(seat for seat in self._given if self._open(seat))


class CreditsHeld:
    """At a sender: the room that seats of the next stage have given."""

    def __init__(self) -> None:
        self._told: dict[int, int] = {}
        self._sent: dict[int, set[int]] = {}
        self._most: dict[int, int] = {}  # that was left at once

    def on_seats(self, seats: Iterable[int]) -> None:
        living = set(seats)
        self._told = {seat: self._told.get(seat, 0) for seat in living}
        self._sent = {seat: self._sent.get(seat, set()) for seat in living}

    def on_room(self, seat: int, total: int) -> bool:
        """True: it is news."""
        if total <= self._told.get(seat, total):
            return False
        self._told[seat] = total
        self._most[seat] = max(self._most.get(seat, 0), self.left(seat))
        return True

    def left(self, seat: int) -> int:
        return self._told.get(seat, 0) - len(self._sent.get(seat, ()))

    def most(self, seat: int) -> int:
        return self._most.get(seat, 0)

    @property
    def able(self) -> list[int]:
        return [seat for seat in self._told if self.left(seat) > 0]

    def on_sent(self, seat: int, micro: int) -> None:
        """A second copy to the same seat costs nothing."""
        self._sent[seat].add(micro)

    def on_given_back(self, seat: int, micro: int) -> None:
        self._sent.get(seat, set()).discard(micro)


QUEUED_LEAST, QUEUED_MOST = 4, 10  # of a source's own microbatches, on their way
WINDOW_LEAST = 2
_TIMES_KEPT = 16


class Window:
    """How many microbatches of its own a source has open: as many as keep the line full and no queue long.

    `most`: it grows no further than to this, or to what every stage can have in hand; 0: as far as it likes.
    """

    def __init__(self, stages: int, most: int = 0) -> None:
        self.size = max(WINDOW_LEAST, 2 * stages)
        self._most = max(self.size, most) if most else None
        self._best_s = 0.0
        self._times_s: deque[float] = deque(maxlen=_TIMES_KEPT)
        self._since = 0  # gradients since the size changed

    def on_back(self, took_s: float) -> None:
        self._best_s = min(self._best_s or took_s, took_s)
        self._times_s.append(took_s)
        self._since += 1
        usual = statistics.median(self._times_s)
        if self._since < self.size or usual <= 0:
            return  # what came back was not sent with this window
        queued = self.size * (1.0 - self._best_s / usual)
        step = 1 if queued < QUEUED_LEAST and self.size != self._most else -1 if queued > QUEUED_MOST else 0
        self.size = max(WINDOW_LEAST, self.size + step)
        self._since = 0

    def on_loss(self) -> None:
        """A seat of the next stage is gone, and with it a part of what carried the microbatches."""
        self.size, self._since = max(WINDOW_LEAST, self.size // 2), 0


# ---- seat router -------------------------------------------------------------------------------------------
# Which seat of the next stage a microbatch goes to: fair queueing by the shares of the seats. Pure.
#
# Called by the machine of microbatches, which knows who has room and can be talked to. Each sender keeps a
# virtual time for each seat and takes the seat that is due first; so in the long run the seats get
# microbatches as their shares are, without a word between senders. Must not know frames or what a microbatch
# is.

CORRECTION_MOST = 4.0  # a share is believed within so many times, whatever is seen of the seat
_SMOOTHED = 0.1  # of how full a seat is seen


class Routing:
    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance  # for ties
        self._peers: dict[int, str] = {}
        self._unreached: set[str] = set()
        self._shunned: frozenset[str] = frozenset()
        self._shares: dict[int, float] = {}
        self._at: dict[int, float] = {}  # virtual times
        self._fullness: dict[int, float] = {}  # moving mean, 0 to 1, of how much of its room is used up

    def on_seats(self, seats: Iterable[Seat]) -> None:
        """The living seats of the next stage.  A newcomer begins once, at the least time of the others.

        From zero it would get everything until it has caught up with a whole batch of the others' times.
        """
        sitting = list(seats)
        self._peers = {seat.number: seat.peer for seat in sitting}
        self._shares = {seat.number: seat.share for seat in sitting}
        self._at = {number: at for number, at in self._at.items() if number in self._shares}
        self._fullness = {number: self._fullness.get(number, 0.5) for number in self._shares}
        least = min(self._at.values(), default=0.0)
        for number in self._shares:
            self._at.setdefault(number, least)

    def choose(self, able: Collection[int], rather: int = 0) -> int | None:
        """One of these seats that can be talked to, by number, and its virtual time passes; None if there is none.

        `rather`: this one, if it is one of those.
        """
        here = {number for number, peer in self._peers.items() if peer not in self._unreached}
        willing = {number for number in here if self._peers[number] not in self._shunned} or here
        due = {number: self._at[number] + 1.0 / self.share(number) for number in willing.intersection(able)}
        if not due:
            return None
        chosen = rather if rather in due else min(sorted(due), key=lambda n: (due[n], self._chance()))
        self._at[chosen] = due[chosen]
        return chosen

    def on_lines(self, unreached: set[str], shunned: frozenset[str] = frozenset()) -> None:
        """Peers that I can't talk to: two of them may sit behind routers that let nobody in.  And those of no use
        before, who get nothing as long as others can be talked to."""
        self._unreached, self._shunned = unreached, shunned

    def on_room(self, number: int, left: int, most: int) -> None:
        """Seen of a seat: so much of its room is left, of so much at most."""
        if number in self._fullness and most > 0:
            full = 1.0 - min(left, most) / most
            self._fullness[number] += _SMOOTHED * (full - self._fullness[number])

    def share(self, number: int) -> float:
        """As told, corrected by what was seen: who is fuller than the others gets less."""
        usual = sum(self._fullness.values()) / len(self._fullness)
        return float(self._shares[number] * CORRECTION_MOST ** (usual - self._fullness[number]))


# ---- neighbour health --------------------------------------------------------------------------------------
# Neighbours of whom a member can't say that it gets on with them: what it tells the coordinator, and whom it
# avoids.
#
# Used by the machine of microbatches (stage_scheduler.py), one for each seat; `Shunned` by the agent of a
# stage, for all its seats, since a peer that gave one up comes back under another number. Nothing is decided
# here: a microbatch stays with whoever has it until the table shows that seat gone, and who goes is the
# coordinator's to say (coordinator/batches/seat_choice.py). Must not know frames, or how anybody is asked.
# Pure.

DAMAGED_TIMES = 2  # in a row: the first time it may have been anything
SHUNNED_S = 60.0


class NeighbourHealth:
    """Of one batch."""

    def __init__(self) -> None:
        self._damaged: dict[int, int] = {}  # by seat: crossings in a row that were of no use
        self._silent: set[int] = set()

    def clear(self) -> None:
        self._damaged.clear()
        self._silent.clear()

    def on_damaged(self, seat: int) -> bool:
        """True: somebody should hear of it now."""
        self._damaged[seat] = self._damaged.get(seat, 0) + 1
        return self._damaged[seat] == DAMAGED_TIMES

    def on_good(self, seat: int) -> None:
        """A crossing of it is as it should be."""
        self._damaged.pop(seat, None)

    def on_silent(self, silent: set[int]) -> list[int]:
        """All seats that answer nothing now.  Of these, whom somebody should hear of now."""
        news, self._silent = sorted(silent - self._silent), silent
        return news

    def complaints(self, lives: Callable[[int], bool]) -> dict[int, bool]:
        """By seat that lives; True: what comes from it is damaged."""
        damaged = {seat for seat, times in self._damaged.items() if times >= DAMAGED_TIMES}
        return {seat: seat in damaged for seat in sorted(damaged | self._silent) if lives(seat)}


class Shunned:
    """Peers that were complained of a while ago: they get nothing new, as long as there are others."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def on_complaints(self, peers: Iterable[str], now: float) -> None:
        self._until.update((peer, now + SHUNNED_S) for peer in peers)

    def now(self, now: float) -> frozenset[str]:
        self._until = {peer: until for peer, until in self._until.items() if now < until}
        return frozenset(self._until)
