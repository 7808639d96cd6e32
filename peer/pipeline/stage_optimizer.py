"""One stage as a learner of its own: the inner optimizer of `[pipeline] mode = "local"`, its rates, its bound.

Owns: the optimizer and what it remembers, which stays with this process from version to version, also where the model
goes back to the anchor.
Called by the pipeline loop and by whoever runs stages in one process.  Must not know words, slots, rounds, or when a
step is due: that is peer/pipeline/machines/stage_machine.py.

A stage sees its own gradient alone, so it can't bound the norm of the whole model's.  It bounds its own, at
clip / sqrt(stages): then the whole one is no longer than `[inner] clip` either.
"""

from __future__ import annotations

import logging
import math

from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.optim.rates import rates_of
from farflung.optim.recipes import inner_of_stage
from farflung.peer.checks.finite import Remembered
from farflung.peer.pipeline.machines.effects import LocalStep
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.manifest import Manifest

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
        self._rejoin_steps = manifest.inner.rejoin_warmup_steps
        self._has_loaded = False

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def on_loaded(self, version: int) -> None:
        """The model is at this version.  At version 0 nobody has more than a fresh optimizer; whoever comes later
        begins with small steps."""
        if not self._has_loaded and version > 0:
            self._steps.start_small(self._rejoin_steps)
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
