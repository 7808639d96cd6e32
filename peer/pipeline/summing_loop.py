"""What the trainers of synchronous batches do alike on a model: words in and out, waiting, sums.

Owns: the channel to the agent, the order in which words and work are taken.
Called by its two kinds: the batch loop below (a whole model) and pipeline_loop.py (a stage of one).
Must not know: processes, sockets, seats, rounds, the outer step.  What is computed, written and dropped is decided in
peer/pipeline/machines/summing_machine.py and the machines beside it; how a microbatch is computed is in stage_loop.py.
"""

from __future__ import annotations

import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Frozen, NeedSamples, Shared, ToTrainer
from farflung.peer.pipeline.held import HeldStage
from farflung.peer.pipeline.machines.stage_machine import StageMachine
from farflung.peer.pipeline.machines.summing_machine import (
    Accumulate,
    BatchMachine,
    DropSums,
    StageWork,
    SumsEffect,
    WriteSums,
)
from farflung.peer.pipeline.samples import NoHeldOutLoss, Samples
from farflung.peer.pipeline.stage_loop import MicroActivations, NonFiniteTensor, StageLoop
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.agent_process import refusal
from farflung.peer.trainer.inner_loop import GRADIENT_EVERY_S, POLL_S, Channel, gradient_norm
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints

log = logging.getLogger(__name__)

PATIENCE_S = 30.0  # between two words about one wait
_WAITS_FOR = {
    do.TrainerState.ATTACHING: "still waiting for the model weights; the agent's log has the reason",
    do.TrainerState.WITHOUT_DATA: "waiting for microbatches: is the coordinator there, and are enough peers?",
    do.TrainerState.AT_BARRIER: "waiting for the others to end this batch",
}
Machine = TypeVar("Machine", bound=BatchMachine | StageMachine)


