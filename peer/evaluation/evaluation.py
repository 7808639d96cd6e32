"""Evaluation at a peer: its trainer computes the loss of some windows at a version, and the coordinator hears it.

Where the mode begins.  Pure.  The coordinator's ticks name a version and windows until it has heard the answer.  What
the trainer computes is of that version only if the anchor held it from the question to the answer: it is asked while
the state here is whole, and its answer counts if that is so still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from farflung.peer.local.words import FromTrainer, Score, Scored
from farflung.peer.machine.effects import Effect, TellTrainer
from farflung.peer.machine.modes import PeerMode, SessionTools, TrainerSaid
from farflung.peer.machine.replicas import Replicas
from farflung.peer.machine.trainer_proxy import TrainerProxy
from farflung.protocol.frames import Payload
from farflung.protocol.messages import OfBeat, Tick
from farflung.protocol.mode_words import ScoreBeat, ScoreTick
from farflung.protocol.round_words import section

# So long a trainer may be at it before it counts as stuck, if it takes no steps then.
LONGEST_S = 600.0
PASSED = "the next version is here"


@dataclass
class ScoreAnswer:
    order: ScoreTick
    asked_at: float = math.inf  # the trainer
    answer: ScoreBeat | None = None


class PeerEvaluation(PeerMode):
    def __init__(self, part: Replicas, training: TrainerProxy) -> None:
        self._part, self._proxy = part, training
        self._now: ScoreAnswer | None = None

    @property
    def sections(self) -> tuple[OfBeat, ...]:
        return (self._now.answer,) if self._now is not None and self._now.answer is not None else ()

    def on_tick(self, tick: Tick, now: float) -> list[Effect]:
        order = section(ScoreTick, tick.sections)
        if order is None:
            self._now = None
        elif self._now is None or self._now.order != order:
            self._now = ScoreAnswer(order)
        return self._ask(now)

    def on_timer(self, now: float, inside: bool) -> list[Effect]:
        if self._now is not None and now - self._now.asked_at >= LONGEST_S:
            self._proxy.away = False
        return self._ask(now)

    def on_trainer(self, word: FromTrainer, payload: Payload, now: float) -> TrainerSaid | None:
        if not isinstance(word, Scored):
            return None
        self._proxy.away = False
        mine = self._now
        if mine is None or mine.order.number != word.number or mine.answer is not None:
            return TrainerSaid([])  # nobody asks for it any more
        if not self._is_here(mine.order.versions):
            word = Scored(number=word.number, why_not=PASSED)
        mine.answer = ScoreBeat(word.number, word.nats, word.data, word.why_not[:200])
        return TrainerSaid([], beat=True)

    # ---- what the trainer is asked ---------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Effect]:
        if (mine := self._now) is None or mine.answer is not None:
            return []
        if not self._proxy.attached:
            mine.asked_at = math.inf  # the next one knows of no question
        if mine.asked_at < math.inf or not self._proxy.attached or self._proxy.loading:
            return []
        if not self._is_here(mine.order.versions):
            if self._is_past(mine.order.versions):
                mine.answer = ScoreBeat(mine.order.number, why_not=PASSED)
            return []
        mine.asked_at, self._proxy.away = now, True
        return [
            TellTrainer(
                Score(number=mine.order.number, versions=mine.order.versions, windows=mine.order.windows)
            )
        ]

    def _is_here(self, versions: tuple[int, ...]) -> bool:
        held = [each.held for each in self._part.replicas.values()]
        return tuple(each.version for each in held) == versions and all(each.whole for each in held)

    def _is_past(self, versions: tuple[int, ...]) -> bool:
        held = [each.held.version for each in self._part.replicas.values()]
        return any(here > asked for here, asked in zip(held, versions, strict=False))


def made(tools: SessionTools) -> PeerMode | None:
    if not tools.offer.attached.known.manifest.eval.source or tools.config.helps:
        return None
    return PeerEvaluation(tools.part, tools.training)
