"""The inner learning rate as a function of the run's own step: `[inner] schedule` in run.toml.  Pure.

The trainer's machine holds a `RunPlace`; the built-in trainer and scripts have the rate through `run.lr_lambda`.  Must
not know optimizers, tensors, rounds.

A rate that follows from the run's step and nothing else is the same for whoever joins late, and for a script that was
started again: no process has a beginning of its own.

    constant   the whole rate
    linear     down to last_lr at the last step, in a straight line
    cosine     down to last_lr at the last step, along half a cosine
    wsd        the whole rate until decay_steps before the end, then down to last_lr in a straight line

All of them rise from 0 over warmup_steps first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from farflung.optim.schedule import ScheduleRules
from farflung.protocol.manifest import Manifest


class RunPlace:
    """The run's own step, as far as one peer can see it: each version counts as a period, however many steps it took.

    So whoever joins at a version begins where the others are.  A period of which nothing was committed moves nobody
    on where training waits for rounds; elsewhere a peer goes on for one period while the version is on its way.
    """

    def __init__(self, rules: ScheduleRules) -> None:
        self._rules = rules
        self._steps_before: Callable[[int], int] = lambda version: version * rules.period_steps
        self._has_frozen = False  # since it was loaded last
        self.step = 0

    def follow(self, rules: ScheduleRules, steps_before: Callable[[int], int]) -> None:
        """`steps_before`: the run's own, until a version, where not all its periods are of one length."""
        self._rules, self._steps_before = rules, steps_before

    def on_load(self, restarts: bool) -> None:
        """`restarts`: the state is another one.  Otherwise the step never goes down."""
        self._has_frozen = False
        self.step = 0 if restarts else self.step

    def on_freeze(self) -> None:
        self._has_frozen = True

    def see(self, version: int, place: int) -> None:
        """A step may be taken next, from this version and at this place of a period."""
        whole = self._rules.period_steps
        if self._has_frozen:
            place = whole if self._rules.waits else whole + place
        self.step = max(self.step, self._steps_before(version) + place)


@dataclass(frozen=True)
class LearningRates:
    """`last`: the rate at the end, as a share of the whole one."""

    schedule: str
    total_steps: int
    warmup_steps: int = 0
    last: float = 0.0
    decay_steps: int = 0  # wsd alone

    def share(self, step: int) -> float:
        """Of the whole rate, for the step with this number; after the last step it stays."""
        if step + 1 < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        begins = self.total_steps - self.decay_steps if self.schedule == "wsd" else self.warmup_steps
        gone = min(1.0, max(0, step - begins) / max(1, self.total_steps - begins))
        left = (1.0 + math.cos(math.pi * gone)) / 2 if self.schedule == "cosine" else 1.0 - gone
        return self.last + (1.0 - self.last) * left


def rates_of(manifest: Manifest, total_steps: int | None = None) -> LearningRates:
    """`total_steps`: of the run, where not all its periods are of one length."""
    inner, total = manifest.inner, manifest.total_steps if total_steps is None else total_steps
    last = 0.1 if isinstance(inner.last_lr, str) else inner.last_lr / inner.lr
    decay = total // 5 if isinstance(inner.decay_steps, str) else inner.decay_steps
    return LearningRates(inner.schedule, total, inner.warmup_steps, last, decay)
