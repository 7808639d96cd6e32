"""At which relay a pair meets: the coordinator's own, or one that a member offers beside its line.  Pure.

Part of reach.py, which says which pairs need one.  An offer is believed as far as it was seen.  Its host is the one at
which the coordinator dialled the member itself; its port is used once the coordinator has passed bytes through it, with
tickets of a pair that nobody else knows, and that is tried again and again.  A rate that is claimed counts up to a
bound.  What a relay counted is shown, and nothing follows from it.

A pair takes the relay that leaves it most: the rate by the pairs there.  It changes when its relay is gone, when one of
the two says that it can't meet the other there, when one of them was left out of a round while its bytes passed a
member's relay, or, outside of rounds, for one that leaves it much more.  Whoever says so without end moves its own
pairs alone, ever more rarely.  Must not know sockets, sessions or rounds.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from farflung.coordinator.reach.hole_punching import Pairs
from farflung.coordinator.roster.ways import PAIR_BYTES, RelayNow, RouteEnd, Together, pair_of
from farflung.protocol.mode_words import RelayOffer, RelayOrder
from farflung.protocol.round_words import Contact
from farflung.protocol.signing import verify

# ---- tickets -----------------------------------------------------------------------------------------------
# Tickets for the relay: who may meet whom there, and until when. Pure.
#
# Written for the members by reach.py, read by the relay (coordinator/relay/). A ticket is for one side of
# one pair of one run, and ends. It is signed, so that a relay needs no secret to know a guest, and nobody can
# make one up. A peer asks its SOCKS proxy for it, so it has the letters of a host's name. Must not know
# sockets or members.

SIGNATURE_BYTES = 64
_FORM = b"\x01"  # its six highest bits begin the name: libzmq wants a letter or a digit there
_BODY_BYTES = 1 + 1 + 4 + PAIR_BYTES
NAME_CHARS = (4 * (_BODY_BYTES + SIGNATURE_BYTES) + 2) // 3

# The ed25519 key and signature of a statement; empty where there is no key.
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Ticket:
    pair: bytes
    side: int  # 0: of the lower of the two keys
    until_s: int  # on the monotonic clock of the machine that the coordinator is on

    @property
    def body(self) -> bytes:
        return _FORM + bytes((self.side,)) + self.until_s.to_bytes(4, "big") + self.pair


@dataclass(frozen=True, slots=True)
class TicketScope:
    """For whom tickets are good: not for another run, nor after a restart, when the clock may be another.  And not at
    another relay: each sees its guests' tickets, and must not use them elsewhere."""

    run_id: bytes
    incarnation: int
    relay: str = ""  # the member that offers it; empty: the coordinator's own

    def statement(self, ticket: Ticket) -> bytes:
        where = self.run_id + self.incarnation.to_bytes(8, "big") + self.relay.encode()
        return b"farflung/relay/1\0" + where + ticket.body


def side_of(mine: bytes, theirs: bytes) -> int:
    return int(mine > theirs)


def written(ticket: Ticket, run: TicketScope, sign: Sign) -> str:
    """Its name; empty where nobody can sign."""
    proof = sign(run.statement(ticket))
    signature = proof[-SIGNATURE_BYTES:]
    if len(signature) != SIGNATURE_BYTES:
        return ""
    return base64.urlsafe_b64encode(ticket.body + signature).decode("ascii").rstrip("=")


