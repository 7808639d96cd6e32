"""A peer has its trainer compute what is asked for, while the version is there, and says what came of it."""

from __future__ import annotations

import struct

from farflung.checkpoints.result_log import ResultLog
from farflung.peer.evaluation.evaluation import LONGEST_S, QUESTIONS_MOST, PeerEvaluation
from farflung.peer.local.words import Bye, Logged, Score, Scored
from farflung.peer.machine.effects import TellTrainer
from farflung.peer.machine.held_fragment import ReplicaEvent, Rolling
from farflung.peer.machine.replicas import Replica
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.errors import ScoreCause
from farflung.protocol.mode_words import FiguresBeat, ScoreBeat, ScoreTick
from farflung.protocol.model_schema import Fragment
from rig.bare_tick import tick_with

ORDER = ScoreTick(7, (0,), b"\x05")
NATS = struct.pack("<2f", 1.0, 2.0)


class Part:
    """Of one fragment, at version 0."""

    def __init__(self) -> None:
        self.replica = Replica("me", bytes(8), Fragment(0, 0, 2), ResultLog(keep_versions=3))
        self.replicas = {0: self.replica}
        self.fill()

    def fill(self, version: int = 0) -> None:
        self.replica.held.fill()
        self.replica.held.filled(version)
        self.replica.on_sealed(version, b"d" * 32)


class Peer:
    def __init__(self) -> None:
        self.part, self.training = Part(), TrainerProxy()
        self.training.on_attach()
        self.mode = PeerEvaluation(self.part, self.training)  # type: ignore[arg-type]

    def tick(self, order: ScoreTick | None, now: float = 0.0) -> list[Score]:
        told = tick_with(*((order,) if order else ()))
        return self.asked(self.mode.on_tick(told, now))

    @staticmethod
    def asked(effects: list[object]) -> list[Score]:
        said = [each.message for each in effects if isinstance(each, TellTrainer)]
        return [each for each in said if isinstance(each, Score)]

    def hears(self, **changes: object) -> bool:
        """Whether the coordinator is to hear of it at once."""
        found = self.mode.on_trainer(Scored(**{"number": 7, "nats": NATS, "data": b"t", **changes}), b"", 1.0)  # type: ignore[arg-type]
        assert found is not None and not found.effects
        return found.beat


def test_the_trainer_is_asked_once_and_the_answer_is_told_until_nobody_asks() -> None:
    peer = Peer()
    assert peer.tick(ORDER) == [Score(number=7, versions=(0,), windows=b"\x05")]
    assert peer.tick(ORDER) == [] and peer.mode.sections == ()
    assert peer.hears()
    said = (ScoreBeat(7, NATS, b"t"),)
    assert peer.mode.sections == said and peer.tick(ORDER) == [] and peer.mode.sections == said
    peer.tick(None)
    assert peer.mode.sections == ()
    assert not peer.hears(), "nobody asks any more"


def test_words_of_others_are_for_others() -> None:
    assert Peer().mode.on_trainer(Bye(reason="over"), b"", 0.0) is None


def test_another_order_is_another_question_once_the_first_is_answered() -> None:
    peer = Peer()
    peer.tick(ORDER)
    assert peer.tick(ScoreTick(8, (0,), b"\x01")) == []
    found = peer.mode.on_trainer(Scored(number=7, nats=NATS), b"", 1.0)
    assert found is not None and not found.beat and [each.number for each in peer.asked(found.effects)] == [8]
    assert peer.mode.sections == (), "that was the answer to the first"
    assert peer.hears(number=8, nats=NATS[:4])


def test_of_one_version_no_more_is_computed_than_an_honest_run_asks() -> None:
    """A coordinator that asks again and again gets nothing else out of a peer's time."""
    peer, asked = Peer(), 0
    for number in range(1, 50):
        asked += len(peer.tick(ScoreTick(number, (0,), b"\x05")))
        peer.mode.on_trainer(Scored(number=number, nats=NATS), b"", 1.0)
    assert asked == QUESTIONS_MOST
    peer.part.fill(1)
    assert len(peer.tick(ScoreTick(90, (1,), b"\x05"))) == 1


