"""Which seat of the next stage a microbatch goes to: fair queueing by the shares of the seats.  Pure.

Called by the machine of microbatches, which knows who has room and can be talked to.  Each sender keeps a virtual time
for each seat and takes the seat that is due first; so in the long run the seats get microbatches as their shares are,
without a word between senders.  Must not know frames or what a microbatch is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from farflung.collectives.pipeline.seats import Seat

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
