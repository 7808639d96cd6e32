"""Evaluation at a peer: its trainer computes the loss of some windows at a version, and the coordinator hears it, and
of the figures that its script measures itself.

Where the mode begins.  Pure.  The coordinator's ticks name a version and windows until it has heard the answer.  What
the trainer computes is of that version only if the anchor held it from the question to the answer: it is asked while
the state here is whole, and its answer counts if that is so still.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.peer.local.words import FromTrainer, Logged, Score, Scored
from farflung.peer.machine.effects import Effect, TellTrainer
from farflung.peer.machine.modes import PeerMode, SessionTools, TrainerSaid
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import ScoreCause
from farflung.protocol.frames import Payload
from farflung.protocol.messages import OfBeat, Tick
from farflung.protocol.mode_words import Figures, FiguresBeat, ScoreBeat, ScoreTick
from farflung.protocol.round_words import section

# So long a trainer may be at it before it counts as stuck, if it takes no steps then.
LONGEST_S = 600.0
# Questions about one version: whose windows nobody answered for are given to others once.
QUESTIONS_MOST = 2


@dataclass
class ScoreQuestions:
    """What the trainer was asked: one thing at a time, and of one version no more than an honest run asks."""

    versions: tuple[int, ...] = ()  # of the newest question
    count: int = 0  # of them
    open: int = 0  # the number of the one that is not answered; 0: none is
    asked_at: float = 0.0

    def may_ask(self, order: ScoreTick) -> bool:
        return not self.open and (order.versions != self.versions or self.count < QUESTIONS_MOST)

    def ask(self, order: ScoreTick, now: float) -> None:
        self.count = self.count + 1 if order.versions == self.versions else 1
        self.versions, self.open, self.asked_at = order.versions, order.number, now


class PeerEvaluation(PeerMode):
    def __init__(self, part: Replicas, training: TrainerProxy) -> None:
        self._part, self._proxy = part, training
        self._order: ScoreTick | None = None
        self._answer: ScoreBeat | None = None
        self._questions = ScoreQuestions()
        self._figures: Figures = ()  # the script's own

    @property
    def sections(self) -> tuple[OfBeat, ...]:
        answers = (self._answer,) if self._answer is not None else ()
        return (*answers, FiguresBeat(self._figures)) if self._figures else answers

    def on_tick(self, tick: Tick, now: float) -> list[Effect]:
        order = section(ScoreTick, tick.sections)
        if order != self._order:
            self._order, self._answer = order, None
        return self._ask(now)

    def on_timer(self, now: float, inside: bool) -> list[Effect]:
        if not self._proxy.attached:
            self._questions = ScoreQuestions()  # the next one knows of none
        elif self._questions.open and now - self._questions.asked_at >= LONGEST_S:
            self._proxy.away = False
        return self._ask(now)

    def on_trainer(self, word: FromTrainer, payload: Payload, now: float) -> TrainerSaid | None:
        if isinstance(word, Logged):
            self._figures = word.figures
            return TrainerSaid([])
        if not isinstance(word, Scored):
            return None
        if word.number == self._questions.open:
            self._questions.open, self._proxy.away = 0, False
        order = self._order
        if order is None or order.number != word.number or self._answer is not None:
            return TrainerSaid(self._ask(now))  # nobody asks for it any more
        count = mask_from_bytes(order.windows).bit_count()
        if not self._is_here(order.versions):
            self._answer = ScoreBeat(word.number, why_not=ScoreCause.PASSED)
        elif word.why_not or len(word.nats) != 4 * count:
            self._answer = ScoreBeat(word.number, why_not=ScoreCause.of(word.why_not))
        else:
            self._answer = ScoreBeat(word.number, word.nats, word.data, text=word.text)
        return TrainerSaid([], beat=True)

    # ---- what the trainer is asked ---------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Effect]:
        order, questions = self._order, self._questions
        is_done = order is None or self._answer is not None or order.number == questions.open
        if order is None or is_done or not self._proxy.attached or self._proxy.loading:
            return []
        if not self._is_here(order.versions):
            if self._is_past(order.versions):
                self._answer = ScoreBeat(order.number, why_not=ScoreCause.PASSED)
            return []
        if not questions.may_ask(order):
            return []
        questions.ask(order, now)
        self._proxy.away = True
        asked = Score(number=order.number, versions=order.versions, windows=order.windows, text=order.text)
        return [TellTrainer(asked)]

    def _is_here(self, versions: tuple[int, ...]) -> bool:
        held = [each.held for each in self._part.replicas.values()]
        return tuple(each.version for each in held) == versions and all(each.whole for each in held)

    def _is_past(self, versions: tuple[int, ...]) -> bool:
        held = [each.held.version for each in self._part.replicas.values()]
        return any(here > asked for here, asked in zip(held, versions, strict=False))


def made(tools: SessionTools) -> PeerMode | None:
    return PeerEvaluation(tools.part, tools.training) if not tools.config.helps else None
