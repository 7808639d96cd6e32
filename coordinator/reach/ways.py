"""Who can talk with whom, and by which way: the relation of pairs that rounds, donors and rosters follow.  Pure.

Part of the membership (coordinator/run/membership.py).  Two members can talk if one of them was dialled, by the
coordinator, at the address that it gave; else if they met (meeting.py); else over the relay, if there is one and their
pair has a place there.  Nobody is told an address that the coordinator did not reach itself.  Whoever it reached, and
others do not, meets them for as long as that is doubted.

So many pairs have a place there that up to 16 members all meet each other.  Of more, a few meet everybody: those
that came first.  They own the chunks where nobody can be dialled.  Must not know sockets, sessions or rounds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from farflung.coordinator.reach.meeting import Meetings, Pairs, Together
from farflung.coordinator.reach.tickets import Run, Sign, Ticket, pair_of, side_of, written
from farflung.protocol.round_words import Contact, Way

PAIRS_MOST = 128
MEETING_MOST = PAIRS_MOST + 1  # members, of whom one can meet all others
ASKED_S = 1.0  # so long it is waited for what comes of dialling somebody, before the relay is used
TICKET_S, RENEWED_S = 3600.0, 1800.0


class Party(Protocol):
    """A member, as far as it matters here."""

    @property
    def contact(self) -> Contact: ...
    @property
    def joined_no(self) -> int: ...
    @property
    def admitted_at(self) -> float: ...
    @property
    def claimed(self) -> str: ...
    @property
    def came_from(self) -> str: ...
    @property
    def not_reached(self) -> bool: ...
    @property
    def doubted_until(self) -> float: ...


@dataclass(frozen=True)
class RelayNow:
    """The coordinator's relay, where there is one."""

    port: int
    bytes_per_s: float


@dataclass
class Usage:
    """What the relay says of itself, for people."""

    pairs: int = 0
    waiting: int = 0
    moved_bytes: int = 0
    refused: int = 0
    month_bytes: int = 0
    month_limit_bytes: int = 0


def _never(one: str, other: str) -> bool:
    return False


