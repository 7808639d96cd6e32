"""What other peers can make a peer keep, send or compute is bounded, and each bound is gone over here (P8).

The bounds of a single frame are in test_frames.py, hostile members over real sockets in test_hostile_members.py.
"""

from __future__ import annotations

import json

import pytest

from farflung.checkpoints.fetcher import ASKED_OF_ONE_DONOR, SPOILED_FORGIVEN
from farflung.checkpoints.result_log import ResultLog
from farflung.checkpoints.state_sync import StateSync
from farflung.collectives.link import frame_queue
from farflung.collectives.link.frame_queue import ANSWERS_WAITING
from farflung.collectives.link.peer_connections import PeerConnections
from farflung.collectives.link.rates import ANSWERED_PER_S, ON_WAY_MOST, Pings
from farflung.collectives.round.effects import Install, SendFrame
from farflung.collectives.round.member import MemberRound
from farflung.compression.codec import check_payload
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Failed, OwnersMoved
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.run.status import status_json
from farflung.peer.agent.turns import HELD_MOST_S, Serving
from farflung.peer.machine import replicas
from farflung.peer.machine.replicas import EARLY_KEPT, Replicas
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import ProgressReport
from farflung.protocol.model_schema import Fragment, ModelSchema, TensorSpec
from farflung.protocol.round_words import Contact, Decision, Plan
from farflung.protocol.run_terms import Attached, Known
from farflung.simulator.world import Scenario, World

TAG = bytes(8)
ALL = ("ann", "bob", "cyd", "dan")


def line() -> PeerConnections:
    return PeerConnections(Contact("mal", "mal", bytes(32), ""))


# ---- what waits for one peer -----------------------------------------------------------------------------------


def test_P8_answers_wait_in_a_bounded_number_for_a_peer_that_takes_none() -> None:
    full = line()
    for version in range(3 * ANSWERS_WAITING):
        full.put(Frame(Header(Kind.MISSING, TAG, version=version)))
    assert full.waiting.answers == ANSWERS_WAITING
    full.put(with_payload(Header(Kind.CONTRIBUTION, TAG, round_no=1), b"x"))
    full.put(Frame(Header(Kind.WANT_STATE, TAG)))
    assert len(full.waiting) == ANSWERS_WAITING + 2, "the round, and what we ask ourselves, go on"


def test_P8_answers_wait_in_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_queue, "ANSWER_BYTES_WAITING", 10_000)
    full = line()
    for chunk in range(100):
        full.put(with_payload(Header(Kind.STATE, TAG, chunk=chunk), bytes(1000)))
    assert full.waiting.answer_bytes < 10_000 + 1200 and full.waiting.answers == 10


def test_P8_nobody_has_more_made_for_it_than_an_honest_peer_waits_for() -> None:
    serving = Serving(fragments=2)
    made = [chunk for chunk in range(100) if serving.start_answer("mal", (Kind.STATE, chunk), waiting=0)]
    assert len(made) == serving.most == 4 * ASKED_OF_ONE_DONOR
    assert serving.start_answer("ann", (Kind.STATE, 0), waiting=0), "others are served all the same"
    serving.end("mal", (Kind.STATE, 0))
    assert not serving.start_answer("mal", (Kind.STATE, 1), waiting=0), "that one is being made"
    assert not serving.start_answer("mal", (Kind.STATE, 0), waiting=1), (
        "what was made and not taken counts too"
    )
    assert serving.start_answer("mal", (Kind.STATE, 0), waiting=0)


# ---- frames that came too early ------------------------------------------------------------------------------


def member(chunks: int = 4) -> Replicas:
    model = ModelSchema((TensorSpec("w", (4 * chunks,), "float32", "param"),), 4, chunks, chunks, bytes(32))
    manifest = Manifest.from_toml('[run]\nname = "x"\n', "x")
    return Replicas("ann", Attached(Known(manifest, TAG), model), ResultLog(), check_payload)


def early(round_no: int, size: int = 32) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, TAG, round_no=round_no), bytes(size))


