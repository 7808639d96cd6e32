"""What a guest of the relay may say first: a greeting, a name, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.relay.socks import CHOSEN, MOST_BYTES, NONE_CHOSEN, SocksGreeting

HELLO = b"\x05\x01\x00"
ASKS = b"\x05\x01\x00\x03\x04name\x00\x01"


@given(st.lists(st.integers(1, 8), max_size=20))
def test_a_name_comes_through_in_whatever_pieces(sizes: list[int]) -> None:
    greeting, said, replies = SocksGreeting(), HELLO, b""
    for size in sizes:
        piece, said = said[:size], said[size:]
        replies += greeting.feed(piece)
    replies += greeting.feed(said)
    assert replies == CHOSEN and not greeting.over and greeting.name == b""
    assert greeting.feed(ASKS) == b"" and greeting.name == b"name" and not greeting.over


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (b"GET / HTTP/1.1\r\n", b""),
        (b"\x04\x01", b""),
        (b"\x05\x01\x02", NONE_CHOSEN),  # it insists on a password
        (HELLO + b"\x05\x02\x00\x03\x04name\x00\x01", CHOSEN + b"\x05\x07\x00\x01" + bytes(6)),  # BIND
        (HELLO + b"\x05\x03\x00\x01\x7f\x00\x00\x01\x00\x50", CHOSEN + b"\x05\x07\x00\x01" + bytes(6)),  # UDP
        (
            HELLO + b"\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50",
            CHOSEN + b"\x05\x08\x00\x01" + bytes(6),
        ),  # 127.0.0.1
        (HELLO + b"\x05\x01\x00\x03\x00\x00\x01", CHOSEN),  # no name
        (HELLO + ASKS + b"more", CHOSEN),  # nobody is joined yet: to whom should that go?
    ],
)
def test_it_proxies_to_nobody(said: bytes, reply: bytes) -> None:
    greeting = SocksGreeting()
    assert greeting.feed(said) == reply and greeting.over


def test_no_end_of_bytes_is_kept() -> None:
    greeting = SocksGreeting()
    for _ in range(MOST_BYTES):
        greeting.feed(b"\x05\xff" if not greeting.over else b"")
    assert greeting.over


@given(st.binary(max_size=700))
def test_no_bytes_raise(said: bytes) -> None:
    greeting = SocksGreeting()
    greeting.feed(said)
    assert len(greeting.name) <= 255
