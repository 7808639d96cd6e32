"""Pairs that nobody can dial, and that may still connect: both to each other, at the same instant.  Pure.

Part of reach.py, which says which pairs there are.  A router lets in what answers a connection from inside.  If both
sides connect at one instant, from a port that each router shows outside as the same one to everybody, then each takes
the other's first packet for the answer to its own.  So a pair has one of two ways at any time: *punched*, where both
say that such a connection stands, or the relay.

An endpoint is never what a member says: it is from where its own connections came, as two listening sockets of the
coordinator saw them, with the key of its session.  Two sockets that saw two ports mean a *hard* router, which has
another port for each connection: nobody can know the next one, and nothing is tried.

The relay is held back for a moment, while it is not known what a router is like, and for the first tries.  A pair that
is relayed meets again ever more rarely, so often in all, and changes over while no round has both of them in it.
Instants have a little chance in them, from the pair's name: not all pairs of a run connect in one moment.
Must not know sockets, tickets or rounds.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.roster.ways import DOORS, Together
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import MEETS_AT_ONCE
from farflung.protocol.mode_words import MEET_EVERY_S, MEET_TRIES, Meet
from farflung.protocol.round_words import Contact

LOOKS_S = 1.0  # so long it is waited for what two sockets see of somebody
LEAD_S = 0.35  # from naming an instant until it comes: both must have heard of it
SPREAD_S = 0.15  # of instants, by chance
# Before later tries each is to show itself anew, so often at most: its address may be another one.
LOOK_AGAIN_S = 30.0
HOLD_S = 1.3  # after the first instant, until the relay is used
AGAIN_S, AGAIN_MOST_S = (
    60.0,
    3600.0,
)  # after tries in vain, or a connection that broke: twice as long each time
SERIES_MOST = 12  # of one pair of sessions, unless a connection stood for long
STOOD_S = 300.0
LEAST_PORT = 1024
# Of one member, in all its sessions: a new one must not buy new tries without end.
SERIES_AT_ONCE, SERIES_PER_S = 64.0, 0.2

Pairs = Mapping[bytes, tuple[Contact, Contact]]  # by name


class Nat(StrEnum):
    """What a member's router does to its connections."""

    UNKNOWN = "unknown"
    EASY = "easy"  # the same port for all of them
    HARD = "hard"
    LOW = "low"  # the port is one that belongs to others


@dataclass
class Meeting:
    """Of one pair of sessions."""

    name: bytes
    since: float
    at_s: float | None = None  # the first instant of the newest series
    series: int = 0
    again_at: float = 0.0
    is_punched: bool = False
    is_relayed: bool = False
    waits_for_gap: bool = False  # it could change over, and a round has both of them in it
    _stood_since: float = 0.0

    def is_on(self, now: float) -> bool:
        return self.at_s is not None and now < self.at_s + MEET_TRIES * MEET_EVERY_S

    def follow(self, stands: bool, is_busy: bool, now: float) -> bool:
        """`stands`: both say that they are connected.  True if they are told another way than before."""
        before = self.is_punched
        self.waits_for_gap = stands and not before and self.is_relayed and is_busy
        if stands and not before and not self.waits_for_gap:
            self.is_punched, self.is_relayed, self._stood_since = True, False, now
        elif before and not stands:
            self.is_punched, self.is_relayed = False, True  # at once: they have no other way
            if now - self._stood_since >= STOOD_S:
                self.series = 0
            self.again_at = now + self._pause_s()
        return self.is_punched != before

    def begin(self, now: float) -> None:
        """Another series of tries."""
        self.series += 1
        self.at_s = now + LEAD_S + SPREAD_S * self._chance("at")
        self.again_at = self.at_s + MEET_TRIES * MEET_EVERY_S + self._pause_s()

    def hold_back(self, may_meet: bool | None, now: float) -> None:
        """The relay, for a moment.  `may_meet`: None where that is not known yet."""
        if self.is_punched or self.is_relayed:
            return
        if self.at_s is not None:
            self.is_relayed = now >= self.at_s + HOLD_S
        else:
            self.is_relayed = may_meet is False or now >= self.since + LOOKS_S

    def may_begin(self, now: float) -> bool:
        return self.series < SERIES_MOST and now >= self.again_at and not self.is_on(now)

    def _pause_s(self) -> float:
        usual_s = min(AGAIN_MOST_S, AGAIN_S * 2.0 ** max(0, self.series - 1))
        return usual_s * (1.0 + 0.25 * self._chance("again"))

    def _chance(self, what: str) -> float:
        """From 0 to 1, always the same for the same series of the same pair."""
        drawn = hash_bytes(b"farflung/meet/1\0", self.name, what.encode(), self.series.to_bytes(4, "big"))
        return int.from_bytes(drawn[:4], "big") / float(1 << 32)