def test_P8_early_frames_are_bounded_and_a_flood_pushes_out_its_own_only() -> None:
    ann = member()
    for round_no in (1, 2):
        ann.on_frame("bob", early(round_no), 0.0)
    for round_no in range(3 * EARLY_KEPT):
        ann.on_frame("mal", early(1 + round_no), 0.0)
    assert len(ann._early) == EARLY_KEPT
    assert [frame.header.round_no for sender, frame in ann._early if sender == "bob"] == [1, 2]
    assert ann.counters.as_dict()["stale"] == 2 * EARLY_KEPT + 2


def test_P8_early_frames_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "EARLY_BYTES", 5_000)
    ann = member()
    ann.on_frame("bob", early(1, 1000), 0.0)
    for round_no in range(20):
        ann.on_frame("mal", early(1 + round_no, 1000), 0.0)
    assert [sender for sender, _ in ann._early].count("bob") == 1 and len(ann._early) == 4


# ---- questions in a round, and pings ---------------------------------------------------------------------------


def test_P8_one_question_of_a_round_is_answered_once_in_a_while() -> None:
    ann = MemberRound("ann", Plan(1, 1, 0, ALL, (1, 1, 1), ("fp32",) * 4), TAG, 1.0, now=0.0)
    ann.on_encoded(dict.fromkeys(range(3), b"chunk"))
    ann.on_decision(Decision(1, 1, (0.25,) * 4, {}), now=0.0)
    want = Frame(Header(Kind.WANT_CONTRIBUTION, TAG, round_no=1, chunk=2))
    verdicts = [ann.on_frame("bob", want, 0.001 * n) for n in range(1000)]
    sent = [effect for _, effects in verdicts for effect in effects]
    assert len(sent) == 2 and [v for v, _ in verdicts].count(Verdict.DUPLICATE) == 998
    assert ann.on_frame("cyd", want, 0.1)[0] == Verdict.ACCEPTED, "each asker has its own patience"


def test_P8_pings_of_one_peer_are_answered_so_many_times_a_second() -> None:
    pings = Pings(TAG, 1000)
    asked = [Header(Kind.PING, TAG, chunk=number) for number in range(10 * ANSWERED_PER_S)]
    answers = [pings.on_frame("mal", header, 0.5) for header in asked]
    assert len([a for a in answers if a is not None]) == ANSWERED_PER_S
    assert (
        pings.on_frame("bob", asked[0], 0.5) is not None and pings.on_frame("mal", asked[0], 1.5) is not None
    )


def test_pings_that_are_never_answered_are_forgotten() -> None:
    pings = Pings(TAG, 1000)
    for _ in range(10 * ON_WAY_MOST):
        pings.greet("mal", 0.0)
    assert len(pings._on_way) == ON_WAY_MOST


# ---- damaged frames without a word of what they were -------------------------------------------------------------


def test_P8_frames_that_cannot_be_read_at_all_count_against_their_sender() -> None:
    ann = MemberRound("ann", Plan(1, 1, 0, ALL, (0, 1, 2), ("fp32",) * 4), TAG, 1.0, now=0.0)
    spoiled = Spoiled(Verdict.UNAUTHORISED, None)
    assert ann.on_spoiled("bob", spoiled) == [] and ann.progress().refused == {}
    ann.on_spoiled("bob", spoiled)
    assert ann.progress().refused == {"bob": Verdict.UNAUTHORISED}
    assert ann.on_spoiled("eve", spoiled) == [], "no member of the round"


# ---- the coordinator believes no single member against all others ------------------------------------------------


def said(refused: dict[str, Verdict], cut_off: tuple[str, ...] = ()) -> ProgressReport:
    return ProgressReport(
lengths=b"", got_by={},
        session=b"", seq=1, round_no=1, decision_no=0, held={}, refused=refused, cut_off=cut_off, merged=b"",
        merged_hashes=b"", got=b"", got_hash=bytes(32), dots=None, inputs=b"", signature=b"",
    )  # fmt: skip


