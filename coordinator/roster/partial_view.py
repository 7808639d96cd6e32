"""In a crowd: whom each member is told of, which is whom it needs, and who needs it.  Pure.

Part of the membership (coordinator/run/membership.py); the tick builder asks it with every answer to a beat.  A peer
takes nothing from whom it was not told of, and sends nothing there: so two always hear of each other.  They need each
other in a round, or because one is the other's donor, fellow, or auditor, or because they meet past their routers.

Up to `WHOLE_ROSTER` members hear of everybody, and this is not asked: so a small run spares all of it.  Of a list is
told what is new in it.  Who is not needed any more stays in it as long as there is room: a line
that was opened may be of use again, and whoever is in it already need not be told again, when groups are dealt anew.
Nothing here looks at a whole list but where it is too long: whoever comes, changes or goes is marked with those that
know it. Must not know rounds, beats or sockets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple, Protocol

from farflung.protocol.limits import MEMBERS_PER_ROUND, ROSTER_GONE_MOST, ROSTER_MOST
from farflung.protocol.round_words import Contact

# ---- roster delta ------------------------------------------------------------------------------------------
# A list of contacts that changes, told by what is new in it since the member heard of it last. Pure.
#
# Used by the membership, for the one list of everybody, and by the acquaintances, for one list of each
# member. It knows who is in it since which number, not the contacts themselves: those are looked up when they
# are told.
#
# A member names in each beat the number of the list that it has. Words may cross: it may have heard of a
# newer list than the one that it named last. So a difference says all that changed *since* a number, and is
# good for every list from that number on. Whoever names a number that is none of its list's is told the whole
# list: who lies, lies to itself. Must not know who asks, or why somebody is in a list.

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


# ---- partial view ------------------------------------------------------------------------------------------

WHOLE_ROSTER = MEMBERS_PER_ROUND
FELLOWS_TOLD = 16
THICK_LEAST = 8  # so many who may be asked are asked, however thin their lines are
FRESH_S = 30.0  # so long ago somebody was needed who is told in any case; the others, up to so many
# So many stay in a list that are not needed now; in very large runs fewer, or their lists would fill the memory here.
KEPT, KEPT_LEAST, PAIRS_KEPT = ROSTER_MOST, 64, 1 << 19
FORGET_EVERY_S = 10.0
MET_EVERY_S = 10.0  # those that a member needs as before are marked so rarely as needed now
# Numbers of these lists are others than those of whole rosters: a run may grow into a crowd, and shrink again.
NUMBERS_FROM = 1 << 40


class Somebody(Protocol):
    @property
    def contact(self) -> Contact: ...


@dataclass(frozen=True)
class KnownDonors:
    """Whom a joiner may ask, and of these who can be dialled."""

    stamp: object  # of what they follow from
    made_at: float
    found: list[str]
    quick: list[str]  # without those on the thinnest lines, where there are many
    dialable: list[str]  # without those on the thinnest, too
    joiners: list[str]  # sorted: who has pieces of the state at most

    @classmethod
    def among(
        cls,
        found: Mapping[str, float],
        dialable: Sequence[str],
        joiners: Iterable[str],
        stamp: object,
        now: float,
    ) -> KnownDonors:
        """`found`: what the line of each carries up, as far as that is known."""
        quick, near = thicker_half([*found], found), thicker_half(dialable, found)
        return cls(stamp, now, [*found], quick, near, sorted(set(joiners) - found.keys()))


def thicker_half(peers: Sequence[str], up_bytes_per_s: Mapping[str, float]) -> list[str]:
    """Of those who may be asked, without those on the thinnest lines, where there are many.

    Whoever missed a round asks all that it is told of for as much, and a thin line would still carry that when the next
    round begins, whose end all others wait for.  Half of them stay: what a line carries is its own peer's word, and so
    those with boundless lines by their own word are asked twice as often, but never alone.
    """
    usual = median([rate for peer in peers if (rate := up_bytes_per_s[peer])] or [0.0])
    rates = [up_bytes_per_s[peer] or usual for peer in peers]
    stay = max(THICK_LEAST, -(-len(peers) // 2))
    if len(peers) <= stay:
        return list(peers)
    cut = sorted(rates, reverse=True)[stay - 1]
    return [peer for peer, rate in zip(peers, rates, strict=True) if rate >= cut]


@dataclass
class _Known:
    """Of one session."""

    told: RosterDelta
    needed: dict[str, float] = field(default_factory=dict)  # -> when last
    marked: set[str] = field(default_factory=set)  # who may have to come into the list, change in it, or go
    ways: object = None  # that were told with it
    # Whom it met last, as one question; and until when nothing is asked of that again.
    met: tuple[object, float] = (None, 0.0)
    looked_at: float = -math.inf  # whether these are too many


class RosterReader(NamedTuple):
    """A member that is to hear what is new."""

    peer: str
    has_no: int  # the number of the list that it has, by its last beat
    ways: object  # that it is told with the list


@dataclass
class PartialView:
    """Whoever needs somebody is needed by it: the relation has two sides, always."""

    _of: dict[str, _Known] = field(default_factory=dict)
    _number: int = NUMBERS_FROM

    def introduce(self, one: str, others: Iterable[str], now: float) -> None:
        """To each other."""
        for other in others:
            if other != one:
                self._meets(one, other, now)
                self._meets(other, one, now)

    def has_met(self, peer: str, whom: object, now: float) -> bool:
        """It was introduced to them some moments ago, and nobody of its acquaintances went since.  Asked before that is
        done again."""
        known = self._knows(peer)
        if known.met[0] == whom and now < known.met[1]:
            return True
        known.met = whom, now + MET_EVERY_S
        return False

    def gather(self, circles: Iterable[Iterable[str]], now: float) -> list[str]:
        """Of each circle everybody to all others.  Who they are."""
        gathered: set[str] = set()
        for circle in circles:
            stamped = dict.fromkeys(circle, now)
            gathered |= stamped.keys()
            for peer in stamped:
                known = self._knows(peer)
                known.needed.update(stamped)
                known.needed.pop(peer)
                known.marked.update(other for other in stamped if other not in known.told)
        return sorted(gathered)

    def has_changed(self, peer: str) -> None:
        """Its contact is another one."""
        for other in self._of[peer].needed if peer in self._of else ():
            self._of[other].marked.add(peer)

    def begins_anew(self, peer: str, now: float) -> None:
        """A new session of it begins, which has been told nothing."""
        before = self._of.get(peer)
        if before is not None:
            fresh = {other for other, at in before.needed.items() if now - at <= FRESH_S}
            del self._of[peer]
            anew = self._knows(peer)
            anew.needed, anew.marked = before.needed, fresh

    def forget(self, peer: str) -> None:
        """It has gone."""
        known = self._of.pop(peer, None)
        for other in known.needed if known is not None else ():
            its = self._of[other]
            its.needed.pop(peer, None)
            its.marked.add(peer)  # it is to go
            its.met = None, 0.0

    def lacks(self, peer: str, here: Mapping[str, Somebody]) -> bool:
        """It is to be told of somebody, or of somebody's end."""
        known = self._of.get(peer)
        return known is not None and any(
            other in known.told or (other in here and other in known.needed)
            for other in known.marked
            if other != peer
        )

    def news(self, asks: RosterReader, here: Mapping[str, Somebody], now: float) -> RosterNews:
        """`here`: the living."""
        known = self._knows(asks.peer)
        self._keep_short(asks, known, len(here), now)
        if known.marked or known.ways != asks.ways:
            self._number += 1
            self._follow(asks.peer, known, here)
        if known.ways != asks.ways:
            known.told.number, known.ways = self._number, asks.ways
        return known.told.news(asks.has_no, lambda other: here[other].contact)

    def _follow(self, peer: str, known: _Known, here: Mapping[str, Somebody]) -> None:
        """What was marked gets into the list, or out of it."""
        for other in known.marked - {peer}:
            if other in here and other in known.needed:
                known.told.put(other, self._number)
            else:
                known.told.drop(other, self._number)
        known.marked.clear()

    def _keep_short(self, asks: RosterReader, known: _Known, living: int, now: float) -> None:
        most = max(KEPT_LEAST, min(KEPT, PAIRS_KEPT // max(1, living)))
        due = now - known.looked_at >= FORGET_EVERY_S or len(known.needed) > ROSTER_MOST
        if due and len(known.needed) > most:
            known.looked_at = now
            self._drop_oldest(asks.peer, known, most, now)

    def _drop_oldest(self, peer: str, known: _Known, most: int, now: float) -> None:
        """Of those that are not needed now, and of all where even those are too many.  Neither knows the other then."""
        newest = sorted(known.needed, key=lambda other: -known.needed[other])
        fresh = sum(now - at <= FRESH_S for at in known.needed.values())
        for other in newest[min(ROSTER_MOST, max(most, fresh)) :]:
            del known.needed[other]
            known.marked.add(other)
            its = self._of[other]
            its.needed.pop(peer, None)
            its.marked.add(peer)  # nor it there

    def _meets(self, one: str, other: str, now: float) -> None:
        known = self._knows(one)
        known.needed[other] = now
        if other not in known.told:
            known.marked.add(other)

    def _knows(self, peer: str) -> _Known:
        found = self._of.get(peer)
        if found is None:
            self._number += 1
            found = self._of[peer] = _Known(RosterDelta(self._number))
        return found


def some_of(peers: Sequence[str], mine: str, most: int, turn: int) -> tuple[str, ...]:
    """Whom one may ask, in the order of their names: each asker hears of others, or a crowd of newcomers would all ask
    the same few."""
    others = [peer for peer in peers if peer != mine]
    if len(others) <= most:
        return tuple(others)
    at = bisect_left(others, mine) + turn * most
    return tuple(others[(at + place) % len(others)] for place in range(most))


def in_turn_from(peers: list[str], mine: str) -> list[str]:
    """Of others, who stand in a ring: my neighbours, then those two places away, four, and so on, both ways.

    So, where not all can be told, as many are told of each as it is told of, and pieces get everywhere in few steps.
    """
    count, at = len(peers), bisect_left(peers, mine)
    if count <= FELLOWS_TOLD:
        return [peer for peer in peers[at:] + peers[:at] if peer != mine]
    steps = [1 << power for power in range(count.bit_length())]
    places = dict.fromkeys((at + way * step) % count for step in steps for way in (1, -1))
    return [peers[place] for place in places if peers[place] != mine]
