"""The way of every bulk frame into its replica: by its chunk, after its explanation, into exactly one counter (P8)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.round.effects import Merge, SendFrame
from farflung.peer.machine import replicas
from farflung.peer.machine.effects import Effect, Serve
from farflung.peer.machine.heartbeat import _fragment_beat, phase_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Kind, Spoiled
from farflung.protocol.limits import BULK_HEADER_BYTES
from farflung.protocol.round_words import Decision
from farflung.protocol.states import Phase
from rig.made_part import CHUNKS, UNUSABLE, MadePart, commit_of, digest_of, frame_of, result_of, word_of

FRAME_BYTES = BULK_HEADER_BYTES + 100


class Receiver(MadePart):
    """Ann with both fragments at version 0, to whom frames come."""

    def __init__(self) -> None:
        super().__init__()
        self.founds()

    def gets(self, frame: Frame, sender: str = "bob", now: float = 0.0) -> list[Effect]:
        return self.part.on_frame(sender, frame, now)

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.part.counters.as_dict().items() if count}

    @property
    def waiting(self) -> list[tuple[str, int]]:
        """(sender, round) of the frames that are kept for a moment."""
        return [(sender, frame.header.round_no) for sender, frame in self.part._early]


def contribution(chunk: int, round_no: int = 1, payload: bytes = b"bob's") -> Frame:
    return frame_of(Kind.CONTRIBUTION, chunk, payload, round_no=round_no)


def result(chunk: int, round_no: int = 1, payload: bytes = b"", decision_no: int = 1) -> Frame:
    return frame_of(
        Kind.RESULT, chunk, payload or result_of(chunk), round_no=round_no, decision_no=decision_no
    )


# ---- into the right replica -------------------------------------------------------------------------------------


def test_a_frame_goes_to_the_replica_of_its_chunk() -> None:
    ann = Receiver()
    ann.opens(0, round_no=1)
    ann.opens(1, round_no=2)
    ann.gets(contribution(2, round_no=2))
    first, second = ann.replica(0).rounds.flight, ann.replica(1).rounds.flight
    assert first is not None and second is not None
    assert (first.pieces.held, list(second.pieces.held[0])) == ({}, ["bob"])
    ann.gets(contribution(0, round_no=1))
    assert list(first.pieces.held[0]) == ["bob"] and ann.counts == {"accepted": 2}


def test_a_chunk_that_no_fragment_has_is_malformed() -> None:
    ann = Receiver()
    for kind in (Kind.CONTRIBUTION, Kind.STATE, Kind.WANT_STATE):
        assert ann.gets(frame_of(kind, CHUNKS)) == []
    assert ann.counts == {"malformed": 3} and ann.part.early_count == 0


def test_a_question_is_answered_by_the_replica_that_holds_the_chunk() -> None:
    ann = Receiver()
    assert ann.gets(frame_of(Kind.WANT_STATE, 3)) == [Serve("bob", Kind.STATE, 3, 0, 1)]
    ann.replica(1).go_back(7, None)
    [answer] = ann.gets(frame_of(Kind.WANT_STATE, 3))
    assert isinstance(answer, SendFrame) and answer.frame.header.kind == Kind.MISSING
    assert ann.gets(frame_of(Kind.WANT_STATE, 1)) == [Serve("bob", Kind.STATE, 1, 0, 0)], (
        "the other one has its own"
    )
    assert ann.counts == {"accepted": 3}


def test_who_is_missing_something_in_a_round_is_heard_all_the_same() -> None:
    ann = Receiver()
    ann.opens(0)
    flight = ann.replica(0).rounds.flight
    assert flight is not None
    assert flight.on_timer(5.0), "bob has been quiet for long: it is asked"
    ann.gets(frame_of(Kind.MISSING, 0, round_no=1), now=9.9)
    ann.gets(frame_of(Kind.MISSING, 2, round_no=1), now=9.9)
    assert flight.on_timer(10.0) == [] and ann.counts == {"accepted": 2}


@pytest.mark.parametrize("kind", [Kind.STATE, Kind.LOGGED, Kind.MANIFEST, Kind.LATER, Kind.PING, Kind.PONG])
def test_what_belongs_to_no_round_and_names_one_is_malformed_and_renews_nobodys_patience(kind: Kind) -> None:
    """A member that gives nothing must not be able to look as if it were about to."""
    ann = Receiver()
    ann.opens(0)
    flight = ann.replica(0).rounds.flight
    assert flight is not None
    payload = b"" if kind in (Kind.LATER, Kind.PONG) else b"something"
    ann.gets(frame_of(kind, 0, payload, round_no=1), now=9.9)
    assert flight.on_timer(10.0), "bob has been quiet for long: it is asked"
    assert ann.counts == {"malformed": 1}


def test_a_decision_goes_to_the_replica_whose_round_it_is() -> None:
    ann = Receiver()
    ann.opens(0, round_no=1)
    ann.opens(1, round_no=2)
    ann.decides(2)
    first, second = ann.replica(0).rounds.flight, ann.replica(1).rounds.flight
    assert first is not None and first.deciding.newest is None
    assert second is not None and second.deciding.newest is not None
    assert ann.decides(3) == [], "no replica is in that round"


def test_an_abort_ends_the_round_of_its_number_only() -> None:
    ann = Receiver()
    ann.opens(0, round_no=1)
    ann.opens(1, round_no=2)
    ann.part.on_aborted(1)
    assert ann.part.replica_of_round(1) is None and ann.part.replica_of_round(2) is ann.replica(1)
    assert ann.part.flights and ann.part.others_in_round == 1 and ann.part.owing_in_round == 1
    ann.part.on_aborted(2)
    assert not ann.part.flights and ann.part.others_in_round == 0 and ann.part.owing_in_round == 0


def test_a_spoiled_frame_speaks_against_its_sender_in_its_round_or_in_all_if_it_names_none() -> None:
    ann = Receiver()
    ann.opens(0, round_no=1)
    ann.opens(1, round_no=2)
    flights = [ann.replica(0).rounds.flight, ann.replica(1).rounds.flight]

    def refused() -> list[bool]:
        return ["bob" in flight.faults.refused for flight in flights if flight is not None]

    again = ann.part.on_spoiled("bob", Spoiled(Verdict.BAD_HASH, contribution(2, round_no=2).header))
    assert [each.frame.header.chunk for each in again if isinstance(each, SendFrame)] == [2]
    ann.part.on_spoiled("bob", Spoiled(Verdict.BAD_HASH, None))
    assert refused() == [False, True], "one damaged frame of a round is forgiven"
    ann.part.on_spoiled("bob", Spoiled(Verdict.BAD_HASH, None))
    assert refused() == [True, True]
    assert ann.counts == {}, "whoever found it spoiled has counted it"


def test_a_damaged_answer_is_held_against_the_donor_by_its_replica() -> None:
    ann = Receiver()
    replica = ann.replica(1)
    replica.go_back(0, None)
    replica.on_tick(word_of(1, 0, digests=((0, b"d" * 32),), donors=("bob", "cyd"), verified=False))
    asked = {each.frame.header.kind: each.to for each in replica.advance(0.0) if isinstance(each, SendFrame)}
    donor = asked[Kind.WANT_MANIFEST]
    ann.part.on_spoiled(donor, Spoiled(Verdict.BAD_HASH, frame_of(Kind.MANIFEST, 2, b"damaged").header))
    again = [each for each in replica.advance(0.0) if isinstance(each, SendFrame)]
    assert [(each.frame.header.kind, each.to != donor) for each in again] == [(Kind.WANT_MANIFEST, True)]


# ---- frames that overtook their explanation ------------------------------------------------------------------


def test_a_contribution_that_overtook_the_plan_waits_for_it() -> None:
    ann = Receiver()
    assert ann.gets(contribution(0)) == []
    assert (ann.waiting, ann.counts) == ([("bob", 1)], {})
    ann.opens(0)
    flight = ann.replica(0).rounds.flight
    assert flight is not None and list(flight.pieces.held[0]) == ["bob"]
    assert (ann.waiting, ann.counts) == ([], {"accepted": 1})


def test_a_result_that_overtook_the_decision_waits_for_it() -> None:
    ann = Receiver()
    ann.opens(0)
    ann.gets(result(1))
    assert ann.part.early_count == 1
    ann.decides()
    flight = ann.replica(0).rounds.flight
    assert flight is not None and list(flight.pieces.results) == [1] and ann.counts == {"accepted": 1}


def test_what_the_replayed_frames_lead_to_is_done() -> None:
    ann = Receiver()
    ann.freezes(0)
    ann.opens(0)
    flight = ann.replica(0).rounds.flight
    assert flight is not None
    flight.on_encoded({0: b"ann's", 1: b"ann's"})
    ann.decides()
    [merge] = ann.gets(contribution(0))
    assert isinstance(merge, Merge)
    late = Receiver()
    late.gets(contribution(0, round_no=2))
    late.opens(0, round_no=1)
    assert late.part.early_count == 1, "not the round that it waits for"
    late.opens(0, round_no=3)
    assert (late.part.early_count, late.counts) == (0, {"stale": 1}), "its round was never opened here"


def test_questions_do_not_wait() -> None:
    ann = Receiver()
    ann.gets(frame_of(Kind.WANT_CONTRIBUTION, 0, round_no=1))
    assert (ann.part.early_count, ann.counts) == (0, {"stale": 1})


def test_P8_with_too_many_early_frames_the_oldest_of_the_greediest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "EARLY_KEPT", 4)
    ann = Receiver()
    ann.gets(contribution(0, round_no=1), "bob")
    for round_no in range(1, 6):
        ann.gets(contribution(0, round_no=round_no), "mal")
    ann.gets(contribution(0, round_no=2), "bob")
    assert ann.waiting == [("bob", 1), ("mal", 4), ("mal", 5), ("bob", 2)]
    assert ann.counts == {"stale": 3}


def test_P8_greedy_is_who_has_most_bytes_and_not_most_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "EARLY_BYTES", 10 * FRAME_BYTES)
    ann = Receiver()
    ann.gets(contribution(0, round_no=9, payload=bytes(5 * FRAME_BYTES)), "mal")
    for round_no in range(1, 6):
        ann.gets(contribution(0, round_no=round_no, payload=bytes(100)), "bob")
    assert [sender for sender, _ in ann.waiting] == ["bob"] * 5, "less by number, more by bytes"
    assert ann.counts == {"stale": 1}


def test_P8_a_frame_counts_with_its_header_in_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or frames of a single byte would be kept without end."""
    monkeypatch.setattr(replicas, "EARLY_BYTES", 3 * (BULK_HEADER_BYTES + 1))
    ann = Receiver()
    for round_no in range(1, 5):
        ann.gets(contribution(0, round_no=round_no, payload=b"x"))
    assert ann.waiting == [("bob", 2), ("bob", 3), ("bob", 4)]


