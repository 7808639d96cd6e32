"""A ticket is good for one side of one pair of one run, and nobody can make one up (no open proxy)."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.reach.relays import (
    NAME_CHARS,
    Ticket,
    TicketScope,
    read,
    side_of,
    written,
)
from farflung.coordinator.roster.ways import pair_of
from farflung.protocol.limits import TICKET_CHARS

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw()
RUN = TicketScope(b"r" * 16, 3)
TICKET = Ticket(b"p" * 16, 1, 70_000)
NAME = written(TICKET, RUN, KEY.sign).encode()


def test_a_ticket_comes_back_as_it_was_written_and_looks_like_a_host() -> None:
    assert read(NAME, RUN, PUBLIC) == TICKET
    assert len(NAME) == NAME_CHARS <= TICKET_CHARS <= 255, "the longest name that SOCKS5 can ask for"
    assert NAME[:1].isalnum() and set(NAME.decode()) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
    )


@pytest.mark.parametrize(
    "run", [TicketScope(b"s" * 16, 3), TicketScope(b"r" * 16, 4)], ids=["another run", "after a restart"]
)
def test_it_is_of_no_use_elsewhere(run: TicketScope) -> None:
    assert read(NAME, run, PUBLIC) is None


def test_another_key_signs_no_tickets() -> None:
    other = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
    assert read(written(TICKET, RUN, other.sign).encode(), RUN, PUBLIC) is None
    assert written(TICKET, RUN, lambda statement: b"") == "", "who has no key writes none"


def test_whatever_is_changed_in_it_it_is_a_ticket_no_more() -> None:
    raw = base64.urlsafe_b64decode(NAME + b"=" * (-len(NAME) % 4))
    for at in range(len(raw)):
        changed = raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]
        assert read(base64.urlsafe_b64encode(changed).rstrip(b"="), RUN, PUBLIC) is None


@given(
    st.binary(max_size=200)
    | st.text(alphabet="AB-_=", min_size=NAME_CHARS, max_size=NAME_CHARS).map(str.encode)
)
def test_no_bytes_raise(name: bytes) -> None:
    assert read(name, RUN, PUBLIC) is None


def test_both_sides_find_the_same_pair_and_different_sides() -> None:
    one, other = b"a" * 32, b"b" * 32
    assert pair_of(one, other) == pair_of(other, one) != pair_of(one, one)
    assert (side_of(one, other), side_of(other, one)) == (0, 1)
