"""The trainer's machine of one stage: which work is next, what is said of it, what counts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.peer.local.words import (
    Attach,
    FreezeSums,
    Frozen,
    Loaded,
    LoadState,
    MicrobatchWork,
    NeedSamples,
    Provide,
    Provided,
    Shared,
    Stop,
    ToTrainer,
    Way,
    WorkDone,
)
from farflung.peer.pipeline.machines.stage_machine import StageMachine, local_steps_of
from farflung.peer.pipeline.machines.summing_machine import (
    DropSums,
    LocalStep,
    StageWork,
    SumsEffect,
    WriteSums,
)
from farflung.peer.trainer import effects as do
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema

MODEL = ModelSchema((), 4, 1, 1, bytes(32))
NEED = NeedSamples(samples=100, want=0, data=b"data")


def shared(stage: int) -> Shared:
    return Shared(
        anchor="a",
        moments=("m",),
        slots=("0", "1", "2"),
        progress="p",
        elements=8,
        stage=stage,
        belt="belt",
    )


def load(version: int, stage: int = 1) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=stage)


def hand(way: Way, micro: int, version: int = 5, place: int = 0) -> MicrobatchWork:
    return MicrobatchWork(
        way=way,
        version=version,
        micro=micro,
        epoch=1,
        start=3 * micro,
        stop=3 * micro + 3,
        place=place,
        given_bytes=10,
        returned_bytes=10 if way == "backward" else 0,
    )


def said(effects: list[SumsEffect]) -> list[object]:
    return [effect.word for effect in effects if isinstance(effect, do.SayWord)]


class Player:
    def __init__(self, stage: int = 1) -> None:
        self.machine = StageMachine()
        self.machine.attach(MODEL, 7, (0, 1), 64, NEED)
        self.hear(shared(stage))

    def hear(self, *words: ToTrainer) -> list[SumsEffect]:
        return [effect for word in words for effect in self.machine.on_message(word)]

    def works(self) -> tuple[str, int] | None:
        [effect] = self.machine.next()
        return (effect.word.way, effect.word.micro) if isinstance(effect, StageWork) else None


def loaded(version: int = 5) -> Player:
    player = Player()
    player.hear(load(version))
    return player


def test_it_says_which_stages_fit_and_builds_the_one_that_it_is_told() -> None:
    machine = StageMachine()
    [attach] = said(machine.attach(MODEL, 7, (0, 2), 64, NEED))
    assert attach == Attach(model=MODEL, pid=7, stages=(0, 2), crossing_bytes=64)
    assert machine.next() == [do.WaitBefore(do.TrainerState.ATTACHING)]
    assert machine.on_message(shared(2)) == [do.OpenShared(shared(2))] and machine.stage == 2
    assert machine.on_message(Provide()) == [do.WriteAnchor(), do.SayWord(Provided())]


def test_only_a_source_tells_of_its_data() -> None:
    machine = StageMachine()
    machine.attach(MODEL, 7, (0, 2), 64, NEED)
    assert machine.on_message(shared(0)) == [do.OpenShared(shared(0)), do.SayWord(NEED)]


def test_another_stage_than_the_one_that_is_built_is_refused() -> None:
    player = Player(stage=1)
    assert player.hear(shared(1)) == [do.OpenShared(shared(1))], "the same one once more is none"
    [refused] = player.hear(shared(2))
    assert isinstance(refused, do.EndWithRefusal) and "shares stage 2, and stage 1 is built" in refused.reason
    assert player.machine.next() == [refused]


def test_gradients_come_before_activations_and_each_in_the_order_of_the_words() -> None:
    player = loaded()
    player.hear(hand("forward", 4), hand("forward", 6), hand("backward", 3), hand("backward", 2))
    order = []
    while (work := player.works()) is not None:
        order.append(work)
        player.machine.on_made(8, 12, None)
    assert order == [("backward", 3), ("backward", 2), ("forward", 4), ("forward", 6)]
    assert player.machine.next() == [do.WaitBefore(do.TrainerState.WITHOUT_DATA)]


def test_P11_a_forward_pass_counts_nothing_a_backward_pass_counts() -> None:
    player = loaded()
    player.hear(hand("forward", 2))
    player.works()
    [made] = said(player.machine.on_made(8, 12, None))
    assert made == WorkDone(way="forward", version=5, micro=2, bytes_made=8, tokens=12, loss=None, problem="")
    assert player.hear(FreezeSums(version=5, slot=1)) == [], "there is nothing in the sums"
    player.hear(hand("backward", 2))
    player.works()
    [made] = said(player.machine.on_made(6, 12, None))
    assert made == WorkDone(
        way="backward", version=5, micro=2, bytes_made=6, tokens=12, loss=None, problem=""
    )
    written, say = player.hear(FreezeSums(version=5, slot=1))
    assert written == WriteSums(slot=1, tokens=12)
    assert isinstance(say, do.SayWord) and say.word == Frozen(
        slot=1, tokens=12, steps=1, used=(), loss=None, fragment=1, counted=mask_to_bytes(0b100)
    )
    assert player.machine.next() == [do.WaitBefore(do.TrainerState.AT_BARRIER)]


def test_the_last_stage_tells_the_mean_loss_of_its_tokens_and_goes_on_when_more_comes() -> None:
    player = loaded()
    for micro, tokens, loss in ((2, 12, 2.0), (3, 8, 4.5)):
        player.hear(hand("both", micro))
        player.works()
        player.machine.on_made(8, tokens, loss)
    [_, say] = player.hear(FreezeSums(version=5, slot=0))
    assert isinstance(say, do.SayWord) and isinstance(say.word, Frozen)
    assert (say.word.loss, say.word.tokens, say.word.counted) == (3.0, 20, mask_to_bytes(0b1100))
    player.hear(hand("both", 0))  # somebody's share was lost: mine stays
    player.works()
    player.machine.on_made(8, 12, 1.0)
    [written, _] = player.hear(FreezeSums(version=5, slot=2))
    assert written == WriteSums(slot=2, tokens=32)


@pytest.mark.parametrize("version", [5, 6], ids=["the seat is gone", "a new version"])
def test_P11_a_load_drops_the_sums_and_whatever_was_handed_over(version: int) -> None:
    player = loaded()
    player.hear(hand("backward", 1), hand("forward", 2))
    player.works()
    player.machine.on_made(8, 12, None)
    dropped, anchor, say = player.hear(load(version))
    assert dropped == DropSums() and isinstance(anchor, do.LoadAnchor)
    assert (anchor.keep, anchor.fragment) == ("drop", 1)
    assert isinstance(say, do.SayWord) and say.word == Loaded(version=version, fragment=1)
    assert player.works() is None and player.hear(FreezeSums(version=version, slot=0)) == []
    player.hear(hand("backward", 1, version))
    assert player.works() == ("backward", 1), "what counted in dropped sums may count again"


def test_words_of_another_version_are_none() -> None:
    player = loaded()
    assert player.hear(hand("forward", 1, 4), hand("both", 1, 6), FreezeSums(version=4, slot=0)) == []
    assert player.works() is None


@pytest.mark.parametrize("way", ["backward", "both"])
def test_P11_what_is_in_the_sums_is_not_computed_again(way: Way) -> None:
    player = loaded()
    player.hear(hand(way, 1))
    player.works()
    player.machine.on_made(8, 12, None)
    player.hear(hand("forward", 1))
    assert player.works() == ("forward", 1), "an activation may be wanted again"
    player.machine.on_made(8, 12, None)
    player.hear(hand(way, 1))
    with pytest.raises(RuntimeError, match="microbatch 1 of version 5 is in the sums"):
        player.machine.next()


@pytest.mark.parametrize("way", ["forward", "backward", "both"])
def test_what_gives_nothing_is_said_and_is_not_in_the_sums(way: Way) -> None:
    player = loaded()
    player.hear(hand(way, 1))
    player.works()
    [made] = said(player.machine.on_unusable("its loss is nan"))
    assert made == WorkDone(
        way=way, version=5, micro=1, bytes_made=0, tokens=0, loss=None, problem="its loss is nan"
    )
    assert player.hear(FreezeSums(version=5, slot=0)) == []


def test_a_word_under_a_gradient_is_a_mistake_of_the_shell() -> None:
    player = loaded()
    player.hear(hand("backward", 0))
    player.works()
    with pytest.raises(RuntimeError, match="while a microbatch is computed"):
        player.hear(load(6))


def test_an_agent_that_is_gone_ends_it() -> None:
    assert loaded().machine.on_agent_gone("it ended") == [do.EndWithRefusal("agent", "it ended")]
    assert loaded().hear(Stop(code="left", reason="asked")) == [do.RunOver(stopped=True)]


def test_P11_no_step_of_its_own_follows_a_held_out_microbatch() -> None:
    rules = Manifest.model_validate(
        {
            "merge": {"policy": "mean"},
            "pipeline": {"batch": 4, "stages": 2, "mode": "local", "local_micros": 1},
        }
    )
    for held_out in (True, False):
        player = Player()
        player.machine = StageMachine(local_steps_of(rules))
        player.machine.attach(MODEL, 7, (0, 1), 64, NEED)
        player.hear(shared(1), load(5), replace(hand("both", 0), held_out=held_out))
        assert player.works() == ("both", 0)
        made = player.machine.on_made(8, 12, 1.0)
        assert any(isinstance(each, LocalStep) for each in made) != held_out
