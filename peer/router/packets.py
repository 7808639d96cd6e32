"""The packets by which a home router is asked to open a port: PCP (RFC 6887), and NAT-PMP (RFC 6886) before it.  Pure.

Read and written by port_request.py.  What comes from a router is bytes of anybody on the local network: whatever is not
the answer to this very question is nothing.  Must not know sockets, or when to ask.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

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