# ---- payloads of no use --------------------------------------------------------------------------------------


def test_P9_a_contribution_of_no_use_is_refused_and_its_sender_with_it() -> None:
    ann = Receiver()
    ann.opens(0)
    assert ann.gets(contribution(0, payload=UNUSABLE)) == []
    flight = ann.replica(0).rounds.flight
    assert (
        flight is not None
        and flight.pieces.held == {}
        and flight.faults.refused == {"bob": Verdict.MALFORMED}
    )
    assert ann.counts == {"malformed": 1} and ann.checked == [("bf16", 4)], "the codec that is due from bob"


def test_P9_a_result_of_no_use_is_refused_and_its_owner_with_it() -> None:
    ann = Receiver()
    ann.opens(0)
    ann.decides()
    ann.gets(result(1, payload=UNUSABLE))
    flight = ann.replica(0).rounds.flight
    assert (
        flight is not None
        and flight.pieces.results == {}
        and flight.faults.refused == {"bob": Verdict.MALFORMED}
    )
    assert ann.counts == {"malformed": 1} and ann.checked == [("int8", 4)], "the codec of all results"


def test_P9_a_kept_result_of_no_use_is_asked_of_another_donor() -> None:
    ann = Receiver()
    replica = ann.replica(0)
    replica.on_commit(commit_of(0), 0.0)
    replica.on_tick(word_of(0, 1, donors=("bob", "cyd"), verified=False))
    donors = {
        each.frame.header.chunk: each.to for each in replica.advance(0.0) if isinstance(each, SendFrame)
    }
    assert sorted(donors) == [0, 1]
    ann.gets(frame_of(Kind.LOGGED, 0, UNUSABLE, version=1), donors[0])
    [again] = [each for each in replica.advance(0.0) if isinstance(each, SendFrame)]
    assert again.frame.header.chunk == 0 and again.to != donors[0]
    assert ann.counts == {"malformed": 1}


