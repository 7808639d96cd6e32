"""This peer's line to the others: the data plane with its address, its limits, and what it was measured to carry.

Owned by the agent, which sends and receives through `link`.  Decides nothing about rounds; who may speak and what is
sent comes from the peer machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from farflung.collectives.link.link import Link, MovedBytes, Relayed
from farflung.collectives.link.rates import AtLeast, Courtesy, RateMeter, is_mine
from farflung.collectives.link.zmq_link import LinkSettings, ZmqLink
from farflung.peer.line.control import Took
from farflung.peer.router.opened_port import OpenedPort, may_be_behind_one, router_towards
from farflung.peer.settings import Caps, OwnConfig
from farflung.protocol.caps import parse_cap, strictest
from farflung.protocol.errors import UserError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.manifest import NetSection
from farflung.protocol.process.sockets import Keys
from farflung.protocol.round_words import RelayRoute

OUTBOUND_ONLY = "off"  # --listen off: this peer can't be dialled
ROUTER_S = 3.0  # so long it is waited for what the router says: a silent one is left sooner


class Expected(NamedTuple):
    """What the peer machine knows of the bytes that are to come."""

    others: int = 0  # members of the largest round that this peer is in, without itself
    owing: int = 0  # members whose bytes are due here
    to_come: bool = False  # some are, for a round or for what this peer lacks


class DataLine:
    def __init__(
        self, keys: Keys, own: OwnConfig, link: Link | None = None, coordinator: bytes = b""
    ) -> None:
        """`keys`: of this session.  `link`: None for the usual one.  `coordinator`: the key with which it dials back.
        UserError for an address that is none."""
        self._own = own
        if own.listen not in ("", OUTBOUND_ONLY):
            checked_listen(own.listen)
        lean = ciphers_in_hardware() and os.environ.get("FARFLUNG_LEAN") != "0"
        window_bytes = send_window_bytes()
        settings = LinkSettings(window_bytes=window_bytes, visitor=coordinator, lean=lean)
        self.link: Link = link if link is not None else ZmqLink(keys, settings)
        self._up_limits, self._down_limits = Caps.of(*own.upload_limits), Caps.of(*own.download_limits)
        # Only in a round all lines carry what they can: one donor or one joiner may have the narrower line.
        self._up, self._down = RateMeter(), RateMeter()
        self._up_at_least = AtLeast()
        self._courtesy = Courtesy()
        self._moved = MovedBytes(0, 0)  # when the meters were fed last
        self._has_more = False  # bytes wait to leave
        self._coordinator = ""  # its address, in numbers: nothing is looked up while bytes wait
        self._opened: OpenedPort | None = None  # of the router

    def follow(self, net: NetSection) -> None:
        """Keep the run's limits besides this peer's own."""
        own = self._own
        self._up_limits = Caps((*Caps.of(*own.upload_limits).caps, parse_cap(net.upload_limit)))
        self._down_limits = Caps((*Caps.of(*own.download_limits).caps, parse_cap(net.download_limit)))
        self._keep_limits()

    def open(self, url: JoinUrl | Address, net: NetSection) -> str:
        """Keep the run's limits too, and listen for other peers; returns the address that they dial ("" if none)."""
        self.follow(net)  # a socket is opened for a limited line or for an open one
        own, (here, self._coordinator) = self._own, both_ends(url)
        if own.listen == OUTBOUND_ONLY:
            return ""
        host, port = checked_listen(own.listen) if own.listen else ("", 0)
        bind = host or here
        bound = self.link.listen(bind, port)
        if own.advertise:
            return own.advertise if ":" in own.advertise else f"{own.advertise}:{bound}"
        dialled = here if bind in ("0.0.0.0", "*", "[::]") else bind
        return self._asked_router(dialled, bound) or f"{dialled}:{bound}"

    def _asked_router(self, here: str, port: int) -> str:
        """The address outside, if a router on the way to the coordinator opens a port for this one."""
        router = router_towards(self._coordinator) if may_be_behind_one(here) else ""
        if not router:
            return ""
        try:
            self._opened = OpenedPort(router, port)
        except OSError:
            return ""  # no way to it: then others come by other ways
        return self._opened.address(ROUTER_S)

    @property
    def router_says(self) -> str:
        """For people: what came of asking it; empty where it was not asked."""
        if self._opened is None:
            return ""
        address = self._opened.address(0.0)
        return f"the router opened {address} for others" if address else self._opened.why_not

    def close(self) -> None:
        self.link.close()
        if self._opened is not None:
            self._opened.close()

    @property
    def coordinator(self) -> str:
        """Its address, in numbers; empty before the line is open."""
        return self._coordinator

    def coordinator_is_at(self, place: Address) -> None:
        """It may have moved since the line was opened, and its relay with it."""
        with contextlib.suppress(OSError):  # a name that nobody can look up now: its number may still be good
            self._coordinator = both_ends(place)[1]

    def relayed_by(self, ways: Iterable[RelayRoute]) -> dict[str, Relayed]:
        """By peer.  A relay without a host of its own is on the coordinator's; one with a name instead of a number is
        none: it would have to be looked up while bytes wait."""
        return {
            way.peer: Relayed(f"{way.host or self._coordinator}:{way.port}", way.ticket)
            for way in ways
            if not way.host or is_number(way.host)
        }

    def on_tick(self, now: float, expected: Expected) -> None:
        link = self.link
        link.on_tick()
        moved, before = link.moved(), self._moved
        sent = max(0, moved.sent_bytes - before.sent_bytes)  # the kernel may take a segment back
        received = moved.received_bytes - before.received_bytes
        self._moved = moved if sent else moved._replace(sent_bytes=before.sent_bytes)
        self._has_more = link.waiting_bytes() > 0
        self._up.feed(now, sent, is_mine(link.peers_waiting(), expected.others))
        self._down.feed(now, received, is_mine(expected.owing, expected.others))
        self._up_at_least.feed(now, sent)
        if not (self._has_more or expected.to_come):
            link.probe()
        self._keep_limits()

    def on_answer(self, now: float, took: Took) -> None:
        """The coordinator answered a beat: how long that took shows how full the line is."""
        line = self._up.bytes_per_s if self._has_more else None
        self._courtesy.on_answer(now, took.both_ways_s, took.there, line)
        self._keep_limits()

    def forget_coordinator(self) -> None:
        """Another one may answer from now on, whose clock is another."""
        self._courtesy.forget_way()

    @property
    def _up_roughly(self) -> float | None:
        """Before a round has told: what the probe showed of a slow line, or what has left in the best half second.

        The probe may have met a busy peer, so the greater of both.
        """
        known = [self._up_at_least.bytes_per_s, self.link.probed_bytes_per_s()]
        return max((rate for rate in known if rate is not None), default=None)

    @property
    def rates(self) -> tuple[int, int, bool]:
        """Bytes per second up and down, and whether that is a rough word; 0 where nothing is known yet.

        What a limit allows is never exceeded.
        """
        found = []
        measured = (self._up.bytes_per_s or self._up_roughly, self._down.bytes_per_s)
        for rate, limit in zip(measured, self._limits(), strict=True):
            known = [each for each in (rate, limit) if each is not None]
            found.append(round(min(known, default=0)))
        return found[0], found[1], self._up.bytes_per_s is None

    @property
    def known_up(self) -> float:
        """Bytes per second that it was measured to carry, or may; 0: no round has filled it yet, and the probe found it
        too fast."""
        measured, limit = self._up.bytes_per_s or self.link.probed_bytes_per_s(), self._limits()[0]
        return min((rate for rate in (measured, limit) if rate is not None), default=0.0)

    def _limits(self) -> tuple[float | None, float | None]:
        """What people allow at this hour, up and down."""
        return self._up_limits.now(), self._down_limits.now()

    def _keep_limits(self) -> None:
        up, down = self._limits()
        self.link.limit(strictest(up, self._courtesy.bytes_per_s), down)


def send_window_bytes() -> int:
    """The most that one TCP connection of this machine can have on its way."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return LinkSettings.window_bytes  # no Linux: a usual value


def ciphers_in_hardware() -> bool:
    """Whether this machine's processor knows AES: without, lean connections would cost more than they save."""
    try:
        return "aes" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False  # no Linux


def checked_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {text}: expected HOST:PORT (port 0 takes any free one), or `off`")
    return host, int(port)


def is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def address_towards(url: JoinUrl) -> str:
    """This machine's address on the way to the coordinator."""
    return both_ends(url)[0]


def both_ends(url: JoinUrl | Address) -> tuple[str, str]:
    """This machine's address on the way to the coordinator, and the coordinator's.  No packet is sent: UDP only looks
    up the route."""
    family = socket.AF_INET6 if ":" in url.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((url.host, url.port))
        found = str(probe.getsockname()[0]), str(probe.getpeername()[0])
    here, there = (f"[{host}]" if ":" in host else host for host in found)
    return here, there