def test_what_is_no_loss_of_each_window_is_not_sent() -> None:
    """A beat that can't be read would cost the peer its place in the run."""
    for nats in (b"", NATS[:4], NATS + b"1234", bytes(100_000)):
        peer = Peer()
        peer.tick(ORDER)
        assert peer.hears(nats=nats)
        [said] = peer.mode.sections
        assert isinstance(said, ScoreBeat) and said.why_not == ScoreCause.FAILED and not said.nats


def test_a_trainer_that_is_just_loading_or_not_there_is_asked_later() -> None:
    peer = Peer()
    peer.training.load(0, 0, None)
    assert peer.tick(ORDER) == []
    peer.training.on_loaded(0)
    assert len(peer.asked(peer.mode.on_timer(0.1, inside=True))) == 1
    peer.training.on_gone()
    assert peer.asked(peer.mode.on_timer(0.2, inside=True)) == []
    peer.training.on_attach()
    assert len(peer.asked(peer.mode.on_timer(0.3, inside=True))) == 1, "the new one knows of no question"


def test_a_version_that_is_still_to_come_is_waited_for() -> None:
    peer = Peer()
    assert peer.tick(ScoreTick(7, (1,), b"\x05")) == [] and peer.mode.sections == ()
    peer.part.fill(1)
    assert len(peer.asked(peer.mode.on_timer(0.1, inside=True))) == 1


def test_while_the_next_version_is_being_calculated_nothing_is_asked() -> None:
    """Some chunks are at that one already."""
    peer = Peer()
    held = peer.part.replica.held
    held._stands(ReplicaEvent.MOVED_ON, Rolling(0, held.digest))
    assert peer.tick(ORDER) == [] and peer.mode.sections == ()


def test_a_version_that_is_over_is_said_to_be() -> None:
    peer = Peer()
    peer.part.fill(1)
    assert peer.tick(ORDER) == []
    [said] = peer.mode.sections
    assert isinstance(said, ScoreBeat) and said.why_not == ScoreCause.PASSED and not said.nats


def test_what_was_computed_counts_only_if_the_version_is_here_still() -> None:
    """The anchor may have been written between the question and the answer."""
    for changes in (lambda part: part.fill(1), lambda part: part.replica.held.fill()):
        peer = Peer()
        peer.tick(ORDER)
        changes(peer.part)
        assert peer.hears()
        [said] = peer.mode.sections
        assert isinstance(said, ScoreBeat) and said.why_not and not said.nats


def test_a_trainer_that_computes_takes_no_steps_and_does_not_count_as_stuck_for_a_while() -> None:
    peer = Peer()
    peer.training.load(0, 0, None)
    peer.training.on_loaded(0)
    assert peer.training.stepping
    peer.tick(ORDER, now=0.0)
    assert not peer.training.stepping
    peer.mode.on_timer(LONGEST_S - 1, inside=True)
    assert not peer.training.stepping
    peer.mode.on_timer(LONGEST_S, inside=True)
    assert peer.training.stepping, "it may hang"
    peer.hears()
    peer.tick(ScoreTick(8, (0,), b"\x01"))
    peer.hears(number=8, nats=NATS[:4])
    assert peer.training.stepping


def test_a_trainer_that_hangs_counts_as_stuck_also_where_nobody_asks_any_more() -> None:
    for order in (None, ScoreTick(8, (0,), b"\x01")):
        peer = Peer()
        peer.training.load(0, 0, None)
        peer.training.on_loaded(0)
        peer.tick(ORDER, now=0.0)
        peer.tick(order, now=LONGEST_S - 1)
        assert not peer.training.stepping
        peer.mode.on_timer(LONGEST_S, inside=True)
        assert peer.training.stepping


def test_figures_of_the_script_are_told_with_every_beat() -> None:
    peer = Peer()
    found = peer.mode.on_trainer(Logged(figures=(("accuracy", 0.5),)), b"", 1.0)
    assert found is not None and not found.beat and not found.effects
    assert peer.mode.sections == (FiguresBeat((("accuracy", 0.5),)),)
    peer.tick(ORDER)
    peer.hears()
    assert [type(each) for each in peer.mode.sections] == [ScoreBeat, FiguresBeat]
