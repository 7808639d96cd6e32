"""How many activations may wait where: room given to senders, room spent at receivers, a source's window.  Pure.

Used by the machine of microbatches (stage_scheduler.py).  Gradients never need room, activations do.  So what waits
drains towards the sources, and no circle of waits exists.  Room is told as a number of activations in all, which only
grows: a word of it that is lost, late or doubled does no harm.  Must not know frames, tables or who anybody is.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

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
