"""Reach, the mode, in the run machine: whoever nobody can dial meets others past their routers, or at a relay.  Pure.

Made by the machine (coordinator/modes/registry.py).  The membership asks for the ways themselves (routes, below); what
the shell hears of relays comes in here (coordinator/relay/relay_hand.py).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from farflung.coordinator.modes.registry import CoordinatorMode, ModeTools
from farflung.coordinator.reach.hole_punching import HolePunching, Pairs
from farflung.coordinator.reach.relays import (
    OWN,
    PAIRS_MOST,
    Relays,
    Sign,
    Ticket,
    TicketScope,
    side_of,
    written,
)
from farflung.coordinator.roster.ways import (
    RelayNow,
    RouteEnd,
    RouteNews,
    Together,
    Trial,
    Usage,
    Ways,
    dialable,
    pair_of,
    told_of_relay,
    why_not_dialled,
)
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import Effect, HandEffect
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.errors import NoteCause
from farflung.protocol.messages import Beat
from farflung.protocol.mode_words import ReachBeat, ReachTick
from farflung.protocol.round_words import Contact, RelayRoute, section

# ---- effects -----------------------------------------------------------------------------------------------
# What the mode asks its hand to do (coordinator/relay/relay_hand.py, or the simulator).


@dataclass(frozen=True, slots=True)
class RelayPairs(HandEffect):
    """Those that may meet at the relay from now on, and no others."""

    pairs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TryRelay(HandEffect):
    """Pass some bytes through the relay that a member offers; the mode hears what came of it."""

    trial: Trial


# ---- routes ------------------------------------------------------------------------------------------------
# Who can talk with whom, and by which way: the relation of pairs that rounds, donors and rosters follow.
# Pure.
#
# Asked by the membership (coordinator/roster/ways.py). Two members can talk if one of them was dialled, by
# the coordinator, at the address that it gave; else if they met (hole_punching.py); else over a relay
# (relays.py), if there is one and their pair has a place there. Nobody is told an address that the
# coordinator did not reach itself. Whoever it reached, and others do not, meets them for as long as that is
# doubted.
#
# So many pairs have a place there that up to 16 members all meet each other. Of more, a few meet everybody:
# those that came first. They own the chunks where nobody can be dialled. Must not know sockets, sessions or
# rounds.

MEETING_MOST = PAIRS_MOST + 1  # members, of whom one can meet all others
# Of what a relay passes, a round without need of it counts on so much: others use it, and its host's line may be full.
RELAY_PART = 0.75
ASKED_S = 1.0  # so long it is waited for what comes of dialling somebody, before the relay is used
TICKET_S, RENEWED_S = 3600.0, 1800.0
TRIAL_TICKET_S = 60.0
KEY_BYTES = 32  # of a proof, which is a key and a signature

Place = tuple[str, str, int]  # whose relay it is, its host, its port
Meets = tuple[bytes, Place]  # which pair, and where


def _never(one: str, other: str) -> bool:
    return False


@dataclass
class Routes(Ways):
    relays: Relays = field(default_factory=Relays)
    why_no_relay: str = "this run has no relay"
    usage: Usage = field(default_factory=Usage)
    meetings: HolePunching = field(default_factory=HolePunching)
    pairs: tuple[bytes, ...] = ()  # that may meet at the coordinator's relay
    _at_relay: dict[str, dict[str, str]] = field(default_factory=dict)  # -> with whom, and at which
    _tickets: dict[tuple[str, str], tuple[Meets, RelayRoute]] = field(default_factory=dict)
    _made_at: float = float("-inf")
    _made_of: object = None
    _alone: object = None  # who, by name and key
    _pairs: Pairs = field(default_factory=dict)  # of these
    _keys: frozenset[bytes] = frozenset()
    _public: bytes = b""  # the key that signs tickets
    _hubs: tuple[str, ...] = ()

    # ---- which pairs -------------------------------------------------------------------------------------------

    def refresh(
        self,
        living: Iterable[RouteEnd],
        now: float,
        run: TicketScope,
        sign: Sign,
        together: Together = _never,
    ) -> bool:
        """`living`: all of whom no address is proven, or who are doubted; others do not matter.  True if somebody is to
        hear of it."""
        is_needed = self.relays.is_any or self.meetings.is_on
        found = (each for each in living if _is_alone(each, now)) if is_needed else ()
        # Of so many nobody can meet all others: who they are does not matter then.
        alone = list(islice(found, MEETING_MOST + 1))
        alone = sorted(alone, key=lambda each: each.joined_no) if len(alone) <= MEETING_MOST else []
        who = [(each.contact.peer, each.contact.key) for each in alone]
        if who != self._alone:
            self._alone = who
            self._choose([each.contact for each in alone])
        news = self.meetings.turn(self._pairs, self._keys, now, together)
        relayed = tuple(name for name in self._pairs if self.relays.usable and self.meetings.is_relayed(name))
        self.relays.assign(self._pairs, relayed, now, together)
        made_of = {name: (at, *self.relays.place_of(at)) for name, at in self.relays.at.items()}
        is_fresh = not made_of or now - self._made_at < RENEWED_S
        if made_of != self._made_of or not is_fresh:
            before = self._tickets
            self._write(made_of, before if is_fresh else {}, now, run, sign)
            self._made_of = made_of
            news = news or self._tickets != before
        if self.relays.are_offered:
            self._public = self._public or sign(b"farflung/relay/key")[:KEY_BYTES]
            self.relays.order(run, self._public)
        return news

    def sees_ports(self) -> None:
        self.meetings.is_on = True

    def saw(self, key: bytes, door: str, endpoint: str) -> bool:
        return self.meetings.saw(key, door, endpoint)

    def hears(self, contact: Contact, beat: Beat, now: float) -> bool:
        """Whom a member met past its router, which relay it offers, and whom it can't meet where it was sent."""
        said = section(ReachBeat, beat.sections) or ReachBeat()
        news = self.meetings.says(contact.key, said.punched)
        self.relays.hears(contact, said.relay, now)
        peer, others = contact.peer, said.unmet
        for name, (one, other) in self._pairs.items() if others else ():
            if (one.peer == peer and other.peer in others) or (other.peer == peer and one.peer in others):
                self.relays.avoid(name, now)
        return news

    def left_out(self, peer: str, now: float) -> None:
        """Of a round, or its chunks went to others: a relay of somebody's may have held its bytes back."""
        for name, pair in self._pairs.items() if self._at_relay.get(peer) else ():
            if peer in (pair[0].peer, pair[1].peer):
                self.relays.avoid(name, now, of_members=True)

    def trials(self, living: Mapping[str, RouteEnd], now: float, run: TicketScope, sign: Sign) -> list[Trial]:
        """Of relays that members offer."""
        found, until_s = [], int(now + TRIAL_TICKET_S)
        for peer, key, host, port, pair in self.relays.due(living, now):
            run = replace(run, relay=peer)
            one, other = (written(Ticket(pair, side, until_s), run, sign) for side in (0, 1))
            found.append(Trial(peer, key, host, port, (one, other)))
        return found

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
        relayed: Mapping[bytes, Place],
        kept: Mapping[tuple[str, str], tuple[Meets, RelayRoute]],
        now: float,
        run: TicketScope,
        sign: Sign,
    ) -> None:
        """Tickets for these.  `kept`: those that are good for long enough."""
        if not kept:
            self._made_at = now
        until_s = int(self._made_at + TICKET_S)
        self._at_relay, self._tickets, self.pairs = {}, {}, ()
        for name, (at, host, port) in relayed.items():
            one, other = self._pairs[name]
            for mine, theirs in ((one, other), (other, one)):
                of, way = kept.get((mine.peer, theirs.peer), (None, None))
                if of != (name, relayed[name]) or way is None:
                    due = Ticket(name, side_of(mine.key, theirs.key), until_s)
                    ticket = written(due, replace(run, relay=at), sign)
                    if not ticket:
                        return  # nobody can sign: then nobody is let in
                    way = RelayRoute(theirs.peer, port, ticket, host)
                self._tickets[mine.peer, theirs.peer] = (name, relayed[name]), way
                self._at_relay.setdefault(mine.peer, {})[theirs.peer] = at
            if at == OWN:
                self.pairs = (*self.pairs, name)

    # ---- what follows ------------------------------------------------------------------------------------------

    def news_for(self, contact: Contact, beat: Beat, now: float) -> RouteNews:
        meets, said = self.meetings.told(contact.peer, now), section(ReachBeat, beat.sections)
        told = ReachTick(
            self.meetings.is_to_look(contact.key),
            meets,
            self.relays.order_for(contact.peer, said.relay if said is not None else None),
        )
        sections = (told,) if told != ReachTick() else ()
        return RouteNews(self.told(contact.peer), tuple(each.peer for each in meets), sections)

    def told(self, peer: str) -> tuple[RelayRoute, ...]:
        """Its tickets, and where they are good."""
        return tuple(self._tickets[peer, other][1] for other in sorted(self._at_relay.get(peer, ())))

    @property
    def has_relay(self) -> bool:
        return bool(self.relays.usable)

    @property
    def punched(self) -> int:
        return self.meetings.punched

    @property
    def waits_for_gap(self) -> bool:
        return self.meetings.waits_for_gap

    def is_punched(self, one: str, other: str) -> bool:
        return self.meetings.is_punched(one, other)

    def meets(self, one: str, other: str) -> bool:
        return other in self._at_relay.get(one, ()) or self.meetings.is_punched(one, other)

    def can_talk(self, one: RouteEnd, other: RouteEnd) -> bool:
        dialled = one.contact.address or other.contact.address
        return bool(dialled) or self.meets(one.contact.peer, other.contact.peer)

    def owners(self, among: Mapping[str, RouteEnd], now: float) -> set[str]:
        """Of these members, those whom all of them reach best: whoever can be dialled, and whoever met the others past
        its router; if nobody can be dialled, whoever meets all others, with as few of them as possible at the relay."""
        dialled = dialable(among, now)
        if dialled or not (self.relays.is_any or self.meetings.is_on):
            return dialled | self._punched(among, dialled, now) if self.meetings.punched else dialled
        if len(among) == 1:
            return set(among)  # it needs nobody
        hubs = [
            peer
            for peer in self._hubs
            if peer in among and all(other == peer or self.meets(peer, other) for other in among)
        ]
        # What nobody could bring through for a while says less of a member than of the relay.
        hubs = [peer for peer in hubs if among[peer].place.doubted_until <= now] or hubs
        relayed = {peer: len(self._at_relay.get(peer, {}).keys() & among.keys()) for peer in hubs}
        return {peer for peer, count in relayed.items() if count == min(relayed.values())}

    def _punched(self, among: Mapping[str, RouteEnd], dialled: set[str], now: float) -> set[str]:
        """Whoever met all the others, beside those that can be dialled, whom it dials itself."""
        far = among.keys() - dialled
        return {
            peer
            for peer in self._hubs
            if peer in far
            and among[peer].place.doubted_until <= now
            and len(far) > 1
            and all(other == peer or self.meetings.is_punched(peer, other) for other in far)
        }

    def wider(
        self, among: Mapping[str, RouteEnd], owners: Collection[str], now: float
    ) -> list[dict[str, float]]:
        """Who could own beside these owners, if bytes of the round passed relays: whoever can talk with all others.

        More and more of them, by how many they meet there, each with what a pair of its would be given: a relay is
        fair by pair.  Nobody, where owners meet others at a relay anyway."""
        at_relay = {peer: self._at_relay.get(peer, {}).keys() & among.keys() for peer in among}
        if not owners or not any(at_relay.values()) or any(at_relay[owner] for owner in owners):
            return []
        good = {peer for peer, each in among.items() if each.place.doubted_until <= now}
        able = {peer for peer in good if at_relay[peer] and self._talks_with_all(peer, among)}
        most = sorted({len(at_relay[peer]) for peer in able})
        return [
            self._given({peer: at_relay[peer] for peer in able if len(at_relay[peer]) <= n}) for n in most
        ]

    def _talks_with_all(self, peer: str, among: Mapping[str, RouteEnd]) -> bool:
        return all(other == peer or self.can_talk(among[peer], among[other]) for other in among)

    def _given(self, far: Mapping[str, Collection[str]]) -> dict[str, float]:
        """`far`: of each further owner, whom it meets at a relay.  A pair of two of them passes bytes both ways."""
        at = {peer: [self._at_relay[peer][other] for other in others] for peer, others in far.items()}
        flows = Counter(place for places in at.values() for place in places)
        rate = {
            place: self.relays.usable[place].bytes_per_s if place in self.relays.usable else 1.0
            for place in flows
        }
        return {
            peer: min(RELAY_PART * rate[place] / flows[place] for place in places)
            for peer, places in at.items()
        }

    def share_bytes_per_s(self, among: Collection[str], owners: Collection[str]) -> float | None:
        """What each of these can carry at most in a round, where bytes of it pass relays; None: they do not."""
        if not owners or not set(owners) <= set(self._hubs):
            return None
        used = {
            at
            for owner in owners
            for other, at in self._at_relay.get(owner, {}).items()
            if other in among and at in self.relays.usable
        }
        if not used:
            return None
        return sum(self.relays.usable[at].bytes_per_s for at in used) / len(among)

    # ---- for people --------------------------------------------------------------------------------------------

    @property
    def undialled_meets(self) -> str:
        return f"meets others past its router{', or at a relay' if self.has_relay else ''}"

    def way_of(self, party: RouteEnd) -> str:
        """By which others reach it: `dialled`, `punched`, `relayed`, or `none`: then it dials those who can be
        dialled.  The worst of them, where it meets some at the relay and some without it."""
        if party.contact.peer in self._at_relay:
            return "relayed"
        if self.meetings.punched_of(party.contact.peer):
            return "punched"
        return "dialled" if party.contact.address else "none"

    def why_this_way(self, party: RouteEnd) -> str:
        """And no better one; empty where there is none."""
        way = self.way_of(party)
        if party.contact.address:
            return "" if way == "dialled" else "others could not reach it for a while"
        why = why_not_dialled(party)
        if way == "punched":
            return why
        unmet = self.meetings.why_not(party.contact.peer, party.contact.key)
        why = f"{why}; {unmet}" if unmet else why
        if way == "relayed":
            return why
        return (
            f"{why}; no relay: {self.why_no_relay}"
            if not self.relays.usable
            else f"{why}; nobody to meet at the relay"
        )

    def status(self, names: Mapping[str, str]) -> dict[str, Any]:
        meetings = self.meetings
        return {
            "relay": told_of_relay(self.relays.own, self.why_no_relay, len(self.pairs), self.usage),
            "relays_offered": self.relays.told(names),
            "meetings": {"on": meetings.is_on, "pairs": meetings.punched, "tries": meetings.tries},
        }


