"""A round commits before the last results are everywhere: what is on its way is not fetched from somebody else."""

from __future__ import annotations

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import SendFrame
from farflung.collectives.round.member import ARRIVING_PATIENCE
from farflung.peer.machine.fragment_rounds import QUIET_S
from farflung.peer.machine.replicas import Replica
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, with_payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit, Decision, Plan

TAG, FIRST = bytes(8), 10
MEMBERS = ("ann", "bob", "cyd")
RESULTS = [b"0000", b"1111", b"2222"]  # by index within the fragment; bob owns the first two, cyd the last
PLAN = Plan(1, 1, 0, MEMBERS, (1, 1, 2), "fp32", 0)
COMMIT = Commit(1, 1, MEMBERS, (1.0,) * 3, b"".join(map(hash_bytes, RESULTS)), "fp32", 0)


def ann() -> Replica:
    replica = Replica("ann", TAG, Fragment(0, FIRST, len(RESULTS)), ResultLog(keep_versions=3))
    replica.held.fill()
    replica.found()
    replica.held.catch.on_run_state(0, {}, ("dan",), 3)
    replica.on_sealed(0, b"d" * 32)
    return replica


def result(index: int) -> Frame:
    header = Header(Kind.RESULT, TAG, round_no=1, decision_no=1, version=0, chunk=FIRST + index)
    return with_payload(header, RESULTS[index])


def asked(replica: Replica, now: float) -> list[tuple[str, int]]:
    sent = [effect for effect in replica.advance(now) if isinstance(effect, SendFrame)]
    return [
        (send.to, send.frame.header.chunk - FIRST)
        for send in sent
        if send.frame.header.kind == Kind.WANT_LOGGED
    ]


def in_round() -> Replica:
    replica = ann()
    replica.on_plan(PLAN, None, 0.0)
    assert replica.rounds.flight is not None
    replica.rounds.flight.on_decision(Decision(1, 1, (1.0,) * 3, {}), 0.0)
    assert replica.on_round_frame("bob", result(0), 0.5)[0] == Verdict.ACCEPTED
    replica.on_commit(COMMIT, 1.0)
    replica.held.catch.on_run_state(1, {}, ("dan",), 3)
    return replica


def test_who_was_not_in_the_round_asks_at_once() -> None:
    replica = ann()
    replica.on_commit(COMMIT, 1.0)
    replica.held.catch.on_run_state(1, {}, ("dan",), 3)
    assert sorted(asked(replica, 1.0)) == [("dan", 0), ("dan", 1)], "two at a time, until the donor is known"


def test_a_result_that_comes_after_the_commit_is_taken_and_nobody_is_asked_for_it() -> None:
    replica = in_round()
    assert asked(replica, 1.0) == [] == asked(replica, 1.0 + QUIET_S / 2)
    for index, owner in ((1, "bob"), (2, "cyd")):
        assert replica.on_round_frame(owner, result(index), 1.6)[0] == Verdict.ACCEPTED
    assert asked(replica, 1.6) == []
    assert replica.held.chunks.versions == [1, 1, 1]


def test_what_a_silent_owner_does_not_bring_is_asked_for_and_a_speaking_one_is_waited_for() -> None:
    replica = in_round()
    replica.rounds.on_lines(set(), {"bob"}, 1.0 + QUIET_S / 2)  # bytes of a frame that is not whole
    assert asked(replica, 1.0 + QUIET_S) == [("dan", 2)]
    assert asked(replica, 1.0 + 1.5 * QUIET_S) == [("dan", 1)]


def test_P3_it_is_not_waited_for_without_end() -> None:
    replica = in_round()
    for tick in range(100):
        now = 1.0 + tick * QUIET_S / 4
        replica.rounds.on_lines(set(), {"bob", "cyd"}, now)
        if asked(replica, now):
            assert now == 1.0 + ARRIVING_PATIENCE * QUIET_S
            return
    raise AssertionError("never asked")


def test_of_the_next_commit_nothing_is_on_its_way() -> None:
    replica = in_round()
    commit = Commit(2, 2, MEMBERS, (1.0,) * 3, COMMIT.hashes, "fp32", 0)
    replica.on_commit(commit, 1.1)
    replica.held.catch.on_run_state(2, {}, ("dan",), 3)
    assert len(asked(replica, 1.1)) == 2
