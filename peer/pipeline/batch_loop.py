"""The trainer's machine of synchronous batches on a model: carries out what it decides, and blocks where it waits.

Owns: the channel to the agent, the shared memory, the order in which words and microbatches are taken.
Called by `farflung.pipeline` and the built-in trainer.
Must not know: processes, sockets, seats, rounds, the outer step.  What is computed, written and dropped is decided in
peer/trainer/batch_machine.py; how a microbatch is computed is in stage_loop.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Frozen, Shared, ToTrainer
from farflung.peer.pipeline.parts import Riders, Tensors
from farflung.peer.pipeline.samples import Read, Samples
from farflung.peer.pipeline.stage_loop import Micro, NotFinite, StageLoop
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.batch_machine import BatchMachine
from farflung.peer.trainer.inner_loop import POLL_S, Channel
from farflung.peer.trainer.layout import Entry, ModelLayout
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints

log = logging.getLogger(__name__)

PATIENCE_S = 30.0  # between two words about one wait
WHOLE_PATIENCE_S = 60.0  # for the last version to be whole
_WAITS_FOR = {
    do.Stand.ATTACHING: "still waiting for the run's state; the agent says what for",
    do.Stand.WITHOUT_DATA: "waiting for microbatches: is the coordinator there, and are enough peers?",
    do.Stand.AT_BARRIER: "waiting for the others to end this batch",
}


class BatchLoop:
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
        self.manifest = manifest
        self.layout = ModelLayout.of(model, manifest.round.chunk_kb * 1024 // 4)
        self.machine = BatchMachine(manifest.pipeline.micro)
        self.micros_count = self.tokens = 0  # that this process has computed
        self._model, self._loop, self._samples = model, loop, samples
        self._channel = channel
        self._agent_problem = agent_problem  # why the agent is gone, or None
        self._clock = clock
        self._shared: SharedState | None = None
        self._loaded: dict[str, Tensor] = {}  # the buffers, as they were loaded last
        self._waits: do.Stand | None = None

    @property
    def shared(self) -> SharedState:
        assert self._shared is not None, "before the agent shared it"
        return self._shared

    def try_out(self) -> None:
        """One microbatch with the values that the model has by itself; UserError where it can't be computed."""
        micro = self.manifest.pipeline.micro
        read = self._samples.read(0, 0, min(micro, self._samples.source.samples))
        try:
            given, riders = self._there(read)
            self._loop.trial(Micro(0, 0, read.tokens, riders), given)
        except NotFinite as error:
            raise UserError(
                f"with the model's first values {error}: nothing can be learned from that"
            ) from None
        except torch.OutOfMemoryError as error:
            needed = f"a microbatch of {micro} samples ([pipeline] micro of run.toml)"
            raise UserError(
                f"{needed} does not fit into the GPU's memory: {str(error).splitlines()[0]}"
            ) from None

    def run(self) -> None:
        """Until the run is over, or this peer's part in it.  The model then holds the newest version."""
        failpoints.hit("trainer.attach")
        source = self._samples.source
        data, why_none = source.fingerprint(self.manifest.digest)
        if why_none:
            log.info("only the length of the data set is compared with that of others: %s", why_none)
        schema = self.layout.model_schema(self._model)
        self._carry_out(self.machine.attach(schema, os.getpid(), source.samples, data))
        while not self.machine.finished:
            while not self.machine.finished and (word := self._channel.recv(0.0)) is not None:
                self._carry_out(self.machine.on_message(word))
            self._waits = None
            self._carry_out(self.machine.next())
            if self._waits is not None:
                self._wait(self._waits)
        if self._shared is not None:
            self._take_newest(self._shared)

    def _take_newest(self, shared: SharedState) -> None:
        self._loop.drop()
        self.layout.load(self._model, shared.copy_whole(shared.anchor.clone, WHOLE_PATIENCE_S))

    # ---- waiting

    def _wait(self, stand: do.Stand) -> None:
        """For the agent's next word."""
        remind_at = self._clock() + PATIENCE_S
        while (word := self._next_word()) is None:
            if self._clock() >= remind_at:
                remind_at += PATIENCE_S
                log.warning(_WAITS_FOR[stand])
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

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Say(word):
                    if isinstance(word, Frozen):
                        failpoints.hit("freeze.before_word")
                    self._channel.send(word)
                case do.Refuse(code, reason):
                    raise Refused(code, reason)
                case do.Wait(stand):
                    self._waits = stand if stand in _WAITS_FOR else None
                case do.Over():
                    pass  # `run` asks the machine
                case _:
                    self._on_model(effect)

    def _on_model(self, effect: do.Effect) -> None:
        match effect:
            case do.OpenShared(word):
                self._open(word)
            case do.WriteAnchor():
                self.layout.write_anchor(self._model, self.shared.anchor)
            case do.LoadAnchor():
                self._load()
            case do.DropSums():
                self._loop.drop()
            case do.WriteSums(slot, tokens):
                self._write_sums(slot, tokens)
            case do.Accumulate():
                self._carry_out(self._accumulate(effect))
            case _:
                raise RuntimeError(f"{type(effect).__name__} is no effect of synchronous batches")

    def _open(self, word: Shared) -> None:
        if word.elements != self.layout.total_elements:
            theirs, ours = word.elements, self.layout.total_elements
            raise UserError(f"the agent shares {theirs} values, this model has {ours}")
        self._shared = SharedState.open(word)

    def _load(self) -> None:
        failpoints.hit("load.mid")
        self.layout.load(self._model, self.shared.anchor)
        self._loaded = self.layout.buffers(self._model)

    def _accumulate(self, due: do.Accumulate) -> list[do.Effect]:
        failpoints.hit("trainer.step")
        read = self._samples.read(due.epoch, due.start, due.stop)
        given, riders = self._there(read)
        try:
            _, loss = self._loop.last(Micro(due.version, due.micro, read.tokens, riders), given)
        except NotFinite as error:
            return self.machine.on_unusable(str(error))
        self.micros_count += 1
        self.tokens += read.tokens
        self.shared.write_progress(self.micros_count, self.tokens, loss)
        return self.machine.on_counted(read.tokens, loss)

    def _write_sums(self, slot: int, tokens: int) -> None:
        """Parameters: the gradient of the mean loss of a token.  Buffers: what they moved, as all peers average it."""

        def value_of(entry: Entry, tensor: Tensor) -> Tensor:
            if entry.kind == "param":
                return self._loop.sums.of(tensor) / tokens
            return self._loaded[entry.name].to(torch.float32) - tensor.detach().to(torch.float32)

        self.layout.write_each(self._model, self.shared.slots[slot], value_of)
        failpoints.hit("freeze.mid")

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _there(self, read: Read) -> tuple[Tensors, Riders]:
        """On the model's device."""
        riders = {name: tensor.to(self._device) for name, tensor in read.riders.items()}
        return tuple(tensor.to(self._device) for tensor in read.given), riders
