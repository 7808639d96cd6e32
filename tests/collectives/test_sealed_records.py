"""What a lean connection says (collectives/link/sealed_records.py): nothing opens but what the other side said next."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.collectives.link import sealed_records
from farflung.collectives.link.sealed_records import (
    HALF_BYTES,
    HEAD_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    TICKET_BYTES,
    BadRecord,
    Direction,
    Grant,
    SealedDirections,
)
from farflung.protocol.limits import BULK_HEADER_BYTES

ASKED, ANN, BOB = bytes(range(HALF_BYTES)), b"a" * 32, b"b" * 32
GRANT = Grant(2000, bytes(range(TICKET_BYTES)), b"h" * HALF_BYTES)
FRAMES = st.lists(
    st.tuples(st.binary(min_size=BULK_HEADER_BYTES, max_size=BULK_HEADER_BYTES), st.binary(max_size=40)),
    min_size=1,
    max_size=4,
)


def both(
    asked: bytes = ASKED, grant: Grant = GRANT, ann: bytes = ANN, bob: bytes = BOB
) -> tuple[SealedDirections, SealedDirections]:
    """Of the one that dials, and of the other."""
    return tuple(sealed_records.ways_of(asked, grant, ann, bob, dials) for dials in (True, False))  # type: ignore[return-value]


def said(frames: list[tuple[bytes, bytes]], out: Direction) -> list[bytes]:
    return [b"".join(sealed_records.sealed_frame(header, payload, out)) for header, payload in frames]


def heard(raw: bytes, back: Direction) -> list[tuple[bytes, bytes]]:
    """As a connection does that gets these bytes, and then its end."""
    got, at = [], 0
    while len(raw) - at >= HEAD_BYTES:
        head = raw[at : at + HEAD_BYTES]
        header, size = sealed_records.opened_header(head, back), sealed_records.sealed_payload_bytes(head)
        at += HEAD_BYTES
        if len(raw) - at < size:
            break  # cut short: never given to anybody
        got.append((header, back.open(raw[at : at + size]) if size else b""))
        at += size
    return got


def heard_until_refused(raw: bytes, back: Direction) -> list[tuple[bytes, bytes]]:
    got: list[tuple[bytes, bytes]] = []
    at = 0
    try:
        while len(raw) - at >= HEAD_BYTES:
            one = HEAD_BYTES + sealed_records.sealed_payload_bytes(raw[at : at + HEAD_BYTES])
            got += heard(raw[at : at + one], back)
            at += one
    except BadRecord:
        with pytest.raises(BadRecord):
            back.open(raw)
    return got


@given(FRAMES)
def test_what_is_said_is_heard_both_ways(frames: list[tuple[bytes, bytes]]) -> None:
    ann, bob = both()
    assert heard(b"".join(said(frames, ann.out)), bob.back) == frames
    assert heard(b"".join(said(frames, bob.out)), ann.back) == frames


@given(FRAMES, st.data())
def test_P8_a_flipped_bit_ends_what_is_heard_there(
    frames: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    ann, bob = both()
    raw = bytearray(b"".join(said(frames, ann.out)))
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    got = heard_until_refused(bytes(raw), bob.back)
    assert got == frames[: len(got)] and len(got) < len(frames)


@given(FRAMES, st.data())
def test_P8_cut_short_only_whole_frames_are_heard(
    frames: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    ann, bob = both()
    raw = b"".join(said(frames, ann.out))
    got = heard(raw[: data.draw(st.integers(0, len(raw) - 1))], bob.back)
    assert got == frames[: len(got)] and len(got) < len(frames)


@given(FRAMES, st.data())
def test_P8_repeated_left_out_or_swapped_frames_end_what_is_heard(
    frames: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    ann, bob = both()
    sealed = said(frames, ann.out)
    order = data.draw(st.lists(st.sampled_from(range(len(frames))), min_size=1, max_size=6))
    got = heard_until_refused(b"".join(sealed[n] for n in order), bob.back)
    in_order = 0
    while in_order < len(order) and order[in_order] == in_order:
        in_order += 1
    assert got == frames[:in_order]


def test_P8_after_something_that_does_not_open_not_even_what_comes_next_does() -> None:
    ann, bob = both()
    with pytest.raises(BadRecord):
        bob.back.open(bytes(50))
    with pytest.raises(BadRecord):
        bob.back.open(ann.out.seal(b"what was said"))
    other = both()[1].back
    assert other.open(both()[0].out.seal(b"what was said")) == b"what was said"


@given(FRAMES)
def test_P8_nobody_hears_what_it_said_itself(frames: list[tuple[bytes, bytes]]) -> None:
    ann, _ = both()
    with pytest.raises(BadRecord):
        heard(b"".join(said(frames, ann.out)), ann.back)


@pytest.mark.parametrize(
    "other",
    [
        both(asked=b"x" * HALF_BYTES),
        both(grant=GRANT._replace(half=b"x" * HALF_BYTES)),
        both(grant=GRANT._replace(ticket=b"x" * TICKET_BYTES)),
        both(ann=b"x" * 32),
        both(bob=b"x" * 32),
        both(ann=BOB, bob=ANN),
    ],
    ids=["asked", "granted", "ticket", "dialler", "listener", "roles"],
)
def test_P8_a_connection_that_differs_in_anything_has_another_secret(
    other: tuple[SealedDirections, SealedDirections],
) -> None:
    ann, _ = both()
    raw = sealed_records.hello(GRANT.ticket, ann.out)
    assert len(raw) == HELLO_BYTES and sealed_records.ticket_in(raw) == GRANT.ticket
    with pytest.raises(BadRecord):
        sealed_records.check_hello(raw, other[1].back)


def test_the_hello_and_its_answer_show_that_both_know_the_secret() -> None:
    ann, bob = both()
    sealed_records.check_hello(sealed_records.hello(GRANT.ticket, ann.out), bob.back)
    said_back = sealed_records.answer(GRANT.ticket, bob.out)
    assert len(said_back) == TAG_BYTES
    sealed_records.check_answer(said_back, GRANT.ticket, ann.back)
    assert heard(b"".join(said([(b"h" * BULK_HEADER_BYTES, b"p")], ann.out)), bob.back) == [
        (b"h" * BULK_HEADER_BYTES, b"p")
    ]


@given(st.binary(max_size=2 * HELLO_BYTES))
def test_P8_whatever_a_stranger_says_is_a_ticket_or_nothing(raw: bytes) -> None:
    assert len(sealed_records.ticket_in(raw)) in (0, TICKET_BYTES)
    grant = sealed_records.grant_of(raw)
    assert grant is None or grant.pack() == raw
    assert sealed_records.grant_of(GRANT.pack()) == GRANT


def test_no_nonce_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[bytes, bytes]] = []

    class Watched:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def encrypt(self, nonce: bytes, plain: bytes, beside: bytes | None) -> bytes:
            used.append((self.key, nonce))
            return plain + bytes(TAG_BYTES)

    monkeypatch.setattr(sealed_records, "AESGCM", Watched)
    for end in both():
        sealed_records.hello(GRANT.ticket, end.out)
        said([(bytes(BULK_HEADER_BYTES), b"p"), (bytes(BULK_HEADER_BYTES), b"")], end.out)
    assert len(set(used)) == len(used) == 8 and len({key for key, _ in used}) == 2
    assert all(len(nonce) == 12 for _, nonce in used)
    assert all(a < b for (k, a), (m, b) in pairwise(used) if k == m)


def test_a_key_seals_no_more_than_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_records, "SEALED_BYTES_MOST", 1000)
    out = both()[0].out
    out.seal(bytes(999))
    assert not out.is_spent
    out.seal(b"x")
    assert out.is_spent


def test_a_frame_whose_header_spends_the_key_is_said_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_records, "SEALED_BYTES_MOST", BULK_HEADER_BYTES)
    ours, theirs = both()
    frame = (b"h" * BULK_HEADER_BYTES, b"payload")
    assert heard(said([frame], ours.out)[0], theirs.back) == [frame] and ours.out.is_spent
