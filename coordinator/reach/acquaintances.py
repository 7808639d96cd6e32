"""In a crowd: whom each member is told of, which is whom it needs, and who needs it.  Pure.

Part of the membership (coordinator/run/membership.py); the guidance asks it with every answer to a beat.  A peer takes
nothing from whom it was not told of, and sends nothing there: so two always hear of each other.  They need each other
in a round, or because one is the other's donor, fellow, or auditor, or because they meet past their routers.

Up to `WHOLE_ROSTER` members hear of everybody, and this is not asked: so a small run spares all of it.  A list is told
whole, under a number of its own, until a beat names that number.  Who is not needed any more stays in it for a while,
because a line that was opened may be of use again.  Must not know rounds, beats or sockets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from farflung.protocol.limits import MEMBERS_PER_ROUND, ROSTER_MOST
from farflung.protocol.round_words import Contact

WHOLE_ROSTER = MEMBERS_PER_ROUND
FELLOWS_TOLD = 16
THICK_LEAST = 8  # so many who may be asked are asked, however thin their lines are
FRESH_S = 30.0  # so long ago somebody was needed who is told in any case; the others, up to so many
KEPT, KEPT_S = 256, 60.0
FORGET_EVERY_S = 10.0
# Numbers of these lists are others than those of whole rosters: a run may grow into a crowd, and shrink again.
NUMBERS_FROM = 1 << 40


class Somebody(Protocol):
    @property
    def contact(self) -> Contact: ...


class Told(NamedTuple):
    """`roster`: None where it is the one that the member has."""

    number: int
    roster: tuple[Contact, ...] | None


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

    needed: dict[str, float] = field(default_factory=dict)  # -> when last
    told: dict[str, Contact] = field(default_factory=dict)
    number: int = 0
    forget_at: float = 0.0


@dataclass
class Acquaintances:
    _of: dict[str, _Known] = field(default_factory=dict)
    _number: int = NUMBERS_FROM

    def introduce(self, one: str, others: Iterable[str], now: float) -> None:
        """To each other."""
        mine = self._needs(one)
        for other in others:
            mine[other] = now
            self._needs(other)[one] = now

    def gather(self, circles: Iterable[Iterable[str]], now: float) -> list[str]:
        """Of each circle everybody to all others.  Who they are."""
        gathered: set[str] = set()
        for circle in circles:
            stamped = dict.fromkeys(circle, now)
            gathered |= stamped.keys()
            for peer in stamped:
                self._needs(peer).update(stamped)
        return sorted(gathered)

    def forget(self, peer: str) -> None:
        """It has gone, or a new session of it begins, which has been told nothing."""
        self._of.pop(peer, None)

    def lacks(self, peer: str, here: Mapping[str, Somebody]) -> bool:
        """It is to be told of somebody, or of somebody's end."""
        known = self._of.get(peer)
        if known is None:
            return False
        told = known.told
        if any(other not in here for other in told):
            return True
        return any(
            other in here and told.get(other) is not here[other].contact
            for other in known.needed
            if other != peer
        )

    def news(self, peer: str, has_no: int, here: Mapping[str, Somebody], now: float) -> Told:
        """`has_no`: the number of the list that the member has, by its last beat; `here`: the living."""
        known = self._of.setdefault(peer, _Known())
        if now >= known.forget_at:
            known.forget_at = now + FORGET_EVERY_S
            known.needed = {
                other: at for other, at in known.needed.items() if now - at < KEPT_S and other in here
            }
        if not known.number or self.lacks(peer, here):
            newest = sorted(known.needed, key=lambda other: -known.needed[other])
            living = [other for other in newest if other in here and other != peer]
            fresh = sum(now - known.needed[other] <= FRESH_S for other in living)
            living = living[: min(ROSTER_MOST, max(KEPT, fresh))]
            known.told = {other: here[other].contact for other in living}
            known.needed = {other: known.needed[other] for other in living}
            self._number += 1
            known.number = self._number
        if has_no == known.number:
            return Told(known.number, None)
        return Told(known.number, tuple(known.told[other] for other in sorted(known.told)))

    def _needs(self, peer: str) -> dict[str, float]:
        found = self._of.get(peer)
        if found is None:
            found = self._of[peer] = _Known()
        return found.needed


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
