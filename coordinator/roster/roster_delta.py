"""A list of contacts that changes, told by what is new in it since the member heard of it last.  Pure.

Used by the membership, for the one list of everybody, and by the acquaintances, for one list of each member.  It knows
who is in it since which number, not the contacts themselves: those are looked up when they are told.

A member names in each beat the number of the list that it has.  Words may cross: it may have heard of a newer list than
the one that it named last.  So a difference says all that changed *since* a number, and is good for every list from
that number on.  Whoever names a number that is none of its list's is told the whole list: who lies, lies to itself.
Must not know who asks, or why somebody is in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

from farflung.protocol.limits import ROSTER_GONE_MOST
from farflung.protocol.round_words import Contact

WHOLE = 0  # the number of no list: what is told since then is the whole list


class RosterNews(NamedTuple):
    """`roster`: None where it is the one that the member has."""

    number: int
    roster: tuple[Contact, ...] | None
    since: int = WHOLE
    gone: tuple[str, ...] = ()  # who was in a list since then, and is not in this one

    @property
    def told(self) -> dict[str, Any]:
        """As a tick has it."""
        return {
            "roster_no": self.number,
            "roster": self.roster,
            "roster_since": self.since,
            "roster_gone": self.gone,
        }


class RosterDelta:
    def __init__(self, number: int = WHOLE) -> None:
        self.number = number
        # Nothing is known of what went before this number.
        self._known_from = number
        # Peer -> the number under which it came or changed, or went: the newest last.
        self._at: dict[str, int] = {}
        self._gone: dict[str, int] = {}

    def __contains__(self, peer: str) -> bool:
        return peer in self._at

    def __len__(self) -> int:
        return len(self._at)

    def put(self, peer: str, number: int) -> None:
        """It is new, or its contact is another one.  Numbers never fall."""
        self._at.pop(peer, None)
        self._gone.pop(peer, None)
        self._at[peer] = self.number = number

    def drop(self, peer: str, number: int) -> bool:
        """True if it was in it."""
        if self._at.pop(peer, None) is None:
            return False
        self._gone[peer] = self.number = number
        if len(self._gone) > ROSTER_GONE_MOST:
            oldest = next(iter(self._gone))
            self._known_from = self._gone.pop(oldest)
        return True

    def news(self, has_no: int, contact_of: Callable[[str], Contact]) -> RosterNews:
        """`has_no`: the number that the member named last."""
        if has_no == self.number:
            return RosterNews(self.number, None)
        if not max(1, self._known_from) <= has_no < self.number:
            return RosterNews(self.number, tuple(map(contact_of, sorted(self._at))))
        fresh = tuple(map(contact_of, sorted(_since(self._at, has_no))))
        return RosterNews(self.number, fresh, has_no, tuple(_since(self._gone, has_no)))


def _since(at: dict[str, int], number: int) -> Iterator[str]:
    return takewhile(lambda peer: at[peer] > number, reversed(at))  # the newest come first
