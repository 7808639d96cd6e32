"""Taking a large packet apart: what comes out is what the kernel's own TSO would have sent."""

from __future__ import annotations

import socket
import struct

import pytest

from rig.lab.packets import NEEDS_CHECKSUM, NOT_GSO, VNET, VNET_BYTES, Parcel, checksum, is_ipv4

TCPV4, ECN = 1, 0x80
SEGMENT_BYTES, OPTIONS = 1448, bytes(12)
CWR, ACK, PSH = 0x80, 0x10, 0x08
SOURCE, TARGET = socket.inet_aton("10.77.0.1"), socket.inet_aton("10.77.0.2")


def large_packet(payload: bytes, flags: int = CWR | ACK | PSH, sequence: int = 0xFFFFFF00) -> Parcel:
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, sequence, 7, 8 << 4, flags, 500, 0, 0) + OPTIONS
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 0xFFFF, 0, 64, 6, 0, SOURCE, TARGET)
    vnet = VNET.pack(NEEDS_CHECKSUM, TCPV4 | ECN, 52, SEGMENT_BYTES, 20, 16)
    return Parcel(vnet + ip + tcp + payload, target=3)


def fields(parcel: Parcel) -> dict[str, int]:
    ip = parcel.data[VNET_BYTES : VNET_BYTES + 20]
    total_bytes, ident = struct.unpack_from("!HH", ip, 2)
    (sequence,) = struct.unpack_from("!I", parcel.data, VNET_BYTES + 24)
    return {"total": total_bytes, "ident": ident, "sequence": sequence, "flags": parcel.data[VNET_BYTES + 33]}


def test_a_large_packet_counts_as_what_the_line_would_carry() -> None:
    parcel = large_packet(bytes(3 * SEGMENT_BYTES + 100))
    assert parcel.segments == 4
    assert parcel.wire_bytes == 3 * SEGMENT_BYTES + 100 + 4 * 52


def test_the_slices_hold_all_bytes_once_and_in_order() -> None:
    payload = bytes(range(256)) * 30
    parcel = large_packet(payload)
    slices = [parcel.slice(0, 1), parcel.slice(1, 4), parcel.slice(4, parcel.segments)]
    assert b"".join(each.data[VNET_BYTES + 52 :] for each in slices) == payload
    assert sum(each.segments for each in slices) == parcel.segments
    assert sum(each.wire_bytes for each in slices) == parcel.wire_bytes
    assert {each.target for each in slices} == {3}
    assert parcel.slice(0, parcel.segments) is parcel


def test_headers_of_slices_go_on_where_the_one_before_ended() -> None:
    parcel = large_packet(bytes(4 * SEGMENT_BYTES))
    first, rest = parcel.slice(0, 1), parcel.slice(1, 4)
    assert fields(first) == {
        "total": 52 + SEGMENT_BYTES,
        "ident": 0xFFFF,
        "sequence": 0xFFFFFF00,
        "flags": CWR | ACK,
    }
    later = (0xFFFFFF00 + SEGMENT_BYTES) & 0xFFFFFFFF  # both numbers wrap
    assert fields(rest) == {
        "total": 52 + 3 * SEGMENT_BYTES,
        "ident": 0,
        "sequence": later,
        "flags": ACK | PSH,
    }
    assert first.data[1] == NOT_GSO
    assert rest.data[1] == TCPV4 | ECN


@pytest.mark.parametrize("span", [(0, 1), (1, 3), (2, 4)])
def test_checksums_of_slices_are_right(span: tuple[int, int]) -> None:
    piece = large_packet(bytes(3 * SEGMENT_BYTES + 77)).slice(*span)
    ip = piece.data[VNET_BYTES : VNET_BYTES + 20]
    assert checksum(ip) == 0
    pseudo = ip[12:20] + struct.pack("!BBH", 0, 6, len(piece.data) - VNET_BYTES - 20)
    (told,) = struct.unpack_from("!H", piece.data, VNET_BYTES + 36)
    assert told == checksum(pseudo) ^ 0xFFFF


def test_what_is_not_ipv4_is_told_apart() -> None:
    assert is_ipv4(large_packet(b"x").data)
    assert not is_ipv4(bytes(VNET_BYTES) + b"\x60" + bytes(40))
    assert not is_ipv4(bytes(VNET_BYTES) + b"\x45")
