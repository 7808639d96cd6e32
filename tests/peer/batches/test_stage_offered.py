"""A peer that could hold some stages of a model: what it offers, what it holds from its welcome on, who may come."""

from __future__ import annotations

import pytest

from farflung.compression.codec import check_payload, payload_bytes
from farflung.peer.identity import Identity
from farflung.peer.local.words import Anew, Begin, Provided, Stop
from farflung.peer.machine import modes
from farflung.peer.machine.effects import (
    Effect,
    EnterMembers,
    Exit,
    Hold,
    LeaveMembers,
    Note,
    TellTrainer,
    ToCoordinator,
    ToDoor,
    Vacate,
)
from farflung.peer.machine.handshake import PeerConfig, me_of
from farflung.peer.machine.machine import PeerMachine
from farflung.protocol.errors import LeaveCause
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Beat, Challenge, FragmentTick, Gone, Hello, Leave, Tick, Welcome
from farflung.protocol.mode_words import ServeTick
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec
from farflung.protocol.process.exit_codes import MISMATCH, for_refusal
from farflung.protocol.states import Goal

RUN_ID, SESSION = bytes(range(16)), bytes(16)
GIVES = (BorderTensor("float32", (3,)),)


def manifest_of(stages: int) -> Manifest:
    more = f'[outer]\nstep = "adamw"\n[pipeline]\nstages = {stages}\nbatch = 8\n' if stages > 1 else ""
    return Manifest.from_toml(f'[run]\nname = "demo"\n[merge]\npolicy = "mean"\n{more}', "run.toml")


def model_of(stages: int, width: int = 4) -> ModelSchema:
    tensors = tuple(TensorSpec(f"w{stage}", (2, width), "float32", "param") for stage in range(stages))
    specs = tuple(StageSpec(at, at, 2, 0, GIVES if at < stages - 1 else ()) for at in range(stages))
    return ModelSchema(tensors, 4, 2 * stages, 2 * stages, bytes(32), specs if stages > 1 else ())


def machine() -> PeerMachine:
    me = me_of(Identity.generate(), bytes(32), bytes(16))
    return PeerMachine(PeerConfig(me, "demo", check_payload, payload_bytes), lambda: 0.5)


def challenge(stages: int = 3) -> Challenge:
    return Challenge(
        nonce=bytes(32), run_id=RUN_ID, manifest=manifest_of(stages).canonical(), protocol=PROTOCOL_VERSION
    )


def welcome(*fragments: int) -> Welcome:
    return Welcome(
        session=SESSION, incarnation=1, member_port=4000, fragments=fragments, roster=(), whereabouts=b""
    )


def known(stages: int = 3) -> PeerMachine:
    peer = machine()
    peer.on_timer(0.0)
    begun = peer.on_door(challenge(stages), 0.0)
    assert any(isinstance(e, TellTrainer) and isinstance(e.message, Begin) for e in begun)
    return peer


def hello_in(effects: list[Effect]) -> Hello:
    [hello] = [e.message for e in effects if isinstance(e, ToDoor) and isinstance(e.message, Hello)]
    return hello


def holds(effects: list[Effect]) -> bool:
    return any(isinstance(each, Hold) for each in effects)


def stops_in(effects: list[Effect]) -> list[str]:
    return [e.message.reason for e in effects if isinstance(e, TellTrainer) and isinstance(e.message, Stop)]


def inside(stage: int = 1) -> PeerMachine:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (0, 1, 2))
    peer.on_door(welcome(stage), 0.0)
    return peer


def test_it_offers_the_stages_that_fit_in_the_order_that_it_is_told_and_holds_none_yet() -> None:
    peer = known()
    said = hello_in(peer.on_attach(model_of(3), "ann:1", 0.0, (2, 0)))
    assert (said.fragments, said.version, said.digest, said.address) == ((2, 0), -1, b"", "ann:1")
    assert said.model == model_of(3), "the schema is that of the whole model"
    assert peer.member.joined is None and peer.member.part is None