class MeetingNews(NamedTuple):
    """For people: two peers have a connection past their routers, or have it no more."""

    one: str
    other: str
    stands: bool
    after_s: float  # the first instant of these tries


@dataclass
class HolePunching:
    is_on: bool = False  # the shell can tell from which ports connections come
    wanted: frozenset[bytes] = frozenset()  # keys of sessions that are to show themselves
    tries: int = 0  # series so far
    _news: list[MeetingNews] = field(default_factory=list)
    _seen: dict[bytes, dict[str, str]] = field(default_factory=dict)  # session's key -> socket -> HOST:PORT
    _asked_at: dict[bytes, float] = field(default_factory=dict)  # session's key -> to show itself anew
    _said: dict[bytes, frozenset[str]] = field(default_factory=dict)  # session's key -> peers
    _meetings: dict[bytes, Meeting] = field(default_factory=dict)  # by pair
    _pairs: Pairs = field(default_factory=dict)
    _punched: frozenset[frozenset[str]] = frozenset()
    _all_over_at: float = -math.inf  # until then somebody has tries left
    _quota: Quota[str] = field(default_factory=lambda: Quota(SERIES_PER_S, SERIES_AT_ONCE))

    # ---- what is heard -----------------------------------------------------------------------------------------

    def saw(self, key: bytes, door: str, endpoint: str) -> bool:
        """One of the two sockets: a connection with this session's key came from there.  True if that is news."""
        if key not in self.wanted or self._seen.get(key, {}).get(door) == endpoint:
            return False
        self._seen.setdefault(key, {})[door] = endpoint
        return True

    def says(self, key: bytes, peers: tuple[str, ...]) -> bool:
        """A member, of those with whom it is connected.  True if that is news."""
        said = frozenset(peers)
        if not self.is_on or self._said.get(key, frozenset()) == said:
            return False
        self._said[key] = said
        return True

    # ---- what follows ------------------------------------------------------------------------------------------

    def turn(self, pairs: Pairs, keys: frozenset[bytes], now: float, together: Together) -> bool:
        """`pairs`: that could use a way; `keys`: of all sessions that matter.  True if somebody is to hear of it."""
        if pairs is not self._pairs:
            self._pairs, self.wanted = pairs, keys if self.is_on else frozenset()
            self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
            self._said = {key: said for key, said in self._said.items() if key in keys}
            self._asked_at = {key: at for key, at in self._asked_at.items() if key in keys}
            known = self._meetings
            self._meetings = {name: known.get(name) or Meeting(name, now, again_at=now) for name in pairs}
        news = False
        for name, (one, other) in pairs.items():
            news |= self._follow(self._meetings[name], one, other, now, together)
        if news:
            both = (
                frozenset((one.peer, other.peer))
                for name, (one, other) in pairs.items()
                if self._meetings[name].is_punched
            )
            self._punched = frozenset(both)
        elif not pairs:
            self._punched = frozenset()
        return news

    def _follow(self, meeting: Meeting, one: Contact, other: Contact, now: float, together: Together) -> bool:
        if not self.is_on:
            meeting.is_relayed = True
            return False
        stands = other.peer in self._said.get(one.key, ()) and one.peer in self._said.get(other.key, ())
        is_busy = stands and meeting.is_relayed and together(one.peer, other.peer)
        news, was_relayed = meeting.follow(stands, is_busy, now), meeting.is_relayed
        if news:
            after_s = now - (meeting.at_s if meeting.at_s is not None else now)
            self._news.append(MeetingNews(one.peer, other.peer, stands, after_s))
        if stands:
            return news
        if meeting.is_relayed and not meeting.may_begin(now):
            return news
        if meeting.series and meeting.may_begin(now):
            self._look_again(one, now)
            self._look_again(other, now)
        may_meet = self._may_meet(one.key, other.key)
        if may_meet and meeting.may_begin(now) and self._has_room(one, other, now):
            meeting.begin(now)
            self._all_over_at = now + LEAD_S + SPREAD_S + MEET_TRIES * MEET_EVERY_S
            self.tries += 1
            news = True
        meeting.hold_back(may_meet, now)
        return news or meeting.is_relayed != was_relayed

    def _look_again(self, contact: Contact, now: float) -> None:
        """Not while others are to meet it where it was seen."""
        asked_at = self._asked_at.get(contact.key, -math.inf)
        if now - asked_at >= LOOK_AGAIN_S and not any(True for _ in self._on(contact.peer, now)):
            self._asked_at[contact.key] = now
            self._seen.pop(contact.key, None)

    def _has_room(self, one: Contact, other: Contact, now: float) -> bool:
        """Neither of them meets too many others now, or met too often."""
        for each in (one.peer, other.peer):
            if sum(1 for _ in self._on(each, now)) >= MEETS_AT_ONCE or self._quota.wait_s(each, now) > 0:
                return False
        return self._quota.take(one.peer, now) and self._quota.take(other.peer, now)

    def _on(self, peer: str, now: float) -> Iterator[tuple[Meeting, Contact]]:
        """The meetings that it has now, each with the other side."""
        for name, (one, other) in self._pairs.items():
            if peer in (one.peer, other.peer) and self._meetings[name].is_on(now):
                yield self._meetings[name], other if one.peer == peer else one

    def told(self, peer: str, now: float) -> tuple[Meet, ...]:
        """Whom it is to meet, and when: the same instant for both."""
        if now >= self._all_over_at:
            return ()
        found = (
            Meet(other.peer, self._seen[other.key][DOORS[0]], meeting.at_s)
            for meeting, other in self._on(peer, now)
            if meeting.at_s is not None and not meeting.is_punched and other.key in self._seen
        )
        return tuple(found)[:MEETS_AT_ONCE]

    def _may_meet(self, one: bytes, other: bytes) -> bool | None:
        nats = self.nat_of(one), self.nat_of(other)
        if Nat.HARD in nats or Nat.LOW in nats:
            return False
        if Nat.UNKNOWN in nats:
            return None
        return _in_one_internet(self._seen[one][DOORS[0]], self._seen[other][DOORS[0]])

    # ---- what is asked -----------------------------------------------------------------------------------------

    def nat_of(self, key: bytes) -> Nat:
        seen = self._seen.get(key, {})
        if len(seen) < len(DOORS):
            return Nat.UNKNOWN
        if len(set(seen.values())) > 1:
            return Nat.HARD
        return Nat.EASY if _port_of(seen[DOORS[0]]) >= LEAST_PORT else Nat.LOW

    def is_to_look(self, key: bytes) -> bool:
        return key in self.wanted and self.nat_of(key) == Nat.UNKNOWN

    def is_relayed(self, name: bytes) -> bool:
        return self._meetings[name].is_relayed

    def is_punched(self, one: str, other: str) -> bool:
        return bool(self._punched) and frozenset((one, other)) in self._punched

    def take_news(self) -> list[MeetingNews]:
        news, self._news = self._news, []
        return news

    def punched_of(self, peer: str) -> int:
        """With how many."""
        return sum(peer in pair for pair in self._punched)

    @property
    def punched(self) -> int:
        return len(self._punched)

    @property
    def waits_for_gap(self) -> bool:
        return any(each.waits_for_gap for each in self._meetings.values())

    def why_not(self, peer: str, key: bytes) -> str:
        """For people: why it meets nobody, or not everybody, without the relay."""
        if not self.is_on:
            return ""
        match self.nat_of(key):
            case Nat.HARD:
                return "its router has another port for each connection, so that nobody can meet it there"
            case Nat.LOW:
                return f"its router shows it at a port below {LEAST_PORT}"
            case Nat.UNKNOWN:
                return "it is not known yet from which port it is seen"
            case Nat.EASY:
                mine = [
                    self._meetings[name]
                    for name, pair in self._pairs.items()
                    if peer in (pair[0].peer, pair[1].peer)
                ]
                vain = sum(each.series > 0 and not each.is_punched for each in mine)
                return f"{vain} of {len(mine)} others it could not meet so far" if vain else ""


def _port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _in_one_internet(one: str, other: str) -> bool:
    """An address of the coordinator's own network means another machine to somebody outside; and behind one and the
    same router hardly anybody gets through to its outside."""
    mine, theirs = (ipaddress.ip_address(each.rpartition(":")[0].strip("[]")) for each in (one, other))
    return mine.version == theirs.version and mine.is_global == theirs.is_global and mine != theirs
