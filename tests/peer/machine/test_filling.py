"""While all values of a fragment are written, nothing that arrives is put among them, and however that ends, what the
replica says of itself is so.

Cyd fills her replica of two chunks; bob knows the run's version 1, and sends what is true of it at the worst moment.
"""

from __future__ import annotations

import pytest

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import Install, Roll, Seal, SendFrame
from farflung.peer.machine.effects import Effect
from farflung.peer.machine.held_fragment import Empty, Filling, Hashing, VoidFilling
from farflung.peer.machine.replicas import Replica
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, bare_answer, with_payload
from farflung.protocol.messages import FragmentTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit
from farflung.protocol.states import IllegalMove

TAG = bytes(8)
PIECES = [b"chunk 0 at 1", b"chunk 1 at 1"]
HASHES = [hash_bytes(piece) for piece in PIECES]
COMMIT = Commit(1, 1, ("bob",), (1.0,), b"".join(map(hash_bytes, (b"result 0", b"result 1"))), "fp32", 0)
LISTED = with_payload(Header(Kind.MANIFEST, TAG, version=1, chunk=0), b"".join(HASHES))
MISSING = bare_answer(Kind.MISSING, Header(Kind.WANT_STATE, TAG, chunk=0))


def piece(chunk: int) -> Frame:
    return with_payload(Header(Kind.STATE, TAG, version=1, chunk=chunk), PIECES[chunk])


def logged(chunk: int) -> Frame:
    return with_payload(Header(Kind.LOGGED, TAG, version=1, chunk=chunk), f"result {chunk}".encode())


def cyd(has: int | None = None) -> Replica:
    """She knows where the run is, and has asked bob for its state; `has`: a chunk of it that is here."""
    replica = Replica("cyd", TAG, Fragment(0, 0, 2), ResultLog(3))
    replica.on_tick(FragmentTick(0, 1, ((0, b"0" * 32), (1, root_of(HASHES))), False, ("bob",), 0, False, 0))
    replica.on_commit(COMMIT, 0.0)
    replica.advance(0.0)
    if has is not None:
        replica.held.on_piece("bob", LISTED)
        replica.held.on_piece("bob", piece(has))
        replica.advance(0.0)
    return replica


def changes(effects: list[Effect]) -> list[Effect]:
    return [each for each in effects if isinstance(each, Install | Roll | Seal)]


def test_P1_what_arrives_while_values_are_written_is_stale_and_changes_nothing() -> None:
    replica = cyd()
    replica.held.fill()
    for frame in (LISTED, piece(0), piece(1), logged(0), logged(1), MISSING, LISTED, piece(0)):
        assert replica.held.on_piece("bob", frame) is Verdict.STALE and replica.advance(1.0) == []
    assert replica.filled(0) == [Seal(0, 0)] and replica.held.chunks.versions == [0, 0]


def test_P6_what_was_asked_for_before_is_asked_for_again_after_it_came_to_nothing() -> None:
    replica = cyd()
    replica.held.fill()
    replica.unfilled(touched=False)
    again = [each.frame.header.kind for each in replica.advance(1.0) if isinstance(each, SendFrame)]
    assert {Kind.WANT_MANIFEST, Kind.WANT_STATE} <= {*again}, "and bob is not thought to be slow"


def test_P4_of_what_is_being_written_over_nothing_is_given_away() -> None:
    replica = cyd(has=1)
    want = Header(Kind.WANT_STATE, TAG, chunk=1)
    assert replica.source.gives(1)
    replica.held.fill()
    assert not replica.source.gives(1)
    [missing] = replica.source.answer("dan", want, 0.0)
    assert isinstance(missing, SendFrame) and missing.frame.header.kind is Kind.MISSING
    replica.unfilled(touched=False)
    assert replica.source.gives(1), "nothing was written: it is what it was"


def test_a_disk_that_fails_half_way_leaves_nothing_and_no_mixture() -> None:
    replica = cyd(has=1)
    replica.held.fill()
    replica.unfilled(touched=True)
    assert isinstance(replica.held.stand, Empty) and replica.held.chunks.versions == [NO_VERSION] * 2
    replica.held.on_piece("bob", LISTED)
    arrived = []
    for chunk in (0, 1):
        replica.held.on_piece("bob", piece(chunk))
        arrived += replica.advance(1.0)
    assert [type(each) for each in changes(arrived)] == [Install, Install, Seal]


def test_the_run_that_goes_back_while_values_are_written_has_no_use_for_them() -> None:
    for end in ("filled", "unfilled", "recalled"):
        replica = cyd()
        replica.held.fill()
        replica.go_back(0, b"0" * 32)
        assert isinstance(replica.held.stand, VoidFilling)
        replica.go_back(0, b"0" * 32)
        replica.on_tick(FragmentTick(0, 1, ((1, root_of(HASHES)),), False, ("bob",), 0, False, 0))
        assert replica.held.on_piece("bob", LISTED) is Verdict.STALE and replica.advance(1.0) == []
        if end == "filled":
            assert replica.filled(1) == []
        elif end == "unfilled":
            replica.unfilled(touched=True)
        else:
            replica.unfilled(True, {0: (1, b""), 1: (1, b"")})
        assert isinstance(replica.held.stand, Empty) and replica.held.chunks.versions == [NO_VERSION] * 2


def test_pieces_that_were_recalled_are_where_they_were_and_the_others_are_fetched() -> None:
    replica = cyd()
    replica.held.fill()
    replica.unfilled(True, {1: (1, root_of(HASHES))})
    assert isinstance(replica.held.stand, Empty) and replica.held.chunks.versions == [NO_VERSION, 1]
    wanted = [
        each.frame.header
        for each in replica.advance(1.0)
        if isinstance(each, SendFrame) and each.frame.header.kind is Kind.WANT_STATE
    ]
    assert [each.chunk for each in wanted] == [0]


def test_two_do_not_fill_a_replica_at_once_and_what_is_hashed_is_not_filled() -> None:
    replica = cyd()
    replica.held.fill()
    with pytest.raises(IllegalMove):
        replica.held.fill()
    assert isinstance(replica.held.stand, Filling)
    replica.filled(0)
    with pytest.raises(IllegalMove):
        replica.held.fill()
    assert isinstance(replica.held.stand, Hashing)


def test_P4_a_true_piece_that_she_lacks_not_tears_no_whole_state() -> None:
    replica = cyd()
    replica.held.fill()
    replica.filled(0)
    replica.on_sealed(0, b"0" * 32)
    replica.held.on_piece("bob", LISTED)
    assert replica.held.on_piece("bob", piece(0)) is Verdict.STALE
    assert not changes(replica.advance(1.0)) and replica.held.whole and replica.held.chunks.versions == [0, 0]


def test_P1_pieces_that_came_just_before_are_not_put_into_what_is_being_written() -> None:
    replica = cyd()
    replica.held.on_piece("bob", LISTED)
    assert (
        replica.held.on_piece("bob", piece(0)) is Verdict.ACCEPTED
    )  # while the trainer reads the anchor, say
    replica.held.fill()
    replica.unfilled(touched=False)
    assert not changes(replica.advance(1.0)) and replica.held.chunks.versions == [NO_VERSION] * 2
