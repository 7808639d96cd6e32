"""Where members are, and by which ways they reach each other: what the core asks, and the answers where there is none
but to dial.  Pure.

Part of the membership (coordinator/run/membership.py).  These answers are those of a run in which whoever can be
dialled is reached, and nobody else is.  The mode coordinator/reach gives others: pairs of members that meet past their
routers, or at a relay.  Must not know rounds or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from farflung.protocol.digests import hash_bytes
from farflung.protocol.messages import Beat, OfTick
from farflung.protocol.round_words import Contact, RelayRoute

DOORS = ("door", "members")  # the two sockets that see from where connections come
PAIR_BYTES = 16

Together = Callable[[str, str], bool]  # is there a round that both peers are in?


@dataclass
class MemberPlace:
    """Where a member is in this session, and whether others can dial it there."""

    claimed: str = ""  # where it says it can be dialled; its contact has that address only once it was tried
    since: float = 0.0  # when it was admitted
    network: str = ""  # of the address that it called from: see protocol/process/networks.py
    came_from: str = ""  # that address
    dial_at: float = 0.0  # when to try (again)
    not_reached: bool = False  # at what it claimed, when it was tried last
    doubted_until: float = 0.0  # others could not reach it: it owns nothing for a while


class RouteEnd(Protocol):
    """A member, as far as it matters here."""

    @property
    def contact(self) -> Contact: ...
    @property
    def joined_no(self) -> int: ...
    @property
    def place(self) -> MemberPlace: ...


class RouteNews(NamedTuple):
    """What a member is told with a tick."""

    routes: tuple[RelayRoute, ...] = ()  # its tickets, and where they are good
    meets: tuple[str, ...] = ()  # whom it is to connect to at one instant
    sections: tuple[OfTick, ...] = ()


@dataclass(frozen=True)
class RelayNow:
    """A relay that can be used."""

    port: int
    bytes_per_s: float
    host: str = ""  # in numbers; empty: the coordinator's, as each member sees it


@dataclass
class Usage:
    """What the coordinator's relay says of itself, for people."""

    pairs: int = 0
    waiting: int = 0
    moved_bytes: int = 0
    refused: int = 0
    month_bytes: int = 0
    month_limit_bytes: int = 0


class Trial(NamedTuple):
    """To pass bytes between two connections to a relay, and say what became of it."""

    peer: str  # who offers it
    key: bytes  # of its session
    host: str
    port: int
    tickets: tuple[str, str]


def pair_of(one: bytes, other: bytes) -> bytes:
    """A name for two sessions, by their keys."""
    return hash_bytes(b"farflung/pair/1\0", *sorted((one, other)))[:PAIR_BYTES]


class Ways:
    why_no_relay: str = "this coordinator was installed without reach"
    usage: Usage

    def __init__(self) -> None:
        self.usage = Usage()

    # ---- what is heard -----------------------------------------------------------------------------------------

    def sees_ports(self) -> None:
        """The shell can tell from which ports connections come."""

    def saw(self, key: bytes, door: str, endpoint: str) -> bool:
        """One of the two sockets: a connection with this session's key came from there.  True if that is news."""
        return False

    def hears(self, contact: Contact, beat: Beat, now: float) -> bool:
        """What a member says of its ways.  True if it reaches others than before."""
        return False

    def left_out(self, peer: str, now: float) -> None:
        """Of a round, or its chunks went to others."""

    # ---- what follows ------------------------------------------------------------------------------------------

    def news_for(self, contact: Contact, beat: Beat, now: float) -> RouteNews:
        """`beat`: its last one."""
        return RouteNews()

    def meets(self, one: str, other: str) -> bool:
        """Though neither can dial the other."""
        return False

    def is_punched(self, one: str, other: str) -> bool:
        """They met past their routers."""
        return False

    @property
    def has_relay(self) -> bool:
        """Some pair could meet at one."""
        return False

    @property
    def punched(self) -> int:
        """Pairs that met past their routers."""
        return 0

    @property
    def waits_for_gap(self) -> bool:
        """A pair could change over, and a round has both of them in it."""
        return False

    def owners(self, among: Mapping[str, RouteEnd], now: float) -> set[str]:
        """Of these members, those whom all of them reach."""
        return dialable(among, now)

    def wider(
        self, among: Mapping[str, RouteEnd], owners: Collection[str], now: float
    ) -> list[dict[str, float]]:
        """Who could own beside these owners, if bytes of the round passed relays, each with what it would be given."""
        return []

    def share_bytes_per_s(self, among: Collection[str], owners: Collection[str]) -> float | None:
        """What each of these can carry at most in a round, where bytes of it pass relays; None: they do not."""
        return None

    # ---- for people --------------------------------------------------------------------------------------------

    @property
    def undialled_meets(self) -> str:
        """Whom a member meets that nobody can dial, and how."""
        return "dials those who can be dialled"

    def way_of(self, party: RouteEnd) -> str:
        """By which others reach it: `none`: it dials those who can be dialled."""
        return "dialled" if party.contact.address else "none"

    def why_this_way(self, party: RouteEnd) -> str:
        """And no better one; empty where there is none."""
        return "" if party.contact.address else f"{why_not_dialled(party)}; no relay: {self.why_no_relay}"

    def status(self, names: Mapping[str, str]) -> dict[str, Any]:
        return {
            "relay": told_of_relay(None, self.why_no_relay, 0, self.usage),
            "relays_offered": [],
            "meetings": {"on": False, "pairs": 0, "tries": 0},
        }


def dialable(among: Mapping[str, RouteEnd], now: float) -> set[str]:
    """Those whom others can dial, as far as is known."""
    return {peer for peer, each in among.items() if each.contact.address and each.place.doubted_until <= now}


def why_not_dialled(party: RouteEnd) -> str:
    """For people: of one that nobody can dial, as far as is known."""
    if not party.place.claimed:
        return "it says that it can't be dialled (--listen off)"
    if party.place.not_reached:
        return f"the coordinator could not dial it at {party.place.claimed}"
    return f"it is tried whether it can be dialled at {party.place.claimed}"


def told_of_relay(relay: RelayNow | None, why_not: str, pairs_allowed: int, usage: Usage) -> dict[str, Any]:
    """For the status."""
    return {
        "on": relay is not None,
        "port": relay.port if relay is not None else 0,
        "why_not": why_not if relay is None else "",
        "bytes_per_s": round(relay.bytes_per_s) if relay is not None else 0,
        "pairs_allowed": pairs_allowed,
        "pairs": usage.pairs,
        "waiting": usage.waiting,
        "moved_bytes": usage.moved_bytes,
        "refused": usage.refused,
        "month_bytes": usage.month_bytes,
        "month_limit_bytes": usage.month_limit_bytes,
    }
