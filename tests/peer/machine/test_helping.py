"""A peer's machine without a trainer: it knocks until the run has a model, takes that, and never counts as ready."""

from __future__ import annotations

from typing import Any

import pytest

from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import check_payload, payload_bytes
from farflung.peer.machine.effects import Assist, Effect, EnterMembers, Exit, LeaveMembers, Note, ToDoor
from farflung.peer.machine.handshake import EARLY_S, Me, PeerConfig
from farflung.peer.machine.machine import PeerMachine
from farflung.protocol.frames import Kind
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest, MergeSection, OuterSection, PipelineSection, RunSection
from farflung.protocol.messages import Beat, Challenge, FragmentTick, Gone, Hello, Knock, Tick, Welcome
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.states import Goal

RUN_ID = bytes(range(16))
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))
MERGE, OUTER = MergeSection(policy="mean"), OuterSection(step="adamw")
ME = Me("hal", "hal", b"i" * 32, b"k" * 32, b"p" * 16, "test", lambda message: b"s" * 64)


def challenge(model: ModelSchema | None, **more: Any) -> Challenge:
    manifest = Manifest(run=RunSection(name="demo"), **more).canonical()
    return Challenge(
        nonce=bytes(32), run_id=RUN_ID, manifest=manifest, protocol=PROTOCOL_VERSION, model=model
    )


def knocking() -> PeerMachine:
    machine = PeerMachine(PeerConfig(ME, "demo", check_payload, payload_bytes, helps=True), lambda: 0.5)
    [knock] = machine.on_timer(0.0)
    assert isinstance(knock, ToDoor) and isinstance(knock.message, Knock) and knock.message.helps
    return machine


def let_in(machine: PeerMachine, session: bytes, now: float) -> list[Effect]:
    machine.on_door(challenge(MODEL), now)
    if machine.offer is None:
        machine.on_attach(MODEL, "host:1", now)
    return machine.on_door(welcome_to(session), now)


def welcome_to(session: bytes) -> Welcome:
    return Welcome(
        session=session, incarnation=1, member_port=4000, fragments=(0,), roster=(), whereabouts=b""
    )


def test_it_waits_for_a_model_and_takes_it_from_the_door() -> None:
    machine = knocking()
    assert any(isinstance(each, Note) for each in machine.on_door(challenge(None), 1.0))
    assert not machine.on_timer(1.0 + EARLY_S / 2)
    [again] = machine.on_timer(1.0 + EARLY_S)
    assert isinstance(again, ToDoor) and isinstance(again.message, Knock)
    assert not any(isinstance(each, Note) for each in machine.on_door(challenge(None), 4.0)), (
        "it is told once"
    )
    machine.on_timer(4.0 + EARLY_S)
    effects = machine.on_door(challenge(MODEL), 8.0)
    assert Assist(MODEL) in effects
    greeted = machine.on_attach(MODEL, "host:1", 8.0)
    [hello] = [each.message for each in greeted if isinstance(each, ToDoor)]
    assert isinstance(hello, Hello) and hello.helps and hello.model == MODEL


def test_let_in_it_says_that_it_is_ready_for_nothing_and_wants_no_samples() -> None:
    machine = knocking()
    said = [getattr(each, "message", None) for each in let_in(machine, bytes(16), 1.0)]
    [beat] = [each for each in said if isinstance(each, Beat)]
    assert not beat.fragments[0].ready and not beat.want and not beat.samples
    assert not machine.member.training.attached


def sessions(effects: list[Effect]) -> list[bytes]:
    """Of the beats among them, after the connection was made anew."""
    beats = [each.message for each in effects if isinstance(getattr(each, "message", None), Beat)]
    return [beat.session for beat in beats]  # type: ignore[attr-defined]


@pytest.mark.parametrize("answers", [b"aab", b"ab"], ids=["once more", "at once"])
def test_of_two_hellos_that_were_slow_to_be_answered_the_later_ones_session_counts(answers: bytes) -> None:
    """The first session had begun when the second hello was heard, which replaced it; nobody was out of contact."""
    machine = knocking()
    machine.on_door(challenge(MODEL), 1.0)
    assert machine.on_attach(MODEL, "host:1", 1.0)
    for now in (10.0, 30.0)[: len(answers) - 1]:
        [again] = machine.on_timer(now)
        assert isinstance(again, ToDoor) and isinstance(again.message, Knock), "the answer is slow"
        machine.on_door(challenge(MODEL), now)
    here = b""
    for answer in (*answers, *b"c"):
        session = bytes([answer]) * 16
        effects = machine.on_door(welcome_to(session), 40.0)
        if answer == ord("c") or session == here:
            assert effects == [], "every hello is answered, or the session has begun"
            continue
        assert sessions(effects) == [session]
        ways = [type(each) for each in effects if isinstance(each, LeaveMembers | EnterMembers)]
        assert ways == ([LeaveMembers, EnterMembers] if here else [EnterMembers])
        assert not any(isinstance(each, Note) for each in effects)
        here = session


def test_P6_let_in_again_it_asks_anew_for_what_was_under_way() -> None:
    """Its donors had closed their lines to it, as to whoever is no member any more."""
    machine = knocking()
    word = FragmentTick(0, 3, ((3, bytes(range(32))),), False, ("ann", "bob"), 0, False, 0)

    def asked(session: bytes, now: float) -> list[tuple[Kind, int]]:
        let_in(machine, session, now)
        effects = machine.on_control(
            Tick(
                session=session, seq=1, answers=0, heard_s=now, fragments=(word,), goal=Goal.WAIT, reason="",
                roster_no=0, era=0,
            ),
            now,
        )  # fmt: skip
        frames = [each.frame.header for each in effects if isinstance(each, SendFrame)]
        return [(header.kind, header.chunk) for header in frames]

    first = asked(bytes(16), 1.0)
    assert {kind for kind, _ in first} == {Kind.WANT_MANIFEST, Kind.WANT_STATE}
    machine.on_control(Gone(session=bytes(16), seq=2, reason="silent", final=False), 1.5)
    machine.on_timer(3.0)
    assert asked(bytes(range(16)), 3.1) == first


def test_a_model_in_stages_is_not_helped_without_a_trainer() -> None:
    machine = knocking()
    staged = PipelineSection(stages=2, batch=8, micro=1)
    [*_, end] = machine.on_door(challenge(None, pipeline=staged, merge=MERGE, outer=OUTER), 1.0)
    assert isinstance(end, Exit) and end.code == "no-helpers" and machine.member.leaving.exited