@dataclass
class Ways:
    relay: RelayNow | None = None
    why_no_relay: str = "this run has no relay"
    usage: Usage = field(default_factory=Usage)
    meetings: Meetings = field(default_factory=Meetings)
    pairs: tuple[bytes, ...] = ()  # that may meet at the relay
    _at_relay: dict[str, set[str]] = field(default_factory=dict)
    _tickets: dict[tuple[str, str], tuple[bytes, str]] = field(
        default_factory=dict
    )  # -> (of which pair, its name)
    _made_at: float = float("-inf")
    _made_of: object = None
    _alone: object = None  # who, by name and key
    _pairs: Pairs = field(default_factory=dict)  # of these
    _keys: frozenset[bytes] = frozenset()
    _hubs: tuple[str, ...] = ()

    # ---- which pairs -------------------------------------------------------------------------------------------

    def refresh(
        self, living: Iterable[Party], now: float, run: Run, sign: Sign, together: Together = _never
    ) -> bool:
        """`living`: all of whom no address is proven, or who are doubted; others do not matter.  True if somebody is to
        hear of it."""
        is_needed = self.relay is not None or self.meetings.is_on
        found = (each for each in living if _is_alone(each, now)) if is_needed else ()
        # Of so many nobody can meet all others: who they are does not matter then.
        alone = list(islice(found, MEETING_MOST + 1))
        alone = sorted(alone, key=lambda each: each.joined_no) if len(alone) <= MEETING_MOST else []
        who = [(each.contact.peer, each.contact.key) for each in alone]
        if who != self._alone:
            self._alone = who
            self._choose([each.contact for each in alone])
        news = self.meetings.turn(self._pairs, self._keys, now, together)
        relayed = tuple(
            name for name in self._pairs if self.relay is not None and self.meetings.is_relayed(name)
        )
        is_fresh = not relayed or now - self._made_at < RENEWED_S
        if (self.relay, relayed) == self._made_of and is_fresh:
            return news
        before = self._tickets
        self._write(relayed, before if is_fresh else {}, now, run, sign)
        self._made_of = (self.relay, relayed)
        return news or self._tickets != before

    def _choose(self, alone: list[Contact]) -> None:
        hubs = alone[: _hubs_among(len(alone))]
        self._hubs = tuple(each.peer for each in hubs)
        self._pairs = {
            pair_of(hub.key, other.key): (hub, other)
            for at, hub in enumerate(hubs)
            for other in alone[at + 1 :]
        }
        self._keys = frozenset(each.key for each in (alone if hubs else ()))

    def _write(
        self,
        relayed: tuple[bytes, ...],
        kept: Mapping[tuple[str, str], tuple[bytes, str]],
        now: float,
        run: Run,
        sign: Sign,
    ) -> None:
        """Tickets for these.  `kept`: those that are good for long enough."""
        if not kept:
            self._made_at = now
        until_s = int(self._made_at + TICKET_S)
        self._at_relay, self._tickets, self.pairs = {}, {}, ()
        for name in relayed:
            one, other = self._pairs[name]
            for mine, theirs in ((one, other), (other, one)):
                held, ticket = kept.get((mine.peer, theirs.peer), (b"", ""))
                if held != name:
                    ticket = written(Ticket(name, side_of(mine.key, theirs.key), until_s), run, sign)
                if not ticket:
                    return  # nobody can sign: then nobody is let in
                self._tickets[mine.peer, theirs.peer] = name, ticket
                self._at_relay.setdefault(mine.peer, set()).add(theirs.peer)
            self.pairs = (*self.pairs, name)

    # ---- what follows ------------------------------------------------------------------------------------------

    def told(self, peer: str) -> tuple[Way, ...]:
        """Its tickets."""
        if self.relay is None:
            return ()
        return tuple(
            Way(other, self.relay.port, self._tickets[peer, other][1])
            for other in sorted(self._at_relay.get(peer, ()))
        )

    def meets(self, one: str, other: str) -> bool:
        """Though neither can dial the other."""
        return other in self._at_relay.get(one, ()) or self.meetings.is_punched(one, other)

    def can_talk(self, one: Party, other: Party) -> bool:
        dialled = one.contact.address or other.contact.address
        return bool(dialled) or self.meets(one.contact.peer, other.contact.peer)

    def owners(self, among: Mapping[str, Party], now: float) -> set[str]:
        """Of these members, those whom all of them reach best: whoever can be dialled; if nobody can, whoever meets
        all others, with as few of them as possible at the relay."""
        dialled = {peer for peer, each in among.items() if each.contact.address and each.doubted_until <= now}
        if dialled or (self.relay is None and not self.meetings.is_on):
            return dialled
        if len(among) == 1:
            return set(among)  # it needs nobody
        hubs = [
            peer
            for peer in self._hubs
            if peer in among and all(other == peer or self.meets(peer, other) for other in among)
        ]
        # What nobody could bring through for a while says less of a member than of the relay.
        hubs = [peer for peer in hubs if among[peer].doubted_until <= now] or hubs
        relayed = {peer: len(self._at_relay.get(peer, set()) & among.keys()) for peer in hubs}
        return {peer for peer, count in relayed.items() if count == min(relayed.values())}

    def share_bytes_per_s(self, among: Collection[str], owners: Collection[str]) -> float | None:
        """What each of these can carry at most in a round, where bytes of it pass the relay; None: they do not."""
        if self.relay is None or not owners or not set(owners) <= set(self._hubs):
            return None
        if not any(self._at_relay.get(owner, set()) & set(among) for owner in owners):
            return None
        return self.relay.bytes_per_s / len(among)

    # ---- for people --------------------------------------------------------------------------------------------

    def way_of(self, party: Party) -> str:
        """By which others reach it: `dialled`, `punched`, `relayed`, or `none`: then it dials those who can be
        dialled.  The worst of them, where it meets some at the relay and some without it."""
        if party.contact.peer in self._at_relay:
            return "relayed"
        if self.meetings.punched_of(party.contact.peer):
            return "punched"
        return "dialled" if party.contact.address else "none"

    def why_this_way(self, party: Party) -> str:
        """And no better one; empty where there is none."""
        way = self.way_of(party)
        if party.contact.address:
            return "" if way == "dialled" else "others could not reach it for a while"
        if not party.claimed:
            why = "it says that it can't be dialled (--listen off)"
        elif party.not_reached:
            why = f"the coordinator could not dial it at {party.claimed}"
        else:
            why = f"it is tried whether it can be dialled at {party.claimed}"
        if way == "punched":
            return why
        unmet = self.meetings.why_not(party.contact.peer, party.contact.key)
        why = f"{why}; {unmet}" if unmet else why
        if way == "relayed":
            return why
        return (
            f"{why}; no relay: {self.why_no_relay}"
            if self.relay is None
            else f"{why}; nobody to meet at the relay"
        )

    def told_of_relay(self) -> dict[str, object]:
        """For the status."""
        usage, relay = self.usage, self.relay
        return {
            "on": relay is not None,
            "port": relay.port if relay is not None else 0,
            "why_not": self.why_no_relay if relay is None else "",
            "bytes_per_s": round(relay.bytes_per_s) if relay is not None else 0,
            "pairs_allowed": len(self.pairs),
            "pairs": usage.pairs,
            "waiting": usage.waiting,
            "moved_bytes": usage.moved_bytes,
            "refused": usage.refused,
            "month_bytes": usage.month_bytes,
            "month_limit_bytes": usage.month_limit_bytes,
        }

    def told_of_meetings(self) -> dict[str, object]:
        """For the status: pairs that found a way past their routers."""
        return {"on": self.meetings.is_on, "pairs": self.meetings.punched, "tries": self.meetings.tries}


def _is_alone(party: Party, now: float) -> bool:
    """Nobody can dial it, as far as is known; or the coordinator can, and others could not for a while."""
    if party.contact.address:
        return party.doubted_until > now
    if not party.claimed or party.not_reached or now - party.admitted_at >= ASKED_S:
        return True
    return is_elsewhere(party.claimed, party.came_from)


def is_elsewhere(claimed: str, came_from: str) -> bool:
    """It names another address than the one from which it calls: a router is between, and hardly lets anybody in."""
    try:
        named = ipaddress.ip_address(claimed.rpartition(":")[0].strip("[]"))
        seen = ipaddress.ip_address(came_from.removeprefix("::ffff:").partition("%")[0])
    except ValueError:
        return False  # a host's name, or nothing is known
    return named != seen


def _hubs_among(count: int) -> int:
    """So many of them can meet everybody."""
    hubs, pairs = 0, 0
    while hubs < count and pairs + count - 1 - hubs <= PAIRS_MOST:
        pairs += count - 1 - hubs
        hubs += 1
    return hubs
