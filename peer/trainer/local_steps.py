"""Local steps within a batch: when a stage's trainer takes one, of how much, and where in the run it is.  Pure.

Where `[pipeline] mode` is "local", a stage does not sum gradients for one exact step of the whole batch: its trainer
takes a step of its own optimizer after every `local_micros` microbatches that it has counted, and what all its steps
have moved is its contribution.  What is left over when the batch ends makes a smaller step, so that every microbatch
that is counted is in the contribution.
Called by stage_machine.py.  Must not know tensors, optimizers, which microbatches these are.

The rate follows from the run's own step: each version counts as `sync_every` of them, however many a trainer takes in
a batch, since that depends on how many peers share the stage.
"""

from __future__ import annotations

from farflung.optim.rates import RunPlace
from farflung.optim.schedule import Rules, rules_of
from farflung.peer.trainer.effects import LocalStep
from farflung.protocol.manifest import Manifest


class LocalSteps:
    """Of one trainer; it goes on from version to version."""

    def __init__(self, micros_per_step: int, rules: Rules) -> None:
        self._micros_per_step = micros_per_step
        self._period = rules.period_steps
        self._place = RunPlace(rules)
        self._version = -1  # that the steps began from
        self.step_count = 0  # since the anchor was loaded
        self._micros = self._tokens = 0  # in the sums: counted since the last step

    def on_load(self, version: int) -> None:
        """The anchor is in the model again: what was moved is gone, with what is in the sums."""
        self._place.on_load(restarts=version < self._version)
        self._version = version
        self.step_count = self._micros = self._tokens = 0

    def on_counted(self, tokens: int) -> list[LocalStep]:
        """A microbatch more is in the sums.  The step that is due, if one is."""
        self._micros += 1
        self._tokens += tokens
        return self.rest() if self._micros == self._micros_per_step else []

    def rest(self) -> list[LocalStep]:
        """A step of all that is in the sums; none where they are empty."""
        if not self._micros:
            return []
        self._place.see(self._version, min(self.step_count, self._period))
        step = LocalStep(self._place.step, self._tokens, self._micros / self._micros_per_step)
        self.step_count += 1
        self._micros = self._tokens = 0
        return [step]


def local_steps_of(manifest: Manifest) -> LocalSteps | None:
    """None where stages sum gradients."""
    pipeline = manifest.pipeline
    return LocalSteps(pipeline.local_micros, rules_of(manifest)) if pipeline.mode == "local" else None
