"""A round waits for this peer: its trainer hears it, as long as it could do something about it."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from farflung.peer.local.words import Frozen, RoundCalled
from farflung.peer.machine.effects import TellTrainer
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.peer.pace.pace import PeerPace
from farflung.protocol.mode_words import CallTick, PaceBeat
from rig.bare_tick import tick_with

VERSION = 3
FROZEN = Frozen(slot=0, tokens=1, steps=1, used=(), loss=None, fragment=0, step=1)


class Peer:
    def __init__(self) -> None:
        self.part = SimpleNamespace(replicas={0: SimpleNamespace(held=SimpleNamespace(version=VERSION))})
        self.training = TrainerProxy()
        self.training.on_attach()
        self.training.load(0, VERSION, None)
        self.training.on_loaded(0)
        self.mode = PeerPace(self.part, self.training)  # type: ignore[arg-type]

    def called(self, *rounds: tuple[int, int, float]) -> list[RoundCalled]:
        told = tick_with(*((CallTick(rounds),) if rounds else ()))
        effects = self.mode.on_tick(told, 0.0)
        return [each.message for each in effects if isinstance(each, TellTrainer)]  # type: ignore[misc]


def test_the_trainer_hears_how_long_it_is_waited_for() -> None:
    assert Peer().called((0, VERSION, 1.5)) == [RoundCalled(fragment=0, version=VERSION, waited_s=1.5)]
    assert Peer().called() == []


def test_of_another_version_it_hears_nothing() -> None:
    assert Peer().called((0, VERSION + 1, 0.0)) == Peer().called((0, VERSION - 1, 0.0)) == []


def test_of_a_fragment_that_is_not_here_it_hears_nothing() -> None:
    assert Peer().called((7, VERSION, 0.0)) == []


def test_a_trainer_that_is_not_here_or_loads_or_has_frozen_hears_nothing() -> None:
    peer = Peer()
    peer.training.load(0, VERSION, None)
    assert peer.called((0, VERSION, 0.0)) == []
    peer.training.on_loaded(0)
    peer.training.on_frozen(FROZEN)
    assert peer.called((0, VERSION, 0.0)) == []
    peer = Peer()
    peer.training.on_gone()
    assert peer.called((0, VERSION, 0.0)) == []


def test_what_was_frozen_early_sets_nobody_the_pace() -> None:
    peer = Peer()
    assert peer.mode.sections == ()
    peer.training.on_frozen(FROZEN)
    assert peer.mode.sections == ()
    peer.training.on_frozen(replace(FROZEN, early=True))
    assert peer.mode.sections == (PaceBeat((0,)),)
    peer.training.load(0, VERSION + 1, FROZEN)
    assert peer.mode.sections == ()