def _is_alone(party: RouteEnd, now: float) -> bool:
    """Nobody can dial it, as far as is known; or the coordinator can, and others could not for a while."""
    if party.contact.address:
        return party.place.doubted_until > now
    place = party.place
    if not place.claimed or place.not_reached or now - place.since >= ASKED_S:
        return True
    return is_elsewhere(place.claimed, place.came_from)


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


# ---- reach -------------------------------------------------------------------------------------------------


class Reach(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self.core = core
        self._tools = tools
        self.routes = core.members.ways = Routes()

    # ---- what the shell hears ----------------------------------------------------------------------------------

    def on_relay(self, relay: RelayNow | None, why_not: str, usage: Usage, now: float) -> list[Effect]:
        """Said again and again: what the coordinator's relay is, and what it did.  `why_not`: where there is none."""
        core, routes = self.core, self.routes
        core.now = now
        routes.usage, routes.why_no_relay = usage, why_not
        if relay != routes.relays.own:
            core.note(f"relay: on port {relay.port}" if relay is not None else f"relay: none, {why_not}")
            routes.relays.own = relay
            self._tools.follow_ways()
            self._tools.settle()
        return core.take_effects()

    def on_relay_tried(self, trial: Trial, why_not: str, now: float) -> list[Effect]:
        """What came of a TryRelay; empty: its bytes came through."""
        core, where = self.core, (trial.host, trial.port)
        core.now = now
        news = self.routes.relays.tried(trial.peer, trial.key, why_not, where, now)
        if news:
            core.note(f"{core.name(trial.peer)}: {news}")
            self._tools.follow_ways()
        return core.take_effects()

    # ---- what follows ------------------------------------------------------------------------------------------

    def find_ways(self, together: Callable[[str, str], bool]) -> bool:
        """The relay hears of them first."""
        core, routes, members = self.core, self.routes, self.core.members
        run = TicketScope(core.run_id, core.ledger.incarnation)
        routes.relays.see(members.alive, core.now)
        hardly_reached = members.addresses.hardly_reached(core.now)
        changed = routes.refresh(hardly_reached, core.now, run, core.prove, together)
        if changed:
            members.everybody.number += 1  # ways are told with it
            core.do(RelayPairs(routes.pairs))
        for trial in routes.trials(members.alive, core.now, run, core.prove):
            core.do(TryRelay(trial))
        for news in routes.meetings.take_news():
            core.log(
                f"{core.name(news.one)} and {core.name(news.other)} "
                + (
                    f"met past their routers, after {news.after_s:.2f} s"
                    if news.stands
                    else "lost each other"
                ),
                NoteCause.PUNCHED if news.stands else NoteCause.PARTED,
            )
        return changed


made = Reach
