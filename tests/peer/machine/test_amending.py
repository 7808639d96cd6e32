"""What a peer makes of the host's amendments: believed once, followed from their version on, waited for."""

from __future__ import annotations

import torch

from farflung.collectives.round.effects import Roll
from farflung.compression.codec import codec_named
from farflung.coordinator.court.proofs import ChunkRules, step_rules
from farflung.optim.recipes import outer_of, outer_steps_of
from farflung.optim.schedule import rules_of
from farflung.peer.local.words import LoadState
from farflung.peer.local.words import RunAmendments as TermsWord
from farflung.peer.machine.effects import Follow, Note, TellTrainer
from farflung.peer.machine.handshake import AmendmentNews
from farflung.peer.state.outer_state import OuterState
from farflung.peer.trainer.machine import TrainerMachine
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Committed, OpenRound
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Commit, Plan
from farflung.protocol.run_terms import Known, Terms
from rig.amended import FIRST, OTHER, PERIOD_10, PINNED, RUN_ID, amendment, signed, terms_of

SLOW = {"outer": {"lr": 0.25, "momentum": 0.5}}
MODEL = ModelSchema((TensorSpec("w", (8,), "float32", "param"),), 8, 1, 1, bytes(32))


def knowing() -> AmendmentNews:
    return AmendmentNews(Known(FIRST, RUN_ID), PINNED)


def opened(amended: int) -> OpenRound:
    plan = Plan(1, 1, 4, ("ann",), (0,), ("fp32",))
    return OpenRound(session=bytes(16), seq=1, plan=plan, amended=amended)


def committed(amended: int) -> Committed:
    commit = Commit(5, 1, ("ann",), (1.0,), bytes(32), "fp32")
    return Committed(session=bytes(16), seq=1, commit=commit, nonce=b"", amended=amended)


def test_what_is_new_is_told_to_the_shell_and_the_trainer_once() -> None:
    it = knowing()
    first = amendment(it.terms, 4, **PERIOD_10)
    note, follow, tell = it.on_told([first])
    assert note == Note("from version 4 on, the host changed: [round] sync_every = 10")
    assert isinstance(follow, Follow) and follow.terms is it.terms and it.count == 1
    assert (
        tell == TellTrainer(TermsWord(first=FIRST.canonical(), amendments=(first,))) and [tell] == it.words()
    )
    assert it.on_told([first]) == [] == it.on_told([]) and it.count == 1


def test_what_is_not_the_hosts_is_told_of_and_not_followed() -> None:
    it = knowing()
    [note] = it.on_told([signed(amendment(it.terms, 4, **PERIOD_10), OTHER)])
    assert isinstance(note, Note) and "not signed by the host" in note.text
    assert it.count == 0 and it.words() == []


def test_nothing_is_done_in_a_round_whose_terms_are_not_known() -> None:
    it = knowing()
    assert it.why_not(opened(0)) is None is it.why_not(committed(0))
    assert it.why_not(opened(1)) == [] == it.why_not(committed(1))
    it.on_told([amendment(it.terms, 4, **PERIOD_10)])
    assert it.why_not(opened(1)) is None is it.why_not(committed(1))
    assert it.why_not(committed(2)) == []


def test_a_coordinator_on_an_old_copy_of_its_journal_is_not_followed() -> None:
    it = knowing()
    it.on_told([amendment(it.terms, 4, **PERIOD_10)])
    [note] = it.why_not(opened(0)) or []
    assert isinstance(note, Note) and "does not know amendment 1" in note.text
    assert it.why_not(committed(0)) == [], "it is said once"


# ---- the state -----------------------------------------------------------------------------------------------------


def test_P1_each_version_is_made_by_its_own_terms_as_the_court_makes_it() -> None:
    """Versions 1 to 4, amended from version 2 on; told late, in the midst, or before all: the same bits."""
    terms = terms_of((2, SLOW))
    results = {v: codec_named("int8").encode(torch.linspace(-1.0, v, 8)) for v in range(1, 5)}
    judge, old = ChunkRules.of(FIRST, MODEL, terms), torch.arange(8.0).numpy().tobytes() + bytes(32)
    for version, payload in results.items():
        old = judge.after(old, payload, 0, version)
    for told_before in (1, 2, 3):
        state = OuterState(torch.arange(8.0), MODEL, FIRST.round, outer_of(FIRST))
        for version, payload in results.items():
            if version == told_before:
                state.follow(outer_steps_of(terms), "int8")
            state.roll(Roll(0, version, payload))
        assert state.chunk_bytes(0) == old
    never = OuterState(torch.arange(8.0), MODEL, FIRST.round, outer_of(FIRST))
    for version, payload in results.items():
        never.roll(Roll(0, version, payload))
    assert never.chunk_bytes(0) != old


def test_a_proof_names_the_step_of_its_version() -> None:
    rules = ChunkRules.of(FIRST, MODEL, terms_of((2, SLOW)))
    assert (step_rules(rules, 0, 2).lr, step_rules(rules, 0, 3).lr) == (0.7, 0.25)


def test_a_coarser_codec_keeps_what_it_loses_from_then_on() -> None:
    state = OuterState(
        torch.zeros(8), MODEL, Manifest.from_toml('[round]\ncodec = "fp32"', "x").round, outer_of(FIRST)
    )
    assert state._feedbacks[0] is None
    state.follow(outer_steps_of(Terms(FIRST)), "int4")
    assert state._feedbacks[0] is not None


# ---- the trainer ---------------------------------------------------------------------------------------------------


def load(version: int, keep: str = "all") -> LoadState:
    return LoadState(version=version, keep=keep, slot=0, tokens=0, steps=0, spare=0, fragment=0)  # type: ignore[arg-type]


def test_the_period_and_the_runs_step_follow_the_version_that_is_loaded() -> None:
    machine, terms = TrainerMachine(rules_of(FIRST), 8), terms_of((2, PERIOD_10))
    machine.attach(MODEL, 1)
    machine.on_message(load(0, "drop"), 0.0)
    machine.on_message(TermsWord(first=FIRST.canonical(), amendments=terms.amendments), 0.0)
    seen = []
    for version in range(5):
        machine.on_message(load(version), 0.0)
        seen.append((machine.rules.period_steps, machine.run_step))
    assert seen == [(50, 0), (50, 50), (10, 100), (10, 110), (10, 120)]


def test_a_trainer_that_is_told_before_it_has_a_version_begins_with_the_runs_first_terms() -> None:
    machine, terms = TrainerMachine(rules_of(FIRST), 8), terms_of((2, PERIOD_10))
    machine.attach(MODEL, 1)
    machine.on_message(TermsWord(first=FIRST.canonical(), amendments=terms.amendments), 0.0)
    assert machine.rules.period_steps == 50
    machine.on_message(load(7, "drop"), 0.0)
    assert (machine.rules.period_steps, machine.run_step) == (10, 150)