def test_what_no_member_sent_or_no_round_wants_is_not_even_looked_at() -> None:
    ann = Receiver()
    ann.opens(0, round_no=2)
    ann.gets(contribution(0, round_no=1, payload=UNUSABLE))
    ann.gets(contribution(0, round_no=2, payload=UNUSABLE), "mal")
    assert ann.checked == [] and ann.counts == {"stale": 1, "unauthorised": 1}


# ---- P8: each frame ends in exactly one counter --------------------------------------------------------------


FRAMES = st.tuples(
    st.sampled_from([kind for kind in Kind if kind not in (Kind.PING, Kind.PONG)]),
    st.integers(0, CHUNKS),
    st.integers(0, 3),
    st.sampled_from([b"", UNUSABLE, result_of(0), result_of(1)]),
    st.sampled_from(["bob", "mal"]),
)


@settings(max_examples=100, deadline=None)
@given(frames=st.lists(FRAMES, max_size=40), opens_at=st.integers(0, 40), decides_at=st.integers(0, 40))
def test_P8_each_frame_ends_in_one_counter_or_still_waits(
    frames: list[tuple[Kind, int, int, bytes, str]], opens_at: int, decides_at: int
) -> None:
    ann = Receiver()
    for at, (kind, chunk, round_no, payload, sender) in enumerate(frames):
        if at == opens_at:
            ann.opens(0, round_no=2)
        if at == decides_at:
            ann.decides(2)
        ann.gets(frame_of(kind, chunk, payload, round_no=round_no, decision_no=1), sender)
        assert ann.part.counters.total + ann.part.early_count == at + 1


