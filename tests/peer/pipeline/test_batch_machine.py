"""The trainer's machine of synchronous batches: what it computes next, what it freezes, what it drops."""

from __future__ import annotations

import pytest

from farflung.peer.local.words import (
    Finish,
    FreezeSums,
    Frozen,
    Grants,
    Loaded,
    LoadState,
    MicrobatchCounted,
    NeedSamples,
    Provide,
    Provided,
    Stop,
    ToTrainer,
    Unusable,
)
from farflung.peer.pipeline.machines.summing_machine import (
    Accumulate,
    BatchMachine,
    DropSums,
    SumsEffect,
    WriteSums,
)
from farflung.peer.trainer import effects as do
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.model_schema import ModelSchema

MODEL = ModelSchema((), 4, 1, 1, bytes(32))


def load(version: int) -> LoadState:
    return LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0)


def grants(version: int, *ranges: tuple[int, int]) -> Grants:
    return Grants(version=version, epoch=1, start=30, stop=41, count=4, ranges=ranges)


def said(effects: list[SumsEffect]) -> list[object]:
    return [effect.word for effect in effects if isinstance(effect, do.SayWord)]


class Player:
    def __init__(self) -> None:
        self.machine = BatchMachine(micro=3)
        self.machine.attach(MODEL, 7, 100, b"data")

    def hear(self, *words: ToTrainer) -> list[SumsEffect]:
        return [effect for word in words for effect in self.machine.on_message(word)]

    def computes(self) -> tuple[int, int, int] | None:
        """(number, first sample, end) of what it is to compute now."""
        [effect] = self.machine.next()
        return (effect.micro, effect.start, effect.stop) if isinstance(effect, Accumulate) else None


def loaded(version: int = 5) -> Player:
    player = Player()
    player.hear(load(version))
    return player


def test_it_says_what_it_has_and_founds_the_run() -> None:
    machine = BatchMachine(micro=3)
    attach, need = said(machine.attach(MODEL, 7, 100, b"data"))
    assert need == NeedSamples(samples=100, want=0, data=b"data") and getattr(attach, "pid", 0) == 7
    assert machine.next() == [do.WaitBefore(do.TrainerState.ATTACHING)]
    assert machine.on_message(Provide()) == [do.WriteAnchor(), do.SayWord(Provided())]


def test_microbatches_are_pieces_of_the_batch_and_the_last_may_be_short() -> None:
    player = loaded()
    player.hear(grants(5, (2, 4)))
    assert player.computes() == (2, 36, 39)
    assert said(player.machine.on_counted(12, 2.0)) == [
        MicrobatchCounted(version=5, micro=2, tokens=12, loss=2.0)
    ]
    assert player.computes() == (3, 39, 41)
    player.machine.on_counted(8, 4.5)
    assert player.machine.next() == [do.WaitBefore(do.TrainerState.WITHOUT_DATA)]


def test_sums_are_frozen_with_the_mask_and_the_mean_loss_and_kept_for_more() -> None:
    player = loaded()
    player.hear(grants(5, (2, 4)))
    for tokens, loss in ((12, 2.0), (8, 4.5)):
        player.computes()
        player.machine.on_counted(tokens, loss)
    written, say = player.hear(FreezeSums(version=5, slot=1))
    assert written == WriteSums(slot=1, tokens=20)
    assert isinstance(say, do.SayWord) and say.word == Frozen(
        slot=1, tokens=20, steps=2, used=(), loss=3.0, counted=mask_to_bytes(0b1100)
    )
    assert player.machine.next() == [do.WaitBefore(do.TrainerState.AT_BARRIER)]
    player.hear(grants(5, (0, 1), (2, 4)))  # somebody's share was lost: mine stays
    assert player.computes() == (0, 30, 33)
    player.machine.on_counted(12, None)
    [_, again] = player.hear(FreezeSums(version=5, slot=2))
    assert isinstance(again, do.SayWord) and isinstance(again.word, Frozen) and again.word.tokens == 32


@pytest.mark.parametrize("version", [5, 6], ids=["the seat is gone", "a new version"])
def test_P11_a_load_drops_the_sums_and_whatever_was_granted(version: int) -> None:
    player = loaded()
    player.hear(grants(5, (0, 2)))
    player.computes()
    player.machine.on_counted(12, 2.0)
    dropped, anchor, say = player.hear(load(version))
    assert dropped == DropSums() and isinstance(anchor, do.LoadAnchor) and anchor.keep == "drop"
    assert isinstance(say, do.SayWord) and say.word == Loaded(version=version)
    assert player.computes() is None
    assert player.hear(FreezeSums(version=version, slot=0)) == [], "there is nothing to freeze"


def test_words_of_another_version_are_none() -> None:
    player = loaded()
    assert player.hear(grants(4, (0, 2)), FreezeSums(version=4, slot=0)) == []
    assert player.computes() is None


def test_what_gives_no_gradient_is_said_and_left() -> None:
    player = loaded()
    player.hear(grants(5, (0, 2)))
    player.computes()
    assert said(player.machine.on_unusable("its loss is nan")) == [
        Unusable(version=5, micro=0, problem="its loss is nan")
    ]
    assert player.computes() == (1, 33, 36)
    player.machine.on_counted(9, 1.0)
    [_, say] = player.hear(FreezeSums(version=5, slot=0))
    assert isinstance(say, do.SayWord) and isinstance(say.word, Frozen)
    assert (say.word.tokens, say.word.counted) == (9, mask_to_bytes(0b10))


def test_a_word_under_a_gradient_is_a_mistake_of_the_shell() -> None:
    player = loaded()
    player.hear(grants(5, (0, 2)))
    player.computes()
    with pytest.raises(RuntimeError, match="while a microbatch is computed"):
        player.hear(load(6))


def test_the_end() -> None:
    player = loaded()
    assert player.hear(Finish(version=5)) == [do.RunOver(stopped=False)]
    player = loaded()
    assert player.hear(Stop(code="left", reason="asked")) == [do.RunOver(stopped=True)]
    player = Player()
    assert player.hear(Stop(code="left", reason="asked")) == [do.EndWithRefusal("left", "asked")]
    assert player.machine.next() == [do.EndWithRefusal("left", "asked")]
    assert loaded().machine.on_agent_gone("it ended") == [do.EndWithRefusal("agent", "it ended")]