class SummingLoop(ABC, Generic[Machine]):
    def __init__(
        self,
        channel: Channel,
        machine: Machine,
        agent_problem: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.machine: Machine = machine
        self._channel = channel
        self._agent_problem = agent_problem  # why the agent is gone, or None
        self._clock = clock
        self._waits: do.TrainerState | None = None
        self.micros_count = self.tokens = 0  # that this process has computed
        self._gradient_at = -math.inf  # when its norm was told last

    # ---- what its kinds say

    @property
    @abstractmethod
    def held(self) -> HeldStage:
        """Before the agent has shared it, there may be none: RuntimeError."""

    @abstractmethod
    def _attach(self) -> list[SumsEffect]:
        """The first words."""

    @abstractmethod
    def _open(self, word: Shared) -> None:
        """The memory that the agent shares."""

    @abstractmethod
    def _compute(self, due: SumsEffect) -> list[SumsEffect]:
        """What the machine says is next; what it says to what came of it."""

    def _drop(self) -> None:
        """The sums are zero again."""
        self.held.loop.drop()

    # ---- the way through a run

    def run(self) -> None:
        """Until the run is over, or this peer's part in it.  The model then holds the newest version."""
        self.begin()
        while not self.machine.finished:
            stand = self.turn()
            if stand is not None:
                self._wait(stand)
        self.end()

    def begin(self) -> None:
        failpoints.hit("trainer.attach")
        self._carry_out(self._attach())

    def turn(self) -> do.TrainerState | None:
        """All words that are there, then the next work; gives what it waits for, or None."""
        while not self.machine.finished and (word := self._channel.recv(0.0)) is not None:
            self._on_word(word)
        self._waits = None
        self._carry_out(self.machine.next())
        return self._waits

    @abstractmethod
    def end(self) -> None:
        """The run is over for this peer."""

    def _wait(self, stand: do.TrainerState) -> None:
        """For the agent's next word."""
        remind_at = self._clock() + PATIENCE_S
        while (word := self._next_word()) is None:
            if self._clock() >= remind_at:
                remind_at += PATIENCE_S
                log.warning(_WAITS_FOR[stand])
        self._on_word(word)

    def _on_word(self, word: ToTrainer) -> None:
        self._carry_out(self.machine.on_message(word))

    def _next_word(self) -> ToTrainer | None:
        """Waits a moment; Refused once the agent is gone and its last words are read."""
        word = self._channel.recv(POLL_S)
        if word is None and (problem := self._agent_problem()) is not None:
            word = self._channel.recv(0.0)
            if word is None:
                self._carry_out(self.machine.on_agent_gone(problem))
        return word

    # ---- effects

    def _carry_out(self, effects: list[SumsEffect]) -> None:
        for effect in effects:
            match effect:
                case do.SayWord(word):
                    if isinstance(word, Frozen):
                        failpoints.hit("freeze.before_word")
                    self._channel.send(word)
                case do.EndWithRefusal(code, reason):
                    raise refusal(code, reason)
                case do.WaitBefore(stand):
                    self._waits = stand if stand in _WAITS_FOR else None
                case do.RunOver():
                    pass  # `run` asks the machine
                case _:
                    self._on_model(effect)

    def _on_model(self, effect: SumsEffect) -> None:
        match effect:
            case do.OpenShared(word):
                self._open(word)
            case do.WriteAnchor():
                self.held.write_anchor()
            case do.LoadAnchor():
                self.held.load()
            case DropSums():
                self._drop()
            case WriteSums(slot, tokens):
                self.held.write_sums(slot, tokens)
                self._tell_gradient_norm(lambda: self._norm_of_sums(tokens))
            case Accumulate() | StageWork():
                self._carry_out(self._compute(effect))
            case _:
                raise RuntimeError(f"{type(effect).__name__} is no effect of synchronous batches")

    def _tell_progress(self, tokens: int, loss: float | None) -> None:
        self.micros_count += 1
        self.tokens += tokens
        self.held.shared.write_progress(self.micros_count, self.tokens, loss)

    def _tell_gradient_norm(self, norm: Callable[[], float | None]) -> None:
        """For whoever tracks this peer; `norm` is asked seldom, since it reads all of the gradient once."""
        now = self._clock()
        if now - self._gradient_at >= GRADIENT_EVERY_S:
            self._gradient_at = now
            self.held.shared.write_gradient_norm(norm())

    def _norm_of_sums(self, tokens: int) -> float | None:
        """Of this peer's share of the batch, and of its stage alone: the mean gradient of a token, as it was frozen."""
        norm = gradient_norm(list(self.held.loop.sums.tensors()))
        return None if norm is None else norm / tokens


def need_of(samples: Samples, manifest: Manifest) -> NeedSamples:
    """How many samples the data set has, and its fingerprint."""
    data, why_none = samples.source.fingerprint(manifest.digest)
    if why_none:
        log.info("only the length of the data set is compared with that of others: %s", why_none)
    return NeedSamples(samples=samples.source.samples, want=0, data=data)


# ---- batch loop --------------------------------------------------------------------------------------------
# The trainer's machine of synchronous batches on a whole model: carries out what it decides.
#
# Owns: what a microbatch is read from, and the trial of one before the run hears of this peer. Called by
# `farflung.pipeline` and the built-in trainer. Words, waiting and sums are above. Must not know:
# processes, sockets, seats, rounds, the outer step.


class BatchLoop(SummingLoop[BatchMachine]):
    """`model`: whose tensors are exchanged, under its own names; `loop` computes with the same ones."""

    def __init__(
        self,
        channel: Channel,
        model: nn.Module,
        loop: StageLoop,
        samples: Samples,
        manifest: Manifest,
        agent_problem: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(channel, BatchMachine(manifest.pipeline.micro), agent_problem, clock)
        self.manifest = manifest
        self._held = HeldStage(model, ModelLayout.of(model, manifest.round.chunk_kb * 1024 // 4), loop)
        self._samples = samples

    @property
    def held(self) -> HeldStage:
        return self._held

    @property
    def layout(self) -> ModelLayout:
        return self._held.layout

    @property
    def shared(self) -> SharedState:
        return self._held.shared

    def try_out(self) -> None:
        """One microbatch with the values that the model has by itself; UserError where it can't be computed."""
        micro = self.manifest.pipeline.micro
        read = self._samples.read(0, 0, min(micro, self._samples.source.samples))
        try:
            given, riders = self._held.there(read)
            self._held.loop.trial(MicroActivations(0, 0, read.tokens, riders), given)
        except NonFiniteTensor as error:
            raise UserError(
                f"with the model's first values {error}: nothing can be learned from that"
            ) from None
        except torch.OutOfMemoryError as error:
            raise too_large(micro, error) from None

    def end(self) -> None:
        if self._held.is_open:
            self._held.take_newest()

    def _attach(self) -> list[SumsEffect]:
        need = need_of(self._samples, self.manifest)
        schema = self.layout.model_schema(self._held.model, self.manifest.outer.step == "muon")
        return self.machine.attach(schema, os.getpid(), need.samples, need.data)

    def _open(self, word: Shared) -> None:
        self._held.open(word)

    def _compute(self, due: SumsEffect) -> list[SumsEffect]:
        if not isinstance(due, Accumulate):
            raise RuntimeError(f"{type(due).__name__} is no work on a whole model")
        failpoints.hit("trainer.step")
        try:
            tokens, loss = self._evaluated(due) if due.held_out else self._learned(due)
        except (NonFiniteTensor, NoHeldOutLoss) as error:
            return self.machine.on_unusable(str(error))
        if not due.held_out:
            self._tell_progress(tokens, loss)
        return self.machine.on_counted(tokens, loss)

    def _learned(self, due: Accumulate) -> tuple[int, float]:
        read = self._samples.read(due.epoch, due.start, due.stop)
        given, riders = self._held.there(read)
        micro = MicroActivations(due.version, due.micro, read.tokens, riders)
        return read.tokens, self._held.loop.last(micro, given)[1]

    def _evaluated(self, due: Accumulate) -> tuple[int, float]:
        rows = self._samples.held_out
        with rows.computed(self._held.loop.stage):
            read = rows.read(due.start, due.stop, self.manifest.eval.windows)
            given, riders = self._held.there(read)
            micro = MicroActivations(due.version, due.micro, read.tokens, riders)
            return read.tokens, self._held.loop.evaluate(micro, given)[1]


def too_large(micro: int, error: torch.OutOfMemoryError, of: str = "") -> UserError:
    needed = f"a microbatch of {micro} samples ([pipeline] micro of run.toml)"
    return UserError(f"{needed}{of} does not fit into the GPU's memory: {str(error).splitlines()[0]}")