def read(name: bytes, run: TicketScope, public: bytes) -> Ticket | None:
    """None: that is no ticket of this run.  Whether it has ended is the reader's to say."""
    if len(name) != NAME_CHARS:
        return None
    try:
        raw = base64.b64decode(name + b"=" * (-len(name) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    body, signature = raw[:_BODY_BYTES], raw[_BODY_BYTES:]
    if body[:1] != _FORM or body[1] not in (0, 1):
        return None
    ticket = Ticket(body[6:], body[1], int.from_bytes(body[2:6], "big"))
    return ticket if verify(public, run.statement(ticket), signature) else None


# ---- relays ------------------------------------------------------------------------------------------------

OWN = ""  # the coordinator's relay, where others have their member's name
PAIRS_MOST = 128  # at one relay
RATE_MOST_BYTES_PER_S = 12.5e6  # that a claim counts for
LEAST_PORT = 1024
SEEN_AGAIN_S = 60.0  # one that passed bytes is tried again
AGAIN_S, AGAIN_MOST_S = 15.0, 900.0  # one that did not: twice as long each time
FAILURES_MOST = 2  # of one that passed bytes before: once is a packet that was lost
SETTLES_S, DOUBLINGS_MOST = 8.0, 7  # so long a pair stays where it was sent: twice as long each time
AVOIDS_S = 600.0
LOOKS_EVERY_S = 5.0  # for a pair that would have much more elsewhere
MUCH_MORE = 2.0
SHOWN_MOST = 32  # in a status
_TRIAL = b"farflung/trial/1"


@dataclass
class _Offer:
    key: bytes  # of the session that said so
    said: RelayOffer
    order: RelayOrder | None = None
    passed: tuple[str, int] | None = None  # where bytes came through it
    why_not: str = "it was not tried yet"
    failures: int = 0  # of trials, in a row
    losses: int = 0  # by its own word
    try_at: float = 0.0
    is_on_trial: bool = False

    @property
    def trial_pair(self) -> bytes:
        return pair_of(self.key, _TRIAL)


@dataclass
class _Stay:
    """A pair at a relay."""

    at: str
    since: float
    moves: int = 0  # because of what somebody said
    avoids: dict[str, float] = field(default_factory=dict)  # relays, and until when

    def avoids_now(self, relay: str, now: float) -> bool:
        return now < self.avoids.get(relay, 0.0)


@dataclass
class Relays:
    own: RelayNow | None = None
    usable: dict[str, RelayNow] = field(default_factory=dict)
    at: dict[bytes, str] = field(default_factory=dict)  # which pair meets at which of these
    _offers: dict[str, _Offer] = field(default_factory=dict)
    _stays: dict[bytes, _Stay] = field(default_factory=dict)
    _number: int = 0  # of the newest order
    _looked_at: float = float("-inf")

    # ---- what is heard -----------------------------------------------------------------------------------------

    def hears(self, contact: Contact, said: RelayOffer | None, now: float) -> None:
        """In a beat.  Whoever moves its relay again and again waits ever longer until it is used again."""
        known = self._offers.get(contact.peer)
        if said is None:
            self._offers.pop(contact.peer, None)
        elif known is None or known.key != contact.key:
            self._offers[contact.peer] = _Offer(contact.key, said)
        else:
            if known.passed is not None and said.port != known.passed[1]:
                known.passed, known.why_not = None, said.told or "it listens at another port than before"
                known.losses += 1
                known.try_at = now + _pause_s(known.losses)
            known.said = said

    def tried(self, peer: str, key: bytes, why_not: str, where: tuple[str, int], now: float) -> str:
        """What became of a trial.  For people: the news in it."""
        offer = self._offers.get(peer)
        if offer is None or offer.key != key:
            return ""
        before, offer.is_on_trial = offer.passed, False
        if not why_not:
            offer.passed, offer.why_not, offer.failures = where, "", 0
            offer.try_at = now + SEEN_AGAIN_S
            return "" if before == where else "bytes come through the relay that it offers"
        offer.failures += 1
        offer.try_at = now + _pause_s(offer.failures)
        if before == where and offer.failures < FAILURES_MOST:
            return ""
        offer.passed, offer.why_not = None, why_not
        is_news = before is not None or offer.failures == 1
        return f"the relay that it offers is not used: {why_not}" if is_news else ""

    def avoid(self, pair: bytes, now: float, of_members: bool = False) -> None:
        """That pair does not get on where it is.  `of_members`: it stays at the coordinator's own."""
        stay = self._stays.get(pair)
        if stay is None or (of_members and stay.at == OWN):
            return
        if now - stay.since >= SETTLES_S * 2.0 ** min(DOUBLINGS_MOST, stay.moves):
            stay.avoids[stay.at] = now + AVOIDS_S
            stay.moves += 1
            stay.since = now

    # ---- what follows ------------------------------------------------------------------------------------------

    @property
    def are_offered(self) -> bool:
        """By members."""
        return bool(self._offers)

    @property
    def is_any(self) -> bool:
        return self.own is not None or self.are_offered

    def place_of(self, name: str) -> tuple[str, int]:
        """Host and port of one that can be used."""
        return self.usable[name].host, self.usable[name].port

    def see(self, here: Mapping[str, RouteEnd], now: float) -> None:
        """Which can be used: of members that are here, whom others reach, and through which bytes came.  So nobody is
        sent to a relay of its own: who meets others at relays is one whom nobody reaches."""
        self._offers = {
            peer: offer
            for peer, offer in self._offers.items()
            if peer in here and here[peer].contact.key == offer.key
        }
        self.usable = {OWN: self.own} if self.own is not None else {}
        for peer, offer in sorted(self._offers.items()):
            if here[peer].place.doubted_until > now:
                continue
            where = host_of(here[peer].contact), offer.said.port
            if offer.passed == where:
                rate = min(RATE_MOST_BYTES_PER_S, float(offer.said.bytes_per_s))
                self.usable[peer] = RelayNow(where[1], max(1.0, rate), where[0])

    def assign(self, pairs: Pairs, relayed: tuple[bytes, ...], now: float, together: Together) -> None:
        """These need a relay."""
        stays = {name: self._stays[name] for name in relayed if name in self._stays}
        load = Counter(stay.at for stay in stays.values())
        for name in relayed:
            stay = stays.get(name)
            if stay is not None and stay.at in self.usable and not stay.avoids_now(stay.at, now):
                continue
            best = self._best(name, stay, load, now)
            if stay is not None and stay.at in self.usable and (best is None or stay.avoids_now(best, now)):
                continue  # there is nothing better
            if stay is not None:
                load[stay.at] -= 1
            if best is None:
                stays.pop(name, None)
                continue
            stay = stays.setdefault(name, _Stay(best, now))
            stay.at, stay.since = best, now
            load[best] += 1
        self._stays = stays
        if len(self.usable) > 1 and now - self._looked_at >= LOOKS_EVERY_S:
            self._looked_at = now
            self._balance(pairs, load, now, together)
        self.at = {name: stay.at for name, stay in stays.items()}

    def _best(self, pair: bytes, stay: _Stay | None, load: Mapping[str, int], now: float) -> str | None:
        found = [
            (stay is not None and stay.avoids_now(name, now), -self._left(name, load), name)
            for name in self.usable
            if (load.get(name, 0) < self._places(name) or (stay is not None and stay.at == name))
        ]
        return min(found, default=(True, 0.0, None))[2]

    def _left(self, name: str, load: Mapping[str, int]) -> float:
        """To one pair more."""
        return self.usable[name].bytes_per_s / (load.get(name, 0) + 1)

    @staticmethod
    def _places(name: str) -> int:
        return PAIRS_MOST - (name != OWN)  # one is for trials

    def _balance(self, pairs: Pairs, load: Counter[str], now: float, together: Together) -> None:
        """One at a time, and none that is at work."""
        for name, stay in self._stays.items():
            one, other = pairs[name]
            best = self._best(name, stay, load, now)
            if best is None or best == stay.at or stay.avoids_now(best, now):
                continue
            has = self.usable[stay.at].bytes_per_s / load[stay.at]
            if self._left(best, load) > MUCH_MORE * has and not together(one.peer, other.peer):
                stay.at, stay.since = best, now
                return

    def order(self, run: TicketScope, public: bytes) -> None:
        """For whom each relay of a member is, from now on.  `public`: empty where nobody signs tickets."""
        for peer, offer in self._offers.items() if public else ():
            pairs = (offer.trial_pair, *(name for name, at in self.at.items() if at == peer))
            order = RelayOrder(1, run.incarnation, public, pairs, offer.why_not[:200])
            if (
                offer.order is None
                or order.pairs != offer.order.pairs
                or order.why_not != offer.order.why_not
            ):
                self._number += 1
                offer.order = RelayOrder(self._number, *_after_number(order))

    def order_for(self, peer: str, knows: RelayOffer | None) -> RelayOrder | None:
        """Whoever offers one hears it until it is followed."""
        offer = self._offers.get(peer)
        if offer is None or offer.order is None or knows is None or knows.number == offer.order.number:
            return None
        return offer.order

    def due(self, living: Mapping[str, RouteEnd], now: float) -> Iterator[tuple[str, bytes, str, int, bytes]]:
        """Of whom to try a relay: (peer, key, host, port, pair)."""
        for peer, offer in self._offers.items():
            each = living.get(peer)
            if each is None or offer.is_on_trial or now < offer.try_at or offer.order is None:
                continue
            host, port = host_of(each.contact), offer.said.port
            if (why := _unfit(each.contact, host, port)) is not None:
                offer.passed, offer.why_not = None, why or offer.said.told or "it does not listen yet"
            elif offer.said.number == offer.order.number:
                offer.is_on_trial = True
                yield each.contact.peer, offer.key, host, port, offer.trial_pair

    # ---- for people --------------------------------------------------------------------------------------------

    def told(self, names: Mapping[str, str]) -> list[dict[str, object]]:
        """What members offer, those that are used most first.  No addresses."""
        load = Counter(self.at.values())
        order = sorted(self._offers, key=lambda peer: (peer not in self.usable, -load[peer], peer))
        return [
            {
                "peer": peer,
                "name": names.get(peer, peer),
                "on": peer in self.usable,
                "why_not": ""
                if peer in self.usable
                else offer.why_not or "others could not reach its member",
                "port": offer.said.port,
                "bytes_per_s": offer.said.bytes_per_s,
                "pairs_allowed": load[peer],
                "pairs": offer.said.pairs,
                "moved_bytes": offer.said.moved_bytes,
                "refused": offer.said.refused,
            }
            for peer, offer in ((peer, self._offers[peer]) for peer in order[:SHOWN_MOST])
        ]


def _pause_s(times: int) -> float:
    return min(AGAIN_MOST_S, AGAIN_S * 2.0 ** min(times - 1, 16))


def host_of(contact: Contact) -> str:
    """Where it was dialled, if that is a number; empty otherwise."""
    host = contact.address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return f"[{ip}]" if ip.version == 6 else str(ip)


def _unfit(contact: Contact, host: str, port: int) -> str | None:
    """Why nothing is to be tried: None if it is; empty: the offer says itself."""
    if not contact.address:
        return "nobody can dial its member"
    if not host:
        return "its member is dialled by a name: let --advertise be an address in numbers"
    if not port:
        return ""
    return None if port >= LEAST_PORT else f"port {port} is below {LEAST_PORT}"


def _after_number(order: RelayOrder) -> tuple[int, bytes, tuple[bytes, ...], str]:
    return order.incarnation, order.public, order.pairs, order.why_not
