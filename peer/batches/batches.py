"""Where the mode begins at a peer: its part in a synchronous batch, of a model in one piece or of a stage.  Pure.

The trainer's view (batch_work.py) stands from the moment on when the run is known, since a trainer may come before
its peer is let in; of a stage it begins when the coordinator has named that.
"""

from __future__ import annotations

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.optim.schedule import rules_of
from farflung.peer.batches.batch_work import BatchProxy, BatchSync, BatchWork
from farflung.peer.batches.stage_transfers import MyStage, StageBoundaries, StageTransfers, is_crossing
from farflung.peer.local.words import FromTrainer, MicrobatchCounted, Unusable, WorkDone
from farflung.peer.machine.effects import Effect, Note
from farflung.peer.machine.modes import PeerMode, SessionTools, TrainerSaid
from farflung.peer.machine.replicas import Replicas
from farflung.protocol.frames import Frame, Payload, Spoiled
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import BatchBeat

KINDS = CrossingKind


def training_of(manifest: Manifest) -> BatchProxy:
    """Until it is known what this peer holds."""
    return BatchProxy(rules_of(manifest), BatchWork())


def made(tools: SessionTools) -> PeerMode | None:
    training = tools.training
    if not isinstance(training, BatchProxy):
        return None
    if tools.offer.attached.stages or not isinstance(training.sums, BatchWork):
        return StageBatches(tools, training)
    return WholeBatches(tools.part, training, training.sums)


class PeerBatches(PeerMode):
    training: BatchProxy

    @property
    def sections(self) -> tuple[BatchBeat, ...]:
        return (self.training.sums.beat(self.training.attached),)


class WholeBatches(PeerBatches):
    """Of a model in one piece."""

    def __init__(self, part: Replicas, training: BatchProxy, work: BatchWork) -> None:
        self._work, self.training = work, training
        self.exchange = BatchSync(part, training)

    def on_trainer(self, word: FromTrainer, payload: Payload, now: float) -> TrainerSaid | None:
        """What became of a microbatch; it is told at once where the coordinator has to act on it."""
        if isinstance(word, MicrobatchCounted):
            return TrainerSaid([], self.training.on_counted(self._work, word, now))
        if not isinstance(word, Unusable):
            return None
        if self.training.loading or not self._work.on_unusable(word, now):
            return TrainerSaid([])
        if self._work.is_held_out:
            return TrainerSaid([], True)  # of all of them it may be the same: the trainer says so once
        return TrainerSaid([Note(f"microbatch {word.micro} gives no gradient: {word.problem}")], True)


class StageBatches(PeerBatches):
    """Of a model that is cut, in the stage that is held here."""

    def __init__(self, tools: SessionTools, before: BatchProxy) -> None:
        """`before`: the trainer may have come already."""
        attached = tools.offer.attached
        self.crossings = _crossings(tools)
        self.training = BatchProxy(rules_of(attached.known.manifest), self.crossings, attached.stages)
        self.training.attached = before.attached
        self.exchange = BatchSync(tools.part, self.training)

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[Effect] | None:
        return self.crossings.on_frame(sender, frame, now) if is_crossing(frame.header) else None

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[Effect] | None:
        mine = spoiled.header is not None and is_crossing(spoiled.header)
        return self.crossings.on_spoiled(sender, spoiled, now) if mine else None

    def on_trainer(self, word: FromTrainer, payload: Payload, now: float) -> TrainerSaid | None:
        if not isinstance(word, WorkDone):
            return None
        before = self.crossings.counted
        effects = self.crossings.on_made(word, payload, now)
        if self.crossings.counted != before:
            self.training.on_sums_changed()
        return TrainerSaid(effects, bool(word.problem) or self.crossings.has_news(now))

    def place_of(self, word: WorkDone) -> int | None:
        return self.crossings.place_of(word)

    def on_lines(self, unreached: set[str], arriving: set[str], now: float) -> None:
        self.crossings.on_lines(unreached)

    def on_timer(self, now: float, inside: bool) -> list[Effect]:
        return self.crossings.on_timer(now)  # it goes on without the coordinator, too

    def has_news(self, now: float) -> bool:
        return self.crossings.has_news(now)

    @property
    def takes_line(self) -> bool:
        return self.crossings.is_open

    @property
    def early_count(self) -> int:
        return self.crossings.early_count


def _crossings(tools: SessionTools) -> StageTransfers:
    attached, config = tools.offer.attached, tools.config
    rules, [stage] = attached.known.manifest.pipeline, attached.stages
    local_micros = rules.local_micros if rules.mode == "local" else 0
    mine = MyStage(attached.known.tag, config.me.peer, stage, rules.stages, rules.micro, local_micros)
    borders = StageBoundaries(stage, attached.model, rules, config.payload_bytes, config.check)
    return StageTransfers(mine, borders, tools.part.counters, tools.chance)