def test_the_welcome_names_its_stage_and_then_it_has_a_replica_for_that_one_alone() -> None:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (2, 0))
    effects = peer.on_door(welcome(2), 0.0)
    [hold] = [e for e in effects if isinstance(e, Hold)]
    assert [(f.number, f.first, f.count) for f in hold.attached.held] == [(2, 4, 2)]
    kinds = [type(e) for e in effects]
    assert kinds.index(Hold) < kinds.index(EnterMembers), "the trainer knows first where its memory is"
    [told] = [e.text for e in effects if isinstance(e, Note)]
    assert told == "I hold stage 2 of 3: 0.0 of 0.0 MB of state"
    assert (
        peer.member.part is not None
        and list(peer.member.part.replicas) == [2]
        and list(peer.member.training.works) == [2]
    )
    assert peer.member.training.attached
    [beat] = [e.message for e in effects if isinstance(e, ToCoordinator) and isinstance(e.message, Beat)]
    assert [each.fragment for each in beat.fragments] == [2]


@pytest.mark.parametrize("fragments", [(1,), (0, 2), (0, 1, 2)])
def test_a_welcome_to_what_it_did_not_offer_is_none(fragments: tuple[int, ...]) -> None:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (2, 0))
    assert (
        peer.on_door(welcome(*fragments), 0.0) == []
        and not peer.doorway.inside
        and peer.member.joined is None
    )
    assert holds(peer.on_door(welcome(0), 0.0)), "a right one still comes in time"


def test_it_comes_back_with_the_stage_that_it_holds_and_gets_no_other() -> None:
    peer = inside(1)
    gone = Gone(session=SESSION, seq=1, reason="away", final=False)
    peer.on_control(gone, 1.0)
    peer.on_timer(9.0)
    assert hello_in(peer.on_door(challenge(), 9.0)).fragments == (1,)
    assert peer.on_door(welcome(2), 9.0) == [] and not peer.doorway.inside
    again = peer.on_door(welcome(1), 9.0)
    assert peer.doorway.inside and not holds(again), "the memory is there"


def test_a_trainer_that_comes_back_has_room_for_the_stage_or_is_told_so() -> None:
    peer = inside(1)
    peer.on_trainer_gone(1.0)
    refused = stops_in(peer.on_attach(model_of(3), "", 1.0, (0, 2)))
    assert refused == ["the trainer that came back has room for stages [0, 2], and this peer holds [1]"]
    assert stops_in(peer.on_attach(model_of(3, width=5), "", 1.0, (1,))) == [
        "the trainer came back with another model"
    ]
    assert not peer.member.training.attached
    effects = peer.on_attach(model_of(3), "", 2.0, (1, 2))
    assert (
        isinstance(effects[0], Hold) and effects[0].attached.stages == (1,) and peer.member.training.attached
    )


def test_a_trainer_that_dies_before_the_welcome_is_not_taken_for_one_that_is_there() -> None:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (0,))
    peer.on_trainer_gone(0.0)
    assert holds(peer.on_door(welcome(0), 0.0)) and not peer.member.training.attached


def test_the_next_trainer_may_offer_otherwise_as_long_as_there_was_no_welcome() -> None:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (0,))
    peer.on_attach(model_of(3), "ann:1", 0.0, (1,))
    assert peer.on_door(welcome(0), 0.0) == []
    assert holds(peer.on_door(welcome(1), 0.0))


# ---- a stage is given up for another one -----------------------------------------------------------------------------


def tick(stage: int, serve: int, seq: int = 1) -> Tick:
    at = FragmentTick(stage, 0, (), False, (), 0, False, 0)
    return Tick(
        session=SESSION, seq=seq, answers=1, heard_s=0.0, fragments=(at,), goal=Goal.WAIT, reason="", roster_no=0,
        roster=None, leases=None, void=(), era=0, advice="", era_because="",
        sections=(ServeTick(serve),) if serve >= 0 else (),
    )  # fmt: skip