def flight() -> Round:
    rules = RoundRules(2, 10.0, 60.0, "fp32")
    return Round(Plan(1, 1, 0, ALL, (0, 1, 2, 3), ("fp32",) * 4), rules, 0.0)


def test_P9_a_member_that_refuses_most_others_bars_nobody() -> None:
    room = flight()
    room.on_progress("ann", said(dict.fromkeys(("bob", "cyd", "dan"), Verdict.BAD_HASH)))
    assert room.scatter.barred == {}
    refused = {"ann": Verdict.OVERSIZE, "bob": Verdict.OVERSIZE, "eve": Verdict.OVERSIZE}
    room.on_progress("bob", said(refused))
    assert room.scatter.barred == {}, "one of three that can tell"
    room.on_progress("cyd", said({"ann": Verdict.OVERSIZE}))
    assert {peer: why.text for peer, why in room.scatter.barred.items()} == {
        "ann": "what bob got from it was unusable: frames that are longer than any of this run"
    }


def test_P9_the_reason_of_a_move_names_what_the_owner_sent() -> None:
    room = flight()
    room.on_progress("ann", said({"dan": Verdict.BAD_HASH}, cut_off=("dan",)))
    step = room.next_step(1.0, set(ALL), set(ALL))
    assert (
        isinstance(step, OwnersMoved) and step.unfit == {"dan"} and "do not match their hash" in step.reason
    )


def test_P3_an_owner_that_gives_no_results_owns_nothing_in_the_next_round() -> None:
    room = flight()
    room.decision = Decision(1, 1, (0.25,) * 4, {})
    room.gather.merged = dict.fromkeys((0, 1, 2), bytes(32))
    failed = room.next_step(61.0, set(ALL), set(ALL))
    assert isinstance(failed, Failed) and failed.unfit == {"dan"}
    room.gather.merged.clear()
    failed = room.next_step(61.0, set(ALL), set(ALL))
    assert isinstance(failed, Failed) and failed.unfit == set(), "somebody must own the chunks"


def test_the_status_says_who_was_left_out_and_why() -> None:
    """A run in which one peer spoils all that it sends: the reason is there for `farflung status --json`."""
    calm = dict.fromkeys(
        ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s"), 0.0
    )
    scenario = Scenario(peers=4, chunks=4, rounds=3, hostile=1.0, hostile_until_s=120.0, **calm)  # type: ignore[arg-type]
    world = World(3, scenario)
    world.run()
    assert world.coordinator is not None
    status = json.loads(
        status_json(world.coordinator.core, world.coordinator.drivers, world.coordinator.counters, world.now)
    )
    by_id = {member["id"]: member for member in status["members"]}
    assert by_id[world.last.hostile]["left_out"]
    assert {each["left_out"] for peer, each in by_id.items() if peer != world.last.hostile} == {""}
    excluded = [out for done in status["rounds"] for out in done["excluded"]]
    assert excluded and {out["name"] for out in excluded} == {by_id[world.last.hostile]["name"]}
    assert any("unusable" in out["reason"] for out in excluded), (
        "some of what it spoiled did not match its hash"
    )


# ---- donors ----------------------------------------------------------------------------------------------------


CHUNKS, RETRY_S = 12, 1.0
STATE = [f"state {chunk}".encode() for chunk in range(CHUNKS)]
HASHES = b"".join(map(hash_bytes, STATE))


class Joiner:
    """`bad` answers each question by `answer`; `good` tells the truth."""

    def __init__(self) -> None:
        self.catch = StateSync(Fragment(number=0, first=0, count=CHUNKS), TAG, RETRY_S, 2)
        self.catch.on_run_state(1, {1: root_of([HASHES])}, ("bad", "good"), keep=3)
        self.asked_of_bad = 0
        self.installed: set[int] = set()

    def turn(self, now: float) -> list[Header]:
        """Asks, lets `good` answer, and returns what `bad` was asked."""
        asked = [effect for effect in self.catch.ask(now) if isinstance(effect, SendFrame)]
        for send in asked:
            if send.to == "good":
                self.take("good", truth(send.frame.header))
        of_bad = [send.frame.header for send in asked if send.to == "bad"]
        self.asked_of_bad += len(of_bad)
        return of_bad

    def take(self, sender: str, frame: Frame) -> None:
        self.catch.on_frame(sender, frame)
        self.installed |= {effect.chunk for effect in self.catch.chunks.roll() if isinstance(effect, Install)}


