"""Steps of a stage's own within a batch: when one is taken, of how much, and what is written when the batch ends."""

from __future__ import annotations

import pytest

from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import (
    FreezeSums,
    Frozen,
    Loaded,
    LoadState,
    MicrobatchWork,
    NeedSamples,
    Shared,
    Way,
    WorkDone,
)
from farflung.peer.pipeline.machines.stage_machine import LocalSteps, StageMachine, local_steps_of
from farflung.peer.pipeline.machines.summing_machine import (
    DropSums,
    LocalStep,
    StageWork,
    SumsEffect,
    WriteLearned,
)
from farflung.peer.trainer import effects as do
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.manifest import Manifest, MergeSection, PipelineSection
from farflung.protocol.model_schema import ModelSchema

PERIOD = 5  # steps that a version counts for
MODEL = ModelSchema((), 4, 1, 1, bytes(32))
SHARED = Shared(
    anchor="a", moments=("m",), slots=("0", "1", "2"), progress="p", elements=8, stage=1, belt="belt"
)


class Player:
    """A trainer of stage 1, whose microbatches have 10 tokens and as many as their number."""

    def __init__(self, micros: int = 3) -> None:
        self.machine = StageMachine(LocalSteps(micros, ScheduleRules("blocking", PERIOD)))
        self.machine.attach(MODEL, 7, (1,), 64, NeedSamples(samples=100, want=0))
        self.machine.on_message(SHARED)

    def load(self, version: int) -> list[SumsEffect]:
        said = LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=1)
        return self.machine.on_message(said)

    def work(self, *micros: int, way: Way = "backward") -> list[LocalStep]:
        """The steps that follow, each after the word that tells what was made."""
        steps = []
        for micro in micros:
            hand = MicrobatchWork(
                way=way,
                version=self.machine.version,
                micro=micro,
                epoch=0,
                start=micro,
                stop=micro + 1,
                place=0,
                given_bytes=8,
                returned_bytes=8,
            )
            assert self.machine.on_message(hand) == []
            assert self.machine.next() == [StageWork(hand)]
            said, *more = self.machine.on_made(8, 10 + micro, None)
            assert isinstance(said, do.SayWord) and isinstance(said.word, WorkDone)
            for step in more:
                assert isinstance(step, LocalStep)
                steps.append(step)
        return steps

    def freeze(self, slot: int = 1) -> list[SumsEffect]:
        return self.machine.on_message(FreezeSums(version=self.machine.version, slot=slot))


def loaded(version: int = 0, micros: int = 3) -> Player:
    player = Player(micros)
    player.load(version)
    return player


def test_a_step_is_taken_of_each_so_many_microbatches_that_count() -> None:
    player = loaded()
    assert player.work(0, 1) == []
    assert player.work(7, 8, way="forward") == [], "on the way there nothing counts"
    assert player.work(2) == [LocalStep(run_step=0, tokens=33, share=1.0)]
    assert player.work(5, 3, 4) == [LocalStep(run_step=1, tokens=42, share=1.0)]
    assert player.machine.on_message(FreezeSums(version=4, slot=1)) == [], (
        "a freeze of another version is none"
    )


def test_P11_what_is_left_when_the_batch_ends_makes_a_smaller_step_and_is_in_what_is_written() -> None:
    player = loaded()
    player.work(0, 1, 2, 4)
    rest, written, said = player.freeze(slot=2)
    assert rest == LocalStep(run_step=1, tokens=14, share=1 / 3)
    assert written == WriteLearned(2) and isinstance(said, do.SayWord)
    assert isinstance(said.word, Frozen)
    due = (10 + 11 + 12 + 14, mask_to_bytes(mask_of((0, 1, 2, 4))), 2)
    assert (said.word.tokens, said.word.counted, said.word.slot) == due


def test_P11_nothing_is_stepped_on_twice_where_more_comes_after_a_freeze() -> None:
    """Somebody's share was lost: what was written stays, and what is counted further is added to it."""
    player = loaded()
    player.work(0)
    assert player.freeze()[0] == LocalStep(0, 10, 1 / 3)
    written, said = player.freeze()
    assert written == WriteLearned(1), "there is nothing left to step on"
    assert player.work(1, 2) == []
    rest, _, said = player.freeze()
    assert rest == LocalStep(1, 23, 2 / 3)
    assert isinstance(said, do.SayWord) and isinstance(said.word, Frozen)
    assert said.word.tokens == 33, "all of the batch"


@pytest.mark.parametrize("version", [4, 5], ids=["the seat is gone", "a new version"])
def test_P11_a_load_takes_the_anchor_and_what_was_counted_counts_no_more(version: int) -> None:
    player = loaded(4)
    player.work(0, 1)
    dropped, anchor, said = player.load(version)
    assert dropped == DropSums() and isinstance(anchor, do.LoadAnchor) and anchor.keep == "drop"
    assert said == do.SayWord(Loaded(version=version, fragment=1))
    assert player.freeze() == []
    assert player.work(1, 2) == [], "the two from before are in no step"
    assert player.work(0)[0].tokens == 33


def test_the_rate_goes_by_the_runs_step_whoever_takes_how_many_of_them() -> None:
    player = loaded(3, micros=1)
    assert [step.run_step for step in player.work(*range(7))] == [15, 16, 17, 18, 19, 20, 20]
    player.load(3)
    assert player.work(0)[0].run_step == 20, "a lost seat makes no run younger"
    player.load(4)
    assert [step.run_step for step in player.work(0, 1)] == [20, 21]
    player.load(2)
    assert player.work(0)[0].run_step == 10, "the run went back, and the rate with it"


def test_a_gradient_that_is_no_number_is_in_no_step() -> None:
    player = loaded(micros=2)
    player.work(0)
    hand = MicrobatchWork(
        way="both", version=0, micro=1, epoch=0, start=1, stop=2, place=0, given_bytes=8, returned_bytes=0
    )
    player.machine.on_message(hand)
    player.machine.next()
    [said] = player.machine.on_unusable("its loss is nan")
    assert isinstance(said, do.SayWord)
    assert player.work(2) == [LocalStep(0, 22, 1.0)]


def test_the_manifest_says_whether_stages_take_steps_and_of_how_much() -> None:
    staged = PipelineSection(batch=64, stages=2, mode="local", local_micros=4)
    local = local_steps_of(Manifest(merge=MergeSection(policy="mean"), pipeline=staged))
    assert local is not None
    assert [len(local.on_counted(1)) for _ in range(8)] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert local_steps_of(Manifest()) is None