def test_who_is_told_to_serve_another_stage_leaves_its_own_and_comes_in_as_a_newcomer() -> None:
    peer = inside(1)
    effects = peer.on_control(tick(1, serve=2), 1.0)
    kinds = [type(each) for each in effects]
    [bye] = [e.message for e in effects if isinstance(e, ToCoordinator) and isinstance(e.message, Leave)]
    assert bye.cause is LeaveCause.MOVES and bye.cause.told == "it moves to another stage"
    assert kinds.index(ToCoordinator) < kinds.index(LeaveMembers) < kinds.index(Vacate)
    assert peer.member.joined is None and not peer.doorway.inside and not peer.member.leaving.exited
    assert peer.on_control(tick(1, serve=2, seq=2), 1.0) == [], "it is out"
    late = Provided()
    assert peer.on_local(late, 1.0) == [], "of the stage that it held"
    assert peer.on_attach(model_of(3), "ann:1", 1.0, (0, 1, 2)) == [], "it hears in a moment to begin anew"
    [anew] = peer.on_vacated(2.0)
    assert isinstance(anew, TellTrainer) and isinstance(anew.message, Anew)
    peer.on_timer(2.0)
    peer.on_door(challenge(), 2.0)
    said = hello_in(peer.on_attach(model_of(3), "ann:1", 2.0, (0, 1, 2)))
    assert (said.fragments, said.version, said.digest) == ((0, 1, 2), -1, b"")
    assert said.address == "ann:1" and said.fits == (0, 1, 2)
    assert (
        holds(peer.on_door(welcome(2), 2.0))
        and peer.member.part is not None
        and list(peer.member.part.replicas) == [2]
    )


@pytest.mark.parametrize("serve", [-1, 1, 0])
def test_nobody_gives_up_its_stage_for_itself_or_for_one_that_does_not_fit(serve: int) -> None:
    peer = known()
    peer.on_attach(model_of(3), "ann:1", 0.0, (1, 2))
    peer.on_door(welcome(1), 0.0)
    peer.on_control(tick(1, serve=serve), 1.0)
    assert peer.member.joined is not None and peer.doorway.inside


def test_who_is_about_to_leave_the_run_moves_nowhere() -> None:
    peer = inside(1)
    peer.member.leaving.ask("the user asked", "left", 0.0)
    effects = peer.on_control(tick(1, serve=2), 1.0)
    assert peer.member.joined is not None and not any(isinstance(each, Vacate) for each in effects)


def test_who_is_asked_to_leave_while_it_moves_is_gone() -> None:
    peer = inside(1)
    peer.on_control(tick(1, serve=2), 1.0)
    assert (
        any(isinstance(each, Exit) for each in peer.member.take_leave("the user asked", 1.5))
        and peer.member.leaving.exited
    )


@pytest.mark.parametrize(
    ("stages", "offers", "why"),
    [
        (3, (), "the run has stages 0 to 2, and the trainer could hold []"),
        (3, (1, 3), "the run has stages 0 to 2, and the trainer could hold [1, 3]"),
        (1, (0,), "the run's model is in one piece, and the trainer offers stages"),
    ],
)
def test_what_the_run_has_no_use_for_is_refused_with_words(
    stages: int, offers: tuple[int, ...], why: str
) -> None:
    peer = known(stages)
    assert stops_in(peer.on_attach(model_of(stages), "ann:1", 0.0, offers)) == [why]
    assert peer.member.joined is None and peer.offer is None


def test_a_run_in_one_piece_is_joined_at_once_and_its_welcome_names_all_of_it() -> None:
    peer = known(1)
    said = hello_in(peer.on_attach(model_of(1), "ann:1", 0.0))
    assert (
        said.fragments == (0,)
        and peer.member.joined is not None
        and "batches" not in peer.member.joined.modes
    )
    effects = peer.on_door(welcome(0), 0.0)
    assert peer.doorway.inside and not holds(effects)


def test_a_peer_that_was_installed_without_batches_leaves_a_run_that_needs_them_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modes, "found", lambda mode: None)
    peer = machine()
    peer.on_timer(0.0)
    [end] = [each for each in peer.on_door(challenge(), 0.0) if isinstance(each, Exit)]
    assert "installed without them" in end.reason and for_refusal(end.code) == MISMATCH
    assert known(1).known is not None