def truth(want: Header) -> Frame:
    if want.kind == Kind.WANT_MANIFEST:
        return with_payload(Header(Kind.MANIFEST, TAG, version=1), HASHES)
    return with_payload(Header(Kind.STATE, TAG, version=1, chunk=want.chunk), STATE[want.chunk])


def damaged(want: Header) -> Header:
    frame = truth(want)
    return frame.header


def test_P8_a_donor_whose_answers_come_damaged_is_asked_no_more() -> None:
    joiner, now = Joiner(), 0.0
    for _ in range(40):
        for want in joiner.turn(now):
            joiner.catch.fetcher.on_spoiled("bad", damaged(want))
        now += 0.1
    assert joiner.installed == set(range(CHUNKS)), "without waiting for patience to run out"
    assert SPOILED_FORGIVEN < joiner.asked_of_bad <= SPOILED_FORGIVEN + 2 * ASKED_OF_ONE_DONOR


def test_P4_a_donor_that_sends_other_state_is_asked_no_more() -> None:
    joiner, now = Joiner(), 0.0
    for _ in range(40):
        for want in joiner.turn(now):
            false = truth(want)
            joiner.take("bad", with_payload(false.header, bytes(len(false.payload))))
        now += 0.1
    assert joiner.installed == set(range(CHUNKS))
    assert joiner.asked_of_bad <= SPOILED_FORGIVEN + 2 * ASKED_OF_ONE_DONOR + 1


def test_P3_a_donor_that_keeps_talking_and_gives_nothing_holds_up_nobody() -> None:
    """Noise is no answer: the questions that it sits on are asked of somebody else."""
    joiner, now = Joiner(), 0.0
    noise = Frame(Header(Kind.MISSING, TAG, decision_no=int(Kind.WANT_LOGGED), version=99, chunk=0))
    for _ in range(400):  # patience with a donor grows, and is over nevertheless
        joiner.turn(now)
        joiner.take("bad", noise)
        now += 0.2
    assert joiner.installed == set(range(CHUNKS))
    assert joiner.asked_of_bad > 0


def test_when_every_donor_has_sent_wrong_bytes_they_are_asked_again_all_the_same() -> None:
    joiner, now = Joiner(), 0.0
    joiner.catch.on_run_state(1, {1: root_of([HASHES])}, ("bad",), keep=3)
    for turn in range(200):
        for want in joiner.turn(now):
            if turn < 60:
                joiner.catch.fetcher.on_spoiled("bad", damaged(want))
            else:
                joiner.take("bad", truth(want))
        now += 0.2
    assert joiner.installed == set(range(CHUNKS))


def test_P8_a_question_that_is_not_held_or_not_held_any_more_is_told_so_that_it_is_counted() -> None:
    serving = Serving(fragments=1)
    asked = Frame(Header(Kind.WANT_STATE, b"run-tag!", version=3, chunk=5))
    assert serving.hold("ann", asked, 0.0) and not serving.hold("ann", asked, 1.0), "it waits already"
    assert serving.held == 1 and serving.let_go(HELD_MOST_S - 1.0) == 0
    assert serving.let_go(HELD_MOST_S) == 1 and serving.held == 0


def test_P8_who_asks_without_end_has_only_so_many_questions_held() -> None:
    serving = Serving(fragments=1)
    asked = [Frame(Header(Kind.WANT_STATE, b"run-tag!", version=3, chunk=chunk)) for chunk in range(99)]
    assert sum(serving.hold("mal", each, 0.0) for each in asked) == serving.most
    assert serving.hold("ann", asked[0], 0.0), "others are held all the same"
