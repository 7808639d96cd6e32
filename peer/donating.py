"""When a peer lets others have a copy of its optimizer's state, and for how long the copy is kept.  Pure.

Owned by donor.py, the agent's hand.  A copy costs the trainer a moment between two steps and the machine the
room that it takes, so there is one at a time, a new one only now and then, whoever asks and how often; those who
ask meanwhile get the same one.  Must not know files, frames or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAKE_EVERY_S = 120.0  # a member that asks without end must not stop the trainer again and again
FRESH_S = 60.0  # a copy that is older is given only to those who have begun with it
UNUSED_S = 30.0  # nobody has asked for a piece for so long: the copy goes
KEPT_MOST_S = 1800.0
MAKING_MOST_S = 60.0  # a trainer that is busy with something else for so long has none to give
TIMES_GIVEN = 2  # to one peer: what was lost on the way is asked for again, but not without end


@dataclass
class Copy:
    number: int
    asked_at: float
    made_at: float = 0.0
    used_at: float = 0.0
    size: int = 0  # of the file; 0: it is being made
    given_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def is_made(self) -> bool:
        return self.size > 0


class Donating:
    def __init__(self) -> None:
        self.copy: Copy | None = None
        self._last_number = 0
        self._last_at: float | None = None

    def may_ask(self, now: float) -> bool:
        """Is there a copy for somebody who begins, or one on its way, or may one be made?"""
        if self.copy is not None:
            return not self.copy.is_made or now - self.copy.made_at < FRESH_S
        return self._last_at is None or now - self._last_at >= MAKE_EVERY_S

    def make(self, now: float) -> int:
        """The number of the copy that the trainer is asked for."""
        assert self.copy is None and self.may_ask(now)
        self._last_number, self._last_at = self._last_number + 1, now
        self.copy = Copy(self._last_number, asked_at=now)
        return self._last_number

    def made(self, number: int, size: int, now: float) -> bool:
        """The copy is there; False: nobody waits for this one any more."""
        copy = self.copy
        if copy is None or copy.number != number or copy.is_made:
            return False
        copy.size, copy.made_at, copy.used_at = size, now, now
        return True

    def give(self, to: str, number: int, size: int, now: float) -> bool:
        """May this peer have so many bytes of that copy?"""
        copy = self.copy
        if copy is None or not copy.is_made or copy.number != number:
            return False
        given = copy.given_bytes.get(to, 0) + size
        if given > TIMES_GIVEN * copy.size + size:
            return False
        copy.given_bytes[to], copy.used_at = given, now
        return True

    def drop(self) -> None:
        self.copy = None

    def is_over(self, now: float) -> bool:
        """The copy is of no use any more, or will not come."""
        copy = self.copy
        if copy is None:
            return False
        if not copy.is_made:
            return now - copy.asked_at >= MAKING_MOST_S
        return now - copy.used_at >= UNUSED_S or now - copy.made_at >= KEPT_MOST_S
