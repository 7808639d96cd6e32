"""Asks this machine's router to open a port, keeps it open, and closes it again: when to say what.  Pure.

Driven by opened_port.py, which has the socket and the clock.  PCP first; a router that knows only NAT-PMP says so, and
one that says nothing is asked in both.  Half of a lifetime before its end it is asked again.  Must not know who needs
the port.
"""

from __future__ import annotations

import ipaddress
import math
import struct
from dataclasses import dataclass
from enum import StrEnum

from farflung.protocol.join_url import Address

# ---- packets -----------------------------------------------------------------------------------------------
# The packets by which a home router is asked to open a port: PCP (RFC 6887), and NAT-PMP (RFC 6886) before
# it. Pure.
#
# What comes from a router is bytes of anybody on the local network:
# whatever is not the answer to this very question is nothing. Must not know sockets, or when to ask.

PORT = 5351  # of routers that listen to this
NONCE_BYTES = 12
_TCP = 6
_PCP, _MAP, _ANSWER = 2, 1, 0x80
_PMP, _PMP_ADDRESS, _PMP_MAP_TCP = 0, 0, 2
_PCP_HEAD, _PCP_MAP = struct.Struct(">BBHI16s"), struct.Struct(">12sB3xHH16s")
_PCP_ANSWER = struct.Struct(">BBxBII12x")
_PMP_MAP, _PMP_MAPPED, _PMP_TOLD = (
    struct.Struct(">BBHHHI"),
    struct.Struct(">BBHIHHI"),
    struct.Struct(">BBHI4s"),
)
_PCP_SAYS = {
    2: "it does not allow that",
    3: "it does not understand the question",
    8: "it has no port left",
    9: "it has no port left",
    11: "there is no such port",
    12: "another router is between",
}
_PMP_SAYS = {2: "it does not allow that", 3: "it has no address itself", 4: "it has no port left"}
_UNSUPPORTED = 1


@dataclass(frozen=True, slots=True)
class Mapped:
    """Whoever dials that port of the router's reaches this machine."""

    port: int
    lifetime_s: int  # 0: it is closed
    host: str = ""  # of the router, outside; empty where it does not say so with it


@dataclass(frozen=True, slots=True)
class RouterRefused:
    why: str
    is_older: bool = False  # it speaks an older version


def pcp_map(client: str, nonce: bytes, port: int, suggested: int, lifetime_s: int) -> bytes:
    """`client`: this machine's own address.  A lifetime of 0 closes the port again."""
    anywhere = bytes(10) + b"\xff\xff" + bytes(4) if ipaddress.ip_address(client).version == 4 else bytes(16)
    head = _PCP_HEAD.pack(_PCP, _MAP, 0, lifetime_s, _as_ipv6(client))
    return head + _PCP_MAP.pack(nonce, _TCP, port, suggested, anywhere)


def read_pcp(raw: bytes, nonce: bytes, port: int) -> Mapped | RouterRefused | None:
    if len(raw) >= 4 and raw[0] != _PCP and raw[1] & _ANSWER:
        return RouterRefused("it speaks an older version", is_older=True)
    if len(raw) < _PCP_ANSWER.size:
        return None
    version, operation, result, lifetime_s, _ = _PCP_ANSWER.unpack_from(raw)
    if version != _PCP or operation != (_MAP | _ANSWER):
        return None
    if result == _UNSUPPORTED:
        return RouterRefused("it speaks an older version", is_older=True)
    if len(raw) < _PCP_ANSWER.size + _PCP_MAP.size:
        return None
    said, protocol, inside, outside, host = _PCP_MAP.unpack_from(raw, _PCP_ANSWER.size)
    if (said, protocol, inside) != (nonce, _TCP, port):
        return None  # to somebody else
    if result:
        return RouterRefused(_PCP_SAYS.get(result, f"it says no (PCP result {result})"))
    return Mapped(outside, lifetime_s, _from_ipv6(host)) if outside or not lifetime_s else None


def pmp_address() -> bytes:
    return bytes((_PMP, _PMP_ADDRESS))


def read_pmp_address(raw: bytes) -> str | RouterRefused | None:
    if len(raw) < _PMP_TOLD.size:
        return _pmp_refused(raw, _PMP_ADDRESS)
    version, operation, result, _, host = _PMP_TOLD.unpack_from(raw)
    if (version, operation, result) != (_PMP, _PMP_ADDRESS | _ANSWER, 0):
        return _pmp_refused(raw, _PMP_ADDRESS)
    return str(ipaddress.IPv4Address(host))


def pmp_map(port: int, suggested: int, lifetime_s: int) -> bytes:
    return _PMP_MAP.pack(_PMP, _PMP_MAP_TCP, 0, port, suggested if lifetime_s else 0, lifetime_s)