# ---- questions about all replicas -------------------------------------------------------------------------------


def test_a_peer_is_where_its_least_advanced_fragment_is() -> None:
    ann = Receiver()
    ann.applies(commit_of(1))
    ann.exchange.on_sealed(1, 1, b"d" * 32)
    assert ann.part.version == 0
    ann.opens(0, round_no=5)
    assert ann.part.oldest_round_no == 0
    ann.opens(1, round_no=4, version=1)
    assert ann.part.oldest_round_no == 4


def test_one_version_behind_is_no_news() -> None:
    ann = Receiver()
    words = {version: word_of(1, version) for version in (0, 1, 2)}
    assert [ann.part.is_behind((word_of(0, 0), word)) for word in words.values()] == [False, False, True]
    ann.replica(0).go_back(3, None)
    assert ann.part.is_behind((word_of(0, 3),)), "it holds nothing"


def test_bytes_are_expected_in_a_round_and_while_something_is_missing() -> None:
    ann = Receiver()
    assert not ann.part.expects_bytes
    ann.opens(1)
    assert ann.part.expects_bytes
    ann.part.on_aborted(1)
    assert not ann.part.expects_bytes
    ann.replica(0).on_tick(word_of(0, 1))
    assert ann.part.expects_bytes


def test_a_beat_tells_the_decision_that_stands_not_what_is_foreseen() -> None:
    """Or whoever missed the decision would not be told it again."""
    ann = Receiver()
    ann.opens(0)

    def told() -> tuple[int, Phase]:
        beat = _fragment_beat(ann.replica(0), ann.training.works[0], begins_more=True)
        return beat.decision_no, phase_of(ann.part, ann.training)

    assert told() == (0, Phase.SCATTER)
    ann.part.on_decision(Decision(1, 1, (0.5, 0.5), {}, foreseen=True), 0.0)
    assert told() == (0, Phase.SCATTER)
    ann.decides()
    assert told() == (1, Phase.GATHER)


# ---- what people hear of the state ----------------------------------------------------------------------------


def test_version_0_is_told_of_once_and_only_where_it_is_the_runs() -> None:
    """A joiner named the digest of its own first values, which are another run's."""
    ann = MadePart()
    for replica in ann.part.replicas.values():
        replica.held.fill()
    ann.exchange.on_provided()
    for fragment in ann.part.replicas:
        ann.exchange.on_sealed(fragment, 0, digest_of(fragment, 0))
    assert ann.part.first_here() == [], "nobody has said yet what the run's is"
    ann.replica(0).on_tick(word_of(0, 0, digests=((0, digest_of(0, 0)),)))
    ann.replica(1).on_tick(word_of(1, 0, digests=((0, bytes(32)),), verified=False))
    assert [replica.fragment.number for replica in ann.part.first_here()] == [0]
    assert ann.part.first_here() == []
