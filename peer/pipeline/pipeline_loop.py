"""The trainer's machine of one stage on its parts: carries out what it decides.

Owns: which slot of the belt holds what, where a microbatch's input comes from, the trial of a stage that is just built,
the steps that it takes by itself where the run's mode is "local".
Called by `farflung.pipeline` and the built-in trainer.  Words, waiting and sums are in summing_loop.py.
Must not know: processes, sockets, seats, who sends what comes over a border, the outer step.

A source reads its samples itself, once for both ways, since a data set may draw.  Any other stage finds its input in
the belt, on the way back too: it need not have gone forward here.  Tokens travel in the head of each crossing.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.optim.recipes import inner_of_stage
from farflung.optim.schedule import rates_of
from farflung.peer.checks.finite import Remembered
from farflung.peer.crossings.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.peer.local.words import Anew, MicrobatchWork, NeedSamples, Shared, ToTrainer
from farflung.peer.pipeline.border_codec import BorderCodec
from farflung.peer.pipeline.held import HeldStage
from farflung.peer.pipeline.machines.stage_machine import NO_STAGE, StageMachine, local_steps_of
from farflung.peer.pipeline.machines.summing_machine import LocalStep, StageWork, SumsEffect, WriteLearned
from farflung.peer.pipeline.parts import Loss, Part, Stage, Tensors
from farflung.peer.pipeline.samples import NoHeldOutLoss, ReadMicrobatch, Samples
from farflung.peer.pipeline.stage_loop import MicroActivations, NonFiniteTensor, StageLoop
from farflung.peer.pipeline.summing_loop import SummingLoop, need_of, too_large
from farflung.peer.pipeline.whole import WholeModel
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.inner_loop import Channel
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import FrameError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process import failpoints

# ---- stage optimizer ---------------------------------------------------------------------------------------
# One stage as a learner of its own: the inner optimizer of `[pipeline] mode = "local"`, its rates, its bound.
#
# Owns: the optimizer and what it remembers, which stays with this process from version to version, also where
# the model goes back to the anchor. Called by the pipeline loop and by whoever runs stages in one process.
# Must not know words, slots, rounds, or when a step is due: that is peer/pipeline/machines/stage_machine.py.
#
# A stage sees its own gradient alone, so it can't bound the norm of the whole model's. It bounds its own, at
# clip / sqrt(stages): then the whole one is no longer than `[inner] clip` either.

log = logging.getLogger(__name__)


class StageOptimizer:
    """`loop`: of the stage, whose sums a step is taken on."""

    def __init__(self, loop: StageLoop, manifest: Manifest, is_last: bool) -> None:
        self._loop = loop
        optimizer = inner_of_stage(manifest, loop.stage, is_last)
        self._rates, self._base = rates_of(manifest), [group["lr"] for group in optimizer.param_groups]
        self._steps, self._optimizer = RunSteps(optimizer, after_step=lambda: None), optimizer
        self._remembered = Remembered(optimizer)
        self._clip = manifest.inner.clip / math.sqrt(manifest.pipeline.stages)
        self._has_loaded = False

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def on_loaded(self, version: int) -> None:
        """The model is at this version.  At version 0 nobody has more than a fresh optimizer; whoever comes later
        begins with small steps."""
        if not self._has_loaded and version > 0:
            self._steps.start_small()
        self._has_loaded = True
        # Gradients that are not finite are in no sum; their squares, and steps by them, may be too large all the same.
        if worn := self._remembered.not_finite():
            count = self._remembered.forget(worn)
            log.warning("what the optimizer remembered of %d parameters was not finite and is reset", count)

    def step(self, due: LocalStep) -> Tensor:
        """On the mean gradient of what is in the sums, which are zero then.  Its norm, as the optimizer took it."""
        gradients = self._loop.sums.take_means(due.tokens)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.to(parameter.dtype)
        norm = nn.utils.clip_grad_norm_(gradients, self._clip)
        rate = self._rates.share(due.run_step) * due.share
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * rate
        self._optimizer.step()
        for parameter in gradients:
            parameter.grad = None  # what the next microbatch leaves there is its own
        return norm.clamp(max=self._clip)


# ---- pipeline loop -----------------------------------------------------------------------------------------

_NO_BORDER = "a stage at an end of the model has a border on one side only"


class StageModel:
    """What a user has said, of which one stage is built when the agent says which."""

    def __init__(
        self, parts: Sequence[Part], whole: WholeModel, samples: Samples, loss: Loss, manifest: Manifest
    ) -> None:
        self.parts, self.whole, self.samples, self.loss = parts, whole, samples, loss
        self.manifest = manifest

    @property
    def stages(self) -> int:
        return len(self.whole.plans)

    def build(self, number: int, device: torch.device) -> HeldStage:
        """No part of another stage takes any memory."""
        plan, seed = self.whole.plans[number], self.manifest.run.seed
        stage = Stage.build(self.parts, plan.first, plan.stop, seed)
        layout = self.whole.check_built(stage, number)
        loop = StageLoop(stage.to(device), seed, self.loss if self._is_last(number) else None)
        return HeldStage(stage, layout, loop, moves_by_itself=self.takes_local_steps)

    def _is_last(self, number: int) -> bool:
        return number == self.stages - 1

    @property
    def takes_local_steps(self) -> bool:
        return self.manifest.pipeline.mode == "local"

    def replica(self, number: int, loop: StageLoop) -> StageOptimizer | None:
        """What takes this stage's steps; None where they are the run's."""
        return StageOptimizer(loop, self.manifest, self._is_last(number)) if self.takes_local_steps else None

    def codec_after(self, number: int) -> BorderCodec | None:
        """Of the border behind a stage; None where the model ends, or before it begins."""
        borders = self.whole.borders
        if not 0 <= number < len(borders):
            return None
        return BorderCodec(borders[number], self.samples.riders)


class PipelineLoop(SummingLoop[StageMachine]):
    """`fitting`: the stages that this machine can hold."""

    def __init__(
        self,
        channel: Channel,
        model: StageModel,
        fitting: tuple[int, ...],
        device: torch.device,
        agent_problem: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(channel, StageMachine(local_steps_of(model.manifest)), agent_problem, clock)
        self._model, self._fitting, self._device = model, fitting, device
        self._held: HeldStage | None = None
        self._replica: StageOptimizer | None = None
        self._belt: SharedSlots | None = None
        self._before: BorderCodec | None = None
        self._after: BorderCodec | None = None
        self._read: dict[
            int, ReadMicrobatch
        ] = {}  # of a source: samples that went forward and did not come back

    @property
    def held(self) -> HeldStage:
        if self._held is None:
            raise RuntimeError("no stage is built: the agent has not said which one is mine")
        return self._held

    @property
    def manifest(self) -> Manifest:
        return self._model.manifest

    @property
    def stage(self) -> Stage:
        model = self.held.model
        if not isinstance(model, Stage):
            raise RuntimeError(f"{type(model).__name__} is no stage")
        return model

    def end(self) -> None:
        if self.machine.stage != NO_STAGE:
            self.held.take_newest()

    def _on_word(self, word: ToTrainer) -> None:
        if isinstance(word, Anew):
            self._let_go()
            self.begin()
        else:
            super()._on_word(word)

    def _let_go(self) -> None:
        """This peer is to hold another stage: there is room for that one only when this one is gone."""
        self.machine = StageMachine(local_steps_of(self.manifest))
        self._held = self._replica = self._belt = self._before = self._after = None
        self._read.clear()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _attach(self) -> list[SumsEffect]:
        whole = self._model.whole
        need: NeedSamples = need_of(self._model.samples, self._model.manifest)
        return self.machine.attach(whole.schema, os.getpid(), self._fitting, whole.crossing_bytes, need)

    def _open(self, word: Shared) -> None:
        if self._held is None:
            self._held = self._model.build(word.stage, self._device)
            self._replica = self._model.replica(word.stage, self._held.loop)
            self._before, self._after = (self._model.codec_after(n) for n in (word.stage - 1, word.stage))
            self._try_out()
        self._held.open(word)
        self._belt = SharedSlots.open(word.belt, PLACES, self._model.whole.crossing_bytes)

    def _drop(self) -> None:
        super()._drop()
        self._read.clear()

    # ---- steps of this stage's own

    def _on_model(self, effect: SumsEffect) -> None:
        match effect:
            case LocalStep():
                self._step(effect)
            case WriteLearned(slot):
                self.held.write_learned(slot)
            case do.LoadAnchor(version=version):
                super()._on_model(effect)
                if self._replica is not None:
                    self._replica.on_loaded(version)
            case _:
                super()._on_model(effect)

    def _step(self, due: LocalStep) -> None:
        if self._replica is None:
            raise RuntimeError("a stage that only sums takes no step of its own")
        try:
            norm = self._replica.step(due)
        except torch.OutOfMemoryError as error:
            stage, stages = self.machine.stage, self._model.stages
            raise UserError(
                f"what the optimizer remembers of stage {stage} of {stages} does not fit into the GPU's memory: "
                f"{str(error).splitlines()[0]}"
            ) from None
        self._tell_gradient_norm(lambda: float(norm))

    # ---- one work

    def _compute(self, due: SumsEffect) -> list[SumsEffect]:
        if not isinstance(due, StageWork):
            raise RuntimeError(f"{type(due).__name__} is no work on a stage")
        failpoints.hit("trainer.step")
        hand = due.word
        try:
            payload, tokens, loss = self._evaluated(hand) if hand.held_out else self._worked(hand)
        except (NonFiniteTensor, NoHeldOutLoss) as error:
            return self.machine.on_unusable(str(error))
        except FrameError as error:  # the agent wrote over the slot, since it has told to load anew meanwhile
            return self.machine.on_unusable(f"what lies in the belt is no crossing: {error}")
        except torch.OutOfMemoryError as error:
            raise self._too_large(error) from None
        made = self.belt.write(slot_of(hand.place, MADE), payload) if payload else 0
        if not hand.held_out:
            self._tell_progress(tokens if hand.way != "forward" else 0, loss)
        return self.machine.on_made(made, tokens, loss)

    def _worked(self, hand: MicrobatchWork) -> tuple[bytes, int, float | None]:
        """What goes on, the tokens of the microbatch, and in the last stage its loss."""
        read = self._input(hand)
        given, riders = self.held.there(read)
        micro = MicroActivations(hand.version, hand.micro, read.tokens, riders)
        loop = self.held.loop
        if hand.way == "forward":
            gives = loop.forward(micro, given)
            try:
                return _there(self._after).there(gives, riders, read.tokens), read.tokens, None
            except NonFiniteTensor:
                loop.undo_forward(hand.micro)
                raise
        if hand.way == "both":
            returned, loss = loop.last(micro, given)
            return self._given_back(returned, read.tokens), read.tokens, loss
        slot = self.belt.view(slot_of(hand.place, RETURNED))
        gradients = _there(self._after).read_back(slot[: hand.returned_bytes], self._device)
        returned = loop.backward(micro, given, gradients)
        self._read.pop(hand.micro, None)
        return self._given_back(returned, read.tokens), read.tokens, None

    def _evaluated(self, hand: MicrobatchWork) -> tuple[bytes, int, float | None]:
        """The same of what nobody learns from: it goes there as ever, and no gradient comes back."""
        with self._model.samples.held_out.computed(self.stage):
            read = self._input(hand)
            given, riders = self.held.there(read)
            micro = MicroActivations(hand.version, hand.micro, read.tokens, riders)
            if hand.way == "forward":
                gives = self.held.loop.forward(micro, given)
                self.held.loop.undo_forward(hand.micro)
                return _there(self._after).there(gives, riders, read.tokens), read.tokens, None
            if hand.way == "both":
                returned, loss = self.held.loop.evaluate(micro, given)
                return self._given_back(returned, read.tokens), read.tokens, loss
            self._read.pop(hand.micro, None)
            return self._given_back(self.held.loop.no_gradients(given), read.tokens), read.tokens, None

    def _input(self, hand: MicrobatchWork) -> ReadMicrobatch:
        if self._before is not None:
            slot = self.belt.view(slot_of(hand.place, GIVEN))
            return self._before.read_there(slot[: hand.given_bytes], self._device)
        if hand.micro not in self._read:
            samples, of = self._model.samples, self.manifest.eval.windows
            self._read[hand.micro] = (
                samples.held_out.read(hand.start, hand.stop, of)
                if hand.held_out
                else samples.read(hand.epoch, hand.start, hand.stop)
            )
        return self._read[hand.micro]

    def _given_back(self, returned: Tensors, tokens: int) -> bytes:
        """The run's data wants no gradient."""
        return b"" if self._before is None else self._before.back(returned, tokens)

    @property
    def belt(self) -> SharedSlots:
        if self._belt is None:
            raise RuntimeError("before the agent shared its belt")
        return self._belt

    # ---- a stage that is just built

    def _try_out(self) -> None:
        """One microbatch of made values, there and back: what does not fit is found before the stage takes a seat."""
        micro = self._model.manifest.pipeline.micro
        read = self._made_up(micro)
        given, riders = self.held.there(read)
        trial = MicroActivations(0, 0, read.tokens, riders)
        loop = self.held.loop
        try:
            if self._after is None:
                loop.trial(trial, given)
            else:
                gives = loop.forward(trial, given)
                loop.undo_forward(0)
                ones = tuple(torch.ones_like(t) for t in gives if t.is_floating_point())
                loop.trial_back(trial, given, ones)
        except NonFiniteTensor:
            loop.drop()  # made values may give anything: only what this takes was wanted
        except torch.OutOfMemoryError as error:
            raise self._too_large(error) from None

    def _made_up(self, samples: int) -> ReadMicrobatch:
        source = self._model.samples.source
        if self._before is None:
            return self._model.samples.read(0, 0, min(samples, source.samples))
        border, dice = self._before.border, torch.Generator().manual_seed(0)

        def made(dtype: str, dims: tuple[int, ...]) -> torch.Tensor:
            kind: torch.dtype = getattr(torch, dtype)
            floating = kind.is_floating_point
            return torch.randn(dims, generator=dice).to(kind) if floating else torch.zeros(dims, dtype=kind)

        given = tuple(made(t.dtype, t.dims(samples)) for t in border.tensors)
        riders = {
            name: made(rider.dtype, rider.dims(samples))
            for name, rider in zip(self._model.samples.riders, border.riders, strict=True)
        }
        return ReadMicrobatch(given, riders, samples)

    def _too_large(self, error: torch.OutOfMemoryError) -> Exception:
        stage, stages = self.machine.stage, self._model.stages
        return too_large(self._model.manifest.pipeline.micro, error, f" beside stage {stage} of {stages}")


def _there(codec: BorderCodec | None) -> BorderCodec:
    if codec is None:
        raise RuntimeError(_NO_BORDER)
    return codec