def read_pmp_map(raw: bytes, port: int) -> Mapped | RouterRefused | None:
    if len(raw) < _PMP_MAPPED.size:
        return _pmp_refused(raw, _PMP_MAP_TCP)
    version, operation, result, _, inside, outside, lifetime_s = _PMP_MAPPED.unpack_from(raw)
    if (version, operation) != (_PMP, _PMP_MAP_TCP | _ANSWER) or inside != port:
        return None
    if result:
        return _pmp_refused(raw, _PMP_MAP_TCP)
    return Mapped(outside, lifetime_s) if outside or not lifetime_s else None


def _pmp_refused(raw: bytes, operation: int) -> RouterRefused | None:
    if len(raw) < 4 or raw[0] != _PMP or raw[1] != (operation | _ANSWER):
        return None
    result = int.from_bytes(raw[2:4], "big")
    return RouterRefused(_PMP_SAYS.get(result, f"it says no (NAT-PMP result {result})")) if result else None


def _as_ipv6(host: str) -> bytes:
    ip = ipaddress.ip_address(host)
    return ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed


def _from_ipv6(raw: bytes) -> str:
    ip = ipaddress.IPv6Address(raw)
    return str(ip.ipv4_mapped or ip)


# ---- port request ------------------------------------------------------------------------------------------

LIFETIME_S = 3600
SHORTEST_S = 60.0  # whatever a router says: it is asked no more often
AGAIN_S = (0.15, 0.3)  # after a question without an answer; then the next protocol, or that was all


class Tongue(StrEnum):
    PCP = "PCP"
    PMP = "NAT-PMP"


@dataclass
class PortRequest:
    client: str  # this machine's address towards the router
    port: int
    nonce: bytes  # that nobody can guess: an answer must have it
    tongue: Tongue = Tongue.PCP
    mapped: Mapped | None = None
    why_not: str = ""  # it is over: no port is open
    _asked: int = 0  # times, since the last answer
    _next_at: float = -math.inf
    _ends_at: float = math.inf  # of what is open
    _host: str = ""  # the router's, outside, by NAT-PMP

    @property
    def address(self) -> str:
        """HOST:PORT by which others reach the port; empty where that is not known."""
        host = (self.mapped.host or self._host) if self.mapped is not None else ""
        if self.mapped is None or not host:
            return ""
        return str(Address(host, self.mapped.port))

    def wait_s(self, now: float) -> float:
        """Until there is something to say, unless something is heard."""
        return math.inf if self.why_not else max(0.0, self._next_at - now)

    def due(self, now: float) -> list[bytes]:
        """What to send now."""
        if self.why_not or now < self._next_at:
            return []
        if self.mapped is not None and now >= self._ends_at:
            self._give_up("the router does not answer any more")
            return []
        if self._asked > len(AGAIN_S) - 1 and self.mapped is None:
            if self.tongue == Tongue.PMP:
                self._give_up("the router answers neither PCP nor NAT-PMP")
                return []
            self.tongue, self._asked = Tongue.PMP, 0
        pause_s = AGAIN_S[min(self._asked, len(AGAIN_S) - 1)]
        left_s = max(0.0, self._ends_at - now) if self.mapped is not None else 0.0
        self._asked += 1
        self._next_at = now + max(pause_s, left_s / 8)
        return self._questions(LIFETIME_S)

    def closing(self) -> list[bytes]:
        """What to send at the end."""
        return self._questions(0) if self.mapped is not None and not self.why_not else []

    def _questions(self, lifetime_s: int) -> list[bytes]:
        suggested = self.mapped.port if self.mapped is not None else self.port
        if self.tongue == Tongue.PCP:
            return [pcp_map(self.client, self.nonce, self.port, suggested, lifetime_s)]
        found = [pmp_map(self.port, suggested, lifetime_s)]
        return found if self._host or not lifetime_s else [pmp_address(), *found]

    def hear(self, raw: bytes, now: float) -> None:
        if self.why_not:
            return
        said: Mapped | RouterRefused | str | None
        if self.tongue == Tongue.PCP:
            said = read_pcp(raw, self.nonce, self.port)
        else:
            said = read_pmp_map(raw, self.port) or read_pmp_address(raw)
        match said:
            case RouterRefused(is_older=True) if self.tongue == Tongue.PCP:
                self.tongue, self._asked, self._next_at = Tongue.PMP, 0, now
            case RouterRefused(why=why):
                self._give_up(f"the router was asked to open a port ({self.tongue}): {why}")
            case str():
                self._host = said
            case Mapped(lifetime_s=lifetime_s) if lifetime_s:
                self.mapped, self._asked = said, 0
                kept_s = max(2 * SHORTEST_S, min(LIFETIME_S, lifetime_s))
                self._next_at, self._ends_at = now + kept_s / 2, now + kept_s

    def nobody_listens(self) -> None:
        """The router's machine says that nothing is at that port."""
        if self.mapped is None:
            self._give_up("the router answers neither PCP nor NAT-PMP")

    def _give_up(self, why: str) -> None:
        self.mapped, self.why_not = None, why
