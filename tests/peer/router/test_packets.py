"""What is said to a router, and what its answers may do: bytes of anybody on the local network."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.peer.router.port_request import (
    Mapped,
    RouterRefused,
    pcp_map,
    pmp_address,
    pmp_map,
    read_pcp,
    read_pmp_address,
    read_pmp_map,
)

NONCE = bytes(range(12))
HOST = bytes(10) + b"\xff\xff" + bytes((203, 0, 113, 9))


def answer(
    result: int = 0, outside: int = 40001, lifetime_s: int = 3600, nonce: bytes = NONCE, inside: int = 4000
) -> bytes:
    head = struct.pack(">BBBBII12x", 2, 0x81, 0, result, lifetime_s, 1)
    return head + struct.pack(">12sB3xHH16s", nonce, 6, inside, outside, HOST)


def test_a_question_is_as_the_standard_has_it() -> None:
    raw = pcp_map("192.168.1.2", NONCE, 4000, 40001, 3600)
    assert len(raw) == 60 and raw[:4] == b"\x02\x01\0\0" and raw[4:8] == (3600).to_bytes(4, "big")
    assert raw[8:24] == bytes(10) + b"\xff\xff" + bytes((192, 168, 1, 2))
    assert raw[24:36] == NONCE and raw[36] == 6 and raw[40:44] == struct.pack(">HH", 4000, 40001)
    assert pmp_address() == b"\0\0"
    assert pmp_map(4000, 40001, 3600) == b"\0\x02\0\0" + struct.pack(">HHI", 4000, 40001, 3600)
    assert pmp_map(4000, 40001, 0)[6:8] == b"\0\0", "to close it, nothing is suggested"


def test_answers_are_read() -> None:
    assert read_pcp(answer(), NONCE, 4000) == Mapped(40001, 3600, "203.0.113.9")
    assert read_pcp(answer(lifetime_s=0, outside=0), NONCE, 4000) == Mapped(0, 0, "203.0.113.9")
    told = struct.pack(">BBHI4s", 0, 0x80, 0, 1, bytes((203, 0, 113, 9)))
    assert read_pmp_address(told) == "203.0.113.9"
    assert read_pmp_map(struct.pack(">BBHIHHI", 0, 0x82, 0, 1, 4000, 40001, 60), 4000) == Mapped(40001, 60)


@pytest.mark.parametrize(
    "raw",
    [
        answer(nonce=bytes(12)),
        answer(inside=4001),
        answer()[:-1],
        answer(outside=0),
        b"",
        b"\x02",
        pcp_map("192.168.1.2", NONCE, 4000, 4000, 60),  # its own question
    ],
)
def test_what_answers_another_question_is_nothing(raw: bytes) -> None:
    assert read_pcp(raw, NONCE, 4000) is None


def test_no_is_told_in_words() -> None:
    said = read_pcp(answer(result=2), NONCE, 4000)
    assert isinstance(said, RouterRefused) and "does not allow" in said.why and not said.is_older
    older = read_pcp(struct.pack(">BBHI", 0, 0x81, 1, 7), NONCE, 4000)
    assert isinstance(older, RouterRefused) and older.is_older, "a router that knows NAT-PMP alone"
    said = read_pmp_map(struct.pack(">BBHI", 0, 0x82, 3, 1), 4000)
    assert isinstance(said, RouterRefused) and "no address itself" in said.why
    unknown = read_pmp_map(struct.pack(">BBHIHHI", 0, 0x82, 99, 1, 4000, 0, 0), 4000)
    assert isinstance(unknown, RouterRefused) and "99" in unknown.why


@given(st.binary(max_size=80))
def test_no_bytes_do_harm(raw: bytes) -> None:
    for prefix in (b"", b"\x02\x81\0\0", b"\0\x80", b"\0\x82\0\0"):
        read_pcp(prefix + raw, NONCE, 4000)
        read_pmp_map(prefix + raw, 4000)
        read_pmp_address(prefix + raw)
