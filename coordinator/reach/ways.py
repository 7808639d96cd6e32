"""Who can talk with whom, and by which way: the relation of pairs that rounds, donors and rosters follow.  Pure.

Part of the membership (coordinator/run/membership.py).  Two members can talk if one of them was dialled, by the
coordinator, at the address that it gave; else over the relay, if there is one and their pair has a place there.  Nobody
is told an address that the coordinator did not reach itself.  Whoever it reached, and others do not, meets them at the
relay for as long as that is doubted.

So many pairs have a place at the relay that up to 16 members all meet each other.  Of more, a few meet everybody: those
that came first.  They own the chunks where nobody can be dialled.  Must not know sockets, sessions or rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from farflung.coordinator.reach.tickets import Run, Sign, Ticket, pair_of, side_of, written
from farflung.protocol.round_words import Contact, Way

PAIRS_MOST = 128
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


@dataclass
class Ways:
    relay: RelayNow | None = None
    why_no_relay: str = "this run has no relay"
    usage: Usage = field(default_factory=Usage)
    pairs: tuple[bytes, ...] = ()  # that may meet at the relay
    _meets: dict[str, set[str]] = field(default_factory=dict)  # at the relay
    _tickets: dict[tuple[str, str], tuple[bytes, str]] = field(
        default_factory=dict
    )  # -> (of which pair, its name)
    _made_at: float = float("-inf")
    _made_of: object = None
    _hubs: tuple[str, ...] = ()

    # ---- which pairs -------------------------------------------------------------------------------------------

    def refresh(self, living: Iterable[Party], now: float, run: Run, sign: Sign) -> bool:
        """True if somebody has other ways than before."""
        alone = [] if self.relay is None else [each for each in living if _is_alone(each, now)]
        alone.sort(key=lambda each: each.joined_no)
        made_of = (self.relay, [(each.contact.peer, each.contact.key) for each in alone])
        if made_of == self._made_of and (not self.pairs or now - self._made_at < RENEWED_S):
            return False
        before = self._tickets
        self._made_of, self._made_at = made_of, now
        self._hubs, self._meets, self._tickets, self.pairs = (), {}, {}, ()
        self._write(alone, now, run, sign)
        return self._tickets != before

    def _write(self, alone: list[Party], now: float, run: Run, sign: Sign) -> None:
        count = _hubs_among(len(alone))
        self._hubs = tuple(each.contact.peer for each in alone[:count])
        until_s = int(now + TICKET_S)
        for at, hub in enumerate(alone[:count]):
            for other in alone[at + 1 :]:
                name = pair_of(hub.contact.key, other.contact.key)
                for mine, theirs in ((hub.contact, other.contact), (other.contact, hub.contact)):
                    ticket = written(Ticket(name, side_of(mine.key, theirs.key), until_s), run, sign)
                    if not ticket:
                        return  # nobody can sign: then nobody is let in
                    self._tickets[mine.peer, theirs.peer] = name, ticket
                    self._meets.setdefault(mine.peer, set()).add(theirs.peer)
                self.pairs = (*self.pairs, name)

    # ---- what follows ------------------------------------------------------------------------------------------

    def told(self, peer: str) -> tuple[Way, ...]:
        """Its tickets."""
        if self.relay is None:
            return ()
        return tuple(
            Way(other, self.relay.port, self._tickets[peer, other][1])
            for other in sorted(self._meets.get(peer, ()))
        )

    def meets(self, one: str, other: str) -> bool:
        return other in self._meets.get(one, ())

    def can_talk(self, one: Party, other: Party) -> bool:
        dialled = one.contact.address or other.contact.address
        return bool(dialled) or self.meets(one.contact.peer, other.contact.peer)

    def owners(self, among: Mapping[str, Party], now: float) -> set[str]:
        """Of these members, those whom all of them reach best: whoever can be dialled; if nobody can, whoever meets
        all others at the relay."""
        dialled = {peer for peer, each in among.items() if each.contact.address and each.doubted_until <= now}
        if dialled or self.relay is None:
            return dialled
        if len(among) == 1:
            return set(among)  # it needs nobody
        hubs = [
            peer
            for peer in self._hubs
            if peer in among and among.keys() <= self._meets.get(peer, set()) | {peer}
        ]
        # What nobody could bring through the relay for a while says less of a member than of the relay.
        return {peer for peer in hubs if among[peer].doubted_until <= now} or set(hubs)

    def share_bytes_per_s(self, among: Collection[str], owners: Collection[str]) -> float | None:
        """What each of these can carry at most in a round, where all of it passes the relay; None: it does not."""
        if self.relay is None or not owners or not set(owners) <= set(self._hubs):
            return None
        return self.relay.bytes_per_s / len(among)

    # ---- for people --------------------------------------------------------------------------------------------

    def way_of(self, party: Party) -> str:
        """By which others reach it: `dialled`, `relayed`, or `none`: then it dials those who can be dialled."""
        if party.contact.peer in self._meets:
            return "relayed"
        return "dialled" if party.contact.address else "none"

    def why_this_way(self, party: Party) -> str:
        """And no better one; empty where there is none."""
        relayed = party.contact.peer in self._meets
        if party.contact.address:
            return "others could not reach it for a while" if relayed else ""
        if not party.claimed:
            why = "it says that it can't be dialled (--listen off)"
        elif party.not_reached:
            why = f"the coordinator could not dial it at {party.claimed}"
        else:
            why = f"it is tried whether it can be dialled at {party.claimed}"
        if relayed:
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


def _is_alone(party: Party, now: float) -> bool:
    """Nobody can dial it, as far as is known; or the coordinator can, and others could not for a while."""
    if party.contact.address:
        return party.doubted_until > now
    return not party.claimed or party.not_reached or now - party.admitted_at >= ASKED_S


def _hubs_among(count: int) -> int:
    """So many of them can meet everybody."""
    hubs, pairs = 0, 0
    while hubs < count and pairs + count - 1 - hubs <= PAIRS_MOST:
        pairs += count - 1 - hubs
        hubs += 1
    return hubs
