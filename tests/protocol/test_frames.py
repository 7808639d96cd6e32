"""Bulk frames: what a header may claim, and that no flipped byte gets through unseen (P8)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.protocol import limits
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.frames import (
    CORE_KINDS,
    FrameKind,
    Header,
    Kind,
    check_payload,
    claimed,
    known_kinds,
    parse,
    with_payload,
)
from rig.crossing_kinds import KINDS, SomeCrossing

fixed = settings(max_examples=150)

TAG = bytes(range(8))
PAYLOAD = bytes(range(200))
FRAME = with_payload(Header(Kind.RESULT, TAG, round_no=3, decision_no=1, version=2, chunk=5), PAYLOAD)
RAW = FRAME.header.pack()
PADDING = {5, *range(80, 96)}


def bulk_verdict(raw: bytes, payload: bytes = PAYLOAD, run_tag: bytes = TAG, most: int = 4096) -> Verdict:
    try:
        check_payload(parse(raw, len(payload), run_tag, most), payload)
    except FrameError as error:
        assert str(error)
        return error.verdict
    return Verdict.ACCEPTED


def test_bulk_kinds_of_the_core_and_their_numbers_are_exactly_these() -> None:
    plain = ["CONTRIBUTION", "RESULT", "LOGGED", "MANIFEST", "STATE", "MISSING", "PING", "PONG", "LATER"]
    wants = ["WANT_CONTRIBUTION", "WANT_RESULT", "WANT_LOGGED", "WANT_MANIFEST", "WANT_STATE"]
    numbers = dict(enumerate(plain, start=1)) | dict(enumerate(wants, start=17))
    numbers |= {27: "WANT_HAVE", 28: "HAVE", 34: "LEAN_ASKED", 35: "LEAN_GRANTED"}
    assert {number: kind.name for number, kind in CORE_KINDS.items()} == numbers
    assert not any(kind.crossing for kind in CORE_KINDS.values())


def test_a_number_is_given_out_once() -> None:
    class OtherKind(FrameKind):
        SURPRISE = int(Kind.RESULT)

    with pytest.raises(ValueError, match="SURPRISE and RESULT have the same number, 2"):
        known_kinds(SomeCrossing, OtherKind)
    assert known_kinds(SomeCrossing, SomeCrossing) == KINDS
    assert CORE_KINDS | {int(kind): kind for kind in SomeCrossing} == KINDS


@pytest.mark.parametrize("kind", list(SomeCrossing))
def test_kinds_of_a_mode_are_unknown_to_whoever_does_not_know_the_mode(kind: FrameKind) -> None:
    """They are refused like any other unknown kind, and nothing is asked for again because of them."""
    payload = b"" if kind.bare else PAYLOAD
    frame = with_payload(Header(kind, TAG, version=2, chunk=5), payload)
    raw = frame.header.pack()
    with pytest.raises(FrameError, match=f"unknown bulk kind {int(kind)}") as caught:
        parse(raw, len(payload), TAG, 4096)
    assert caught.value.verdict == Verdict.MALFORMED
    assert claimed(raw, TAG) is None
    assert parse(raw, len(payload), TAG, 4096, KINDS) == claimed(raw, TAG, KINDS) == frame.header


def test_a_bulk_header_comes_back_as_it_was_sent() -> None:
    assert parse(RAW, len(PAYLOAD), TAG, 4096) == FRAME.header
    assert len(RAW) == limits.BULK_HEADER_BYTES == 96


def test_every_flipped_header_byte_is_refused_or_changes_only_where_it_belongs() -> None:
    """What the header alone can't show (another round, chunk or version) is the round's to judge."""
    free = {*range(16, 44)}  # round, decision, version, chunk
    for position in range(len(RAW)):
        for change in (1, 0x80, 0xFF):
            raw = bytearray(RAW)
            raw[position] ^= change
            verdict = bulk_verdict(bytes(raw))
            if position in PADDING:
                assert verdict == Verdict.ACCEPTED
            elif position in free:
                assert verdict == Verdict.ACCEPTED
                assert parse(bytes(raw), len(PAYLOAD), TAG, 4096).pack() == bytes(raw)
            elif position == 4:  # the kind may turn into another kind that carries bytes
                assert verdict == Verdict.MALFORMED or not CORE_KINDS[raw[4]].bare
            elif position in range(8, 16):
                assert verdict == Verdict.UNAUTHORISED
            else:
                assert verdict == (Verdict.BAD_HASH if position in range(48, 80) else Verdict.MALFORMED)


def test_every_flipped_payload_byte_is_a_bad_hash() -> None:
    for position in range(len(PAYLOAD)):
        broken = bytearray(PAYLOAD)
        broken[position] ^= 1
        assert bulk_verdict(RAW, bytes(broken)) == Verdict.BAD_HASH


@pytest.mark.parametrize(
    ("verdict", "raw", "payload"),
    [
        (Verdict.MALFORMED, RAW[:-1], PAYLOAD),
        (Verdict.MALFORMED, RAW + b"\0", PAYLOAD),
        (Verdict.MALFORMED, b"", b""),
        (Verdict.MALFORMED, RAW, PAYLOAD[:-1]),
        (Verdict.MALFORMED, RAW, b""),
        (Verdict.OVERSIZE, RAW, bytes(4097)),
        (Verdict.MALFORMED, Header(Kind.RESULT, TAG).pack(), b""),
        (Verdict.MALFORMED, with_payload(Header(Kind.WANT_STATE, TAG), b"x").header.pack(), b"x"),
        (Verdict.MALFORMED, with_payload(Header(Kind.MISSING, TAG), b"x").header.pack(), b"x"),
        (Verdict.UNAUTHORISED, Header(Kind.WANT_STATE, b"another!").pack(), b""),
    ],
)
def test_a_bulk_frame_that_breaks_a_rule_ends_in_its_counter(
    verdict: Verdict, raw: bytes, payload: bytes
) -> None:
    assert bulk_verdict(raw, payload) == verdict


@fixed
@given(st.binary(min_size=96, max_size=96), st.binary(max_size=64))
def test_random_bulk_headers_never_raise_anything_else(raw: bytes, payload: bytes) -> None:
    bulk_verdict(raw, payload)
    forced = RAW[:4] + raw[4:6] + RAW[6:16] + raw[16:]  # past the magic, the protocol and the run
    bulk_verdict(forced, payload)


def test_a_header_that_claims_four_gigabytes_is_refused_by_its_length_alone() -> None:
    header = Header(Kind.STATE, TAG, length=(1 << 32) - 1, hash=hash_bytes(b""))
    assert bulk_verdict(header.pack(), b"") == Verdict.MALFORMED
    with pytest.raises(FrameError) as refused:
        parse(header.pack(), (1 << 32) - 1, TAG, 16 << 20)  # the largest chunk_kb a run may have
    assert refused.value.verdict == Verdict.OVERSIZE
