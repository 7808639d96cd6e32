"""The trainer's machine of synchronous batches on a whole model: carries out what it decides.

Owns: what a microbatch is read from, and the trial of one before the run hears of this peer.
Called by `farflung.pipeline` and the built-in trainer.  Words, waiting and sums are in summing_loop.py.
Must not know: processes, sockets, seats, rounds, the outer step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Shared
from farflung.peer.pipeline.held import HeldStage
from farflung.peer.pipeline.machines.batch_machine import BatchMachine
from farflung.peer.pipeline.machines.effects import Accumulate, SumsEffect
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import MicroActivations, NonFiniteTensor, StageLoop
from farflung.peer.pipeline.summing_loop import SummingLoop, need_of
from farflung.peer.trainer.inner_loop import Channel
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints


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
        read = self._samples.read(due.epoch, due.start, due.stop)
        given, riders = self._held.there(read)
        try:
            _, loss = self._held.loop.last(
                MicroActivations(due.version, due.micro, read.tokens, riders), given
            )
        except NonFiniteTensor as error:
            return self.machine.on_unusable(str(error))
        self._tell_progress(read.tokens, loss)
        return self.machine.on_counted(read.tokens, loss)


def too_large(micro: int, error: torch.OutOfMemoryError, of: str = "") -> UserError:
    needed = f"a microbatch of {micro} samples ([pipeline] micro of run.toml)"
    return UserError(f"{needed}{of} does not fit into the GPU's memory: {str(error).splitlines()[0]}")
