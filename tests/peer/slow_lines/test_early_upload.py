"""A replica whose line is slow: what it sends ahead, when it is ready, and what becomes of it (P6, P7)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.checkpoints.result_log import ResultLog
from farflung.collectives.round.effects import SendFrame
from farflung.peer.local.words import Frozen
from farflung.peer.machine.effects import Effect, Encode, Resolve
from farflung.peer.machine.fragment_rounds import Contributing, Idle, Merged, ReplicaModes
from farflung.peer.machine.replicas import Replica
from farflung.peer.slow_lines.early_upload import EarlyKind, EarlyUpload
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Frame, Header, Kind
from farflung.protocol.messages import FragmentTick
from farflung.protocol.mode_words import AheadBeat, AheadPlan, AheadTick
from farflung.protocol.model_schema import Fragment
from farflung.protocol.round_words import Commit, Plan

TAG = bytes(8)
AHEAD = AheadPlan(5, ("zoe",), ("int4",), ("ann", "bob"), (0, 1))
MEMBERS = ("ann", "bob", "zoe")
PLAN = Plan(1, 1, 0, MEMBERS, (0, 1), ("int8", "int8", "int4"), 0)
OLDER = Frozen(slot=0, tokens=100, steps=4, used=(), loss=None)
NEWER = Frozen(slot=1, tokens=200, steps=8, used=(), loss=None)
BYTES = {0: b"zero", 1: b"one!"}


def tick(version: int = 0, round_no: int = 0, plan: AheadPlan | None = AHEAD, **more: object) -> FragmentTick:
    plain = {"digests": (), "donors": (), "sent_seen": False, "progress_seen": 0, "verified": True}
    told = {"sections": (AheadTick(plan.number, plan),)} if plan is not None else {}
    return FragmentTick(fragment=0, version=version, round_no=round_no, **{**plain, **told, **more})  # type: ignore[arg-type]


FRAGMENT = Fragment(0, 0, 2)


def commit(version: int, *included: str, round_no: int = 1) -> Commit:
    weights = tuple(float(member in included) for member in MEMBERS)
    return Commit(version, round_no, MEMBERS, weights, bytes(64), "fp32", 0)


def sends(effects: list[Effect], kind: Kind) -> list[tuple[str, int]]:
    frames = [each for each in effects if isinstance(each, SendFrame)]
    return [(each.to, each.frame.header.chunk) for each in frames if each.frame.header.kind is kind]


class Zoe:
    def __init__(self) -> None:
        self.replica = Replica(
            "zoe",
            TAG,
            FRAGMENT,
            ResultLog(keep_versions=3),
            modes=ReplicaModes(EarlyUpload("zoe", TAG, FRAGMENT)),
        )
        self.replica.held.fill()
        self.replica.found()
        self.replica.on_sealed(0, b"digest 0")
        self.replica.on_tick(tick())
        self.replica.rounds.take_resolved()

    def freezes(self, frozen: Frozen = OLDER) -> list[Effect]:
        return self.replica.rounds.ahead.keep_going(frozen) if self.replica.rounds.is_idle else []

    def encodes(self) -> list[Effect]:
        self.replica.rounds.ahead.on_encoded(self.replica.rounds.ahead.encode_no, BYTES)
        return self.replica.advance(0.0)

    def delivers(self) -> None:
        for owner, chunk in (("ann", 0), ("bob", 1)):
            held = Header(EarlyKind.AHEAD_HELD, TAG, chunk=chunk, hash=hash_bytes(BYTES[chunk]))
            self.replica.rounds.ahead.on_frame(owner, Frame(held))

    def is_ready(self) -> bool:
        return self.replica.rounds.ahead.is_mine and self.replica.rounds.ahead.delivered


def ready_zoe() -> Zoe:
    zoe = Zoe()
    zoe.freezes()
    zoe.encodes()
    zoe.delivers()
    assert zoe.is_ready()
    return zoe


def test_what_is_frozen_leaves_at_once_and_she_is_ready_when_it_is_there() -> None:
    zoe = Zoe()
    [encode] = zoe.freezes()
    assert isinstance(encode, Encode) and (encode.slot, encode.codec) == (0, "int4") and encode.round_no < 0
    assert zoe.replica.rounds.sent_slot == 0  # the trainer freezes into another one
    assert sends(zoe.encodes(), EarlyKind.AHEAD) == [("ann", 0), ("bob", 1)] and not zoe.is_ready()
    zoe.delivers()
    assert zoe.is_ready()


def test_nobody_else_sends_anything_ahead() -> None:
    zoe = Zoe()
    zoe.replica.on_tick(tick(plan=replace(AHEAD, senders=("yan",))))
    assert zoe.freezes() == [] and not zoe.replica.rounds.ahead.is_mine


def test_in_her_round_it_is_named_and_not_sent_again() -> None:
    zoe = ready_zoe()
    effects = zoe.replica.on_plan(PLAN, OLDER, 0.0)
    assert sends(effects, EarlyKind.AHEAD_COUNTS) == [("ann", 0), ("bob", 1)]
    assert not sends(effects, Kind.CONTRIBUTION)
    assert not any(isinstance(each, Encode) for each in effects)
    assert zoe.replica.rounds.flight is not None and zoe.replica.rounds.flight.pieces.encoded


def test_the_run_goes_on_and_newer_work_is_frozen_but_what_left_is_what_counts() -> None:
    zoe = ready_zoe()
    assert zoe.freezes(NEWER) == []
    effects = zoe.replica.on_plan(PLAN, NEWER, 0.0)
    assert sends(effects, EarlyKind.AHEAD_COUNTS)
    assert zoe.replica.rounds.contribution is not None and zoe.replica.rounds.contribution.frozen is OLDER


def test_a_commit_that_used_it_takes_exactly_that() -> None:
    zoe = ready_zoe()
    zoe.replica.on_plan(PLAN, NEWER, 0.0)
    zoe.replica.on_commit(commit(1, *MEMBERS), 0.0)
    role = zoe.replica.rounds.role
    assert isinstance(role, Merged) and role.contribution.frozen is OLDER
    assert zoe.replica.rounds.take_resolved() == [Resolve(0, used=True)]
    assert zoe.replica.rounds.ahead.frozen is None


@pytest.mark.parametrize("how", ["committed without her", "aborted"])
def test_a_round_that_did_not_use_it_costs_nothing_of_it(how: str) -> None:
    zoe = ready_zoe()
    zoe.replica.on_plan(PLAN, OLDER, 0.0)
    assert isinstance(zoe.replica.rounds.role, Contributing)
    if how == "aborted":
        zoe.replica.rounds.on_aborted(1)
    else:
        zoe.replica.on_commit(commit(1, "ann", "bob"), 0.0)
    assert isinstance(zoe.replica.rounds.role, Idle) and zoe.replica.rounds.take_resolved() == []
    assert zoe.is_ready() and zoe.replica.rounds.sent_slot == 0
    again = replace(PLAN, round_no=2)
    assert sends(zoe.replica.on_plan(again, OLDER, 0.0), EarlyKind.AHEAD_COUNTS) or how != "aborted"


def test_work_that_the_trainer_drops_leaves_no_more_and_comes_into_no_round() -> None:
    zoe = ready_zoe()
    zoe.replica.rounds.disown()
    assert zoe.replica.rounds.take_resolved() == [Resolve(0, used=False)] and not zoe.is_ready()
    zoe = ready_zoe()
    zoe.replica.on_plan(PLAN, OLDER, 0.0)
    zoe.replica.rounds.disown()
    zoe.replica.rounds.on_aborted(1)
    assert zoe.replica.rounds.take_resolved() == [Resolve(0, used=False)] and not zoe.is_ready()


def test_nothing_frozen_is_left_behind_it_and_so_it_is_dropped() -> None:
    zoe = ready_zoe()
    assert zoe.freezes(None) == [Resolve(0, used=False)]
    assert zoe.replica.rounds.sent_slot is None


def test_another_codec_begins_anew_and_so_does_a_line_that_is_not_slow_any_more() -> None:
    zoe = ready_zoe()
    zoe.replica.on_tick(tick(plan=replace(AHEAD, number=6, codecs=("int2",))))
    assert zoe.freezes(NEWER) == [Resolve(0, used=False)]
    [encode] = zoe.freezes(NEWER)
    assert isinstance(encode, Encode) and (encode.slot, encode.codec) == (1, "int2")
    zoe.replica.on_tick(tick(plan=None))
    assert not zoe.replica.rounds.ahead.is_mine and zoe.freezes(NEWER) == [Resolve(1, used=False)]


def test_a_plan_in_another_codec_is_served_as_by_anybody() -> None:
    zoe = ready_zoe()
    effects = zoe.replica.on_plan(replace(PLAN, codecs=("int8",) * 3), OLDER, 0.0)
    assert effects[0] == Resolve(0, used=False)
    assert isinstance(effects[1], Encode) and effects[1].round_no == 1


def test_a_plan_that_is_only_named_is_the_one_that_is_known() -> None:
    zoe = ready_zoe()
    zoe.replica.on_tick(tick(plan=None, sections=(AheadTick(77),)))
    assert zoe.is_ready() and zoe.replica.rounds.ahead.sections == (AheadBeat(5),)


def test_going_back_drops_it() -> None:
    zoe = ready_zoe()
    zoe.replica.go_back(0, b"digest 0")
    assert zoe.replica.rounds.take_resolved() == [Resolve(0, used=False)] and not zoe.is_ready()


def test_what_an_owner_asks_for_in_a_round_is_given_to_it_again_after_it() -> None:
    zoe = ready_zoe()
    zoe.replica.on_plan(PLAN, OLDER, 0.0)
    want = Header(Kind.WANT_CONTRIBUTION, TAG, round_no=1, chunk=1)
    _, effects = zoe.replica.on_round_frame("bob", Frame(want), 0.0)
    assert sends(effects, Kind.CONTRIBUTION) == [("bob", 1)]
    zoe.replica.rounds.on_aborted(1)
    assert not zoe.is_ready()
    assert sends(zoe.replica.advance(0.0), EarlyKind.AHEAD) == [("bob", 1)]
