"""A contribution that leaves ahead of its round: what is given to whom and when, and what owners keep of whom."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.collectives.round.effects import SendFrame
from farflung.peer.slow_lines.early_upload import (
    LAST_LEAST_S,
    STUCK_S,
    UNANSWERED_S,
    EarlyKind,
    KeptEarly,
    SendingAhead,
)
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind
from farflung.protocol.mode_words import AheadPlan
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Plan

TAG = bytes(8)
FRAGMENT = Fragment(1, 10, 4)  # its chunks are 10 to 13
AHEAD = AheadPlan(5, ("zoe",), ("int8",), ("ann", "bob"), (0, 0, 1, 1))
PLAN = Plan(7, 1, 3, ("ann", "bob", "zoe"), (0, 0, 1, 1), ("int8",) * 3, 1)
BYTES = {place: f"zoe's {place}".encode() for place in range(4)}


def zoe(plan: AheadPlan | None = AHEAD) -> SendingAhead:
    sending = SendingAhead("zoe", TAG, FRAGMENT)
    sending.plan = plan
    sending.begin()
    assert sending.parcel is not None
    assert sending.on_encoded(sending.parcel.number, BYTES)
    return sending


def told(frames: list[SendFrame]) -> list[tuple[str, Kind, int]]:
    return [(each.to, each.frame.header.kind, each.frame.header.chunk) for each in frames]


def held(place: int) -> Header:
    return Header(EarlyKind.AHEAD_HELD, TAG, chunk=10 + place, hash=hash_bytes(BYTES[place]))


def test_each_owner_is_given_one_chunk_at_a_time_and_all_in_the_end() -> None:
    sending = zoe()
    assert told(sending.send(0.0)) == [("ann", EarlyKind.AHEAD, 10), ("bob", EarlyKind.AHEAD, 12)]
    assert sending.send(1.0) == [] and not sending.delivered
    assert sending.on_held("ann", held(0)) is Verdict.ACCEPTED
    assert told(sending.send(1.0)) == [("ann", EarlyKind.AHEAD, 11)]
    for who, place in (("bob", 2), ("ann", 1)):
        sending.on_held(who, held(place))
    assert told(sending.send(2.0)) == [("bob", EarlyKind.AHEAD, 13)] and not sending.delivered
    sending.on_held("bob", held(3))
    assert sending.delivered and sending.send(3.0) == []


def test_who_says_nothing_of_a_chunk_gets_it_again_some_time() -> None:
    sending = zoe()
    sending.send(0.0)
    assert sending.send(UNANSWERED_S - 1) == []
    assert told(sending.send(UNANSWERED_S)) == [("ann", EarlyKind.AHEAD, 10), ("bob", EarlyKind.AHEAD, 12)]


def test_where_an_owner_is_not_reached_for_long_a_round_may_begin_so_that_it_loses_its_chunks() -> None:
    sending = zoe()
    sending.send(0.0)
    sending.on_held("ann", held(0))
    for now in (1.0, STUCK_S):
        sending.send(now)
        assert not sending.delivered
    sending.send(1.0 + STUCK_S)
    assert sending.delivered
    sending.on_held("bob", held(2))
    sending.send(2.0 + STUCK_S)
    assert not sending.delivered


@pytest.mark.parametrize(("most_at", "until"), [(10.0, 10.0 + LAST_LEAST_S), (200.0, 600.0)])
def test_the_last_owner_of_several_is_not_waited_for_as_long_as_it_likes(
    most_at: float, until: float
) -> None:
    """Not even if it says now and then that it has one chunk more."""
    sending = zoe(AheadPlan(5, ("zoe",), ("int8",), ("ann", "bob", "cyd"), (0, 1, 2, 2)))
    sending.send(0.0)
    for who, place, now in (("ann", 0, 5.0), ("bob", 1, most_at)):
        sending.on_held(who, held(place))
        sending.send(now)
    sending.send(until - 2.0)
    sending.on_held("cyd", held(2))
    sending.send(until - 1.0)
    assert not sending.delivered
    sending.send(until)
    assert sending.delivered


def test_a_word_about_other_bytes_says_nothing() -> None:
    sending = zoe()
    sending.send(0.0)
    assert sending.on_held("ann", replace_hash(held(0), bytes(32))) is Verdict.STALE
    assert sending.send(1.0) == []


def replace_hash(header: Header, digest: bytes) -> Header:
    return Header(header.kind, header.run_tag, chunk=header.chunk, hash=digest)


def deliver(sending: SendingAhead) -> None:
    assert sending.plan is not None
    for place in range(4):
        sending.on_held(sending.plan.owner_of(place), held(place))


def test_what_has_another_owner_now_is_sent_to_that_one_and_nothing_else() -> None:
    sending = zoe()
    deliver(sending)
    sending.plan = replace(AHEAD, number=6, owners=(0, 1, 1, 1))
    assert not sending.delivered
    assert told(sending.send(0.0)) == [("bob", EarlyKind.AHEAD, 11)]
    sending.plan = AHEAD
    assert sending.delivered  # that one still has it


def test_an_owner_that_asks_for_what_it_had_gets_it_again() -> None:
    sending = zoe()
    deliver(sending)
    sending.on_lacked("bob", 12)
    assert not sending.delivered
    assert told(sending.send(0.0)) == [("bob", EarlyKind.AHEAD, 12)]


def test_in_its_round_owners_hear_which_bytes_count() -> None:
    sending = zoe()
    deliver(sending)
    sending.on_lacked("bob", 13)
    frames = sending.names(replace(PLAN, owners=(0, 1, 1, 1)))
    assert told(frames) == [("ann", EarlyKind.AHEAD_COUNTS, 10), ("bob", EarlyKind.AHEAD_COUNTS, 12)]
    header = frames[1].frame.header
    assert (header.round_no, header.version, header.hash) == (7, 3, hash_bytes(BYTES[2]))


def test_what_comes_of_a_parcel_that_was_dropped_is_nobodys() -> None:
    sending = zoe()
    assert sending.parcel is not None
    old = sending.parcel.number
    sending.begin()
    assert not sending.on_encoded(old, BYTES) and sending.send(0.0) == []


def test_chunks_of_one_owner_are_not_encoded_in_a_row() -> None:
    assert zoe().order == (0, 2, 1, 3)


# ---- at an owner ----------------------------------------------------------------------------------------------


def ahead(place: int, payload: bytes | None = None) -> Frame:
    data = BYTES[place] if payload is None else payload
    header = Header(EarlyKind.AHEAD, TAG, chunk=10 + place, length=len(data), hash=hash_bytes(data))
    return Frame(header, data)


def naming(place: int, payload: bytes | None = None) -> Header:
    data = BYTES[place] if payload is None else payload
    return Header(EarlyKind.AHEAD_COUNTS, TAG, 7, 0, 3, 10 + place, hash=hash_bytes(data))


def test_an_owner_keeps_what_it_is_to_own_of_whom_it_is_to_keep_it() -> None:
    kept = KeptEarly("ann", TAG, FRAGMENT)
    verdict, [answer] = kept.keep(AHEAD, "zoe", ahead(0))
    assert verdict is Verdict.ACCEPTED
    assert (answer.to, answer.frame.header) == ("zoe", held(0))
    assert kept.keep(AHEAD, "zoe", ahead(0))[0] is Verdict.DUPLICATE
    assert kept.keep(AHEAD, "zoe", ahead(2)) == (Verdict.STALE, [])  # bob's
    assert kept.keep(AHEAD, "eve", ahead(0)) == (Verdict.UNAUTHORISED, [])
    assert kept.keep(None, "zoe", ahead(0)) == (Verdict.UNAUTHORISED, [])
    assert kept.bytes == len(BYTES[0])


def test_of_each_chunk_the_newest_is_kept_so_that_nobody_fills_the_memory() -> None:
    kept = KeptEarly("ann", TAG, FRAGMENT)
    for number in range(9):
        kept.keep(AHEAD, "zoe", ahead(0, b"%d" % number))
    assert kept.bytes == 1
    kept.on_plan(replace(AHEAD, senders=("yan",)))
    assert kept.bytes == 0


def test_what_is_named_counts_as_if_it_came_now_and_nothing_else_does() -> None:
    kept = KeptEarly("ann", TAG, FRAGMENT)
    kept.keep(AHEAD, "zoe", ahead(0))
    frame = kept.named("zoe", naming(0))
    assert frame is not None and frame.payload == BYTES[0]
    header = frame.header
    assert (header.kind, header.round_no, header.version, header.chunk) == (Kind.CONTRIBUTION, 7, 3, 10)
    assert kept.named("zoe", naming(0, b"other")) is None
    assert kept.named("zoe", naming(1)) is None and kept.named("eve", naming(0)) is None
