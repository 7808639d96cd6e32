"""At which of the coordinator's addresses to knock, and when: the next one while the first is silent.  Pure.

Driven by the agent's connection to the coordinator (control.py).  Whoever answered last is knocked at first, and the
others after a moment, side by side: a dead address costs a quarter of a second, not a time-out.  An address at which a
coordinator answered that another one has replaced comes last for a while.  Must not know sockets or what is said.
"""

from __future__ import annotations

from farflung.protocol.join_url import Address

STAGGER_S = 0.25  # between two addresses
# With the one that answered last: its coordinator is started again, or a crowd stands before its door.
PATIENCE_S = 2.0
SPENT_PATIENCE_S = 0.5  # where it was silent for longer than that before anybody knocked
SHUN_S = 60.0
DOUBT_S = 10.0
SHUNNED_AFTER_S = 3.0  # so much later than the others


class Doors:
    def __init__(self, places: tuple[Address, ...]) -> None:
        """`places`: one at least, in order of preference."""
        self._places = places
        self.at = places[0]  # where the coordinator answered last; before that, where it should be
        self._answered = False  # it did there, and was no other one
        self._patience_s = PATIENCE_S
        self._since: float | None = None  # that it is knocked, without an answer
        self._shunned: dict[Address, float] = {}  # until when

    def look_at(self, places: tuple[Address, ...]) -> None:
        """Other places than before; what is known of those that stay is kept."""
        if self.at not in places and not self._answered:
            self.at = places[0]
        self._places = places if self.at in places else (self.at, *places)

    def knock(self, now: float, silent_s: float = 0.0) -> None:
        """`silent_s`: so long nothing was heard of whoever answered last."""
        if self._since is None:
            self._since = now
            self._patience_s = SPENT_PATIENCE_S if silent_s >= PATIENCE_S else PATIENCE_S

    def due(self, now: float) -> list[Address]:
        """Where somebody should be knocking by now."""
        if self._since is None:
            return []
        self._shunned = {place: until for place, until in self._shunned.items() if now < until}
        patience_s = self._patience_s if self._answered and self.at not in self._shunned else 0.0
        rest = [place for place in self._places if place != self.at]
        ahead = [self.at, *rest] if patience_s else list(self._places)
        first = [place for place in ahead if place not in self._shunned]
        last = [place for place in ahead if place in self._shunned]
        after_s = [patience_s * (at > 0) + STAGGER_S * at for at in range(len(first))]
        more_s = SHUNNED_AFTER_S if first else 0.0
        after_s += [more_s + STAGGER_S * (len(first) + at) for at in range(len(last))]
        waited_s = now - self._since
        return [place for place, at_s in zip((*first, *last), after_s, strict=True) if at_s <= waited_s]

    def answered(self, place: Address) -> None:
        self.at, self._answered, self._since = place, True, None

    def hang_up(self) -> None:
        """Nobody is knocking any more."""
        self._since = None

    def doubt(self, now: float) -> bool:
        """Whoever answered last leaves a hello unanswered: its door lives, and what is behind it may not.  True: there
        are others to try."""
        if len(self._places) < 2:
            return False
        self.shun(now, DOUBT_S)
        return True

    def shun(self, now: float, for_s: float = SHUN_S) -> None:
        """Whoever answered last is not the coordinator that is looked for."""
        self._shunned[self.at] = now + for_s
        self._answered, self._since = False, None
