"""The trainer's machine of one stage of a model: which work is next, what is said of it.  Pure.

Owns: the works that the agent handed over and that are not done yet.  Sums, loads, the end: summing_machine.py.
Called by its shells: the pipeline loop (which works on a stage's parts) and the simulator's trainer.
Must not know: tensors, clocks, sockets, seats, who sends what comes over a border, what its bytes are.

    event                        what it decides
    attach, on_message           which stage to build, what to load, when sums are dropped or written, the end
    next                         the next work, gradients before activations, or that there is none
    on_made, on_unusable         what is said of it; a backward pass, or both passes of the last stage, count; in mode
                                 "local", whether a step is taken

The agent decides who works on what (collectives/pipeline): this machine only sees that no microbatch gets into the
sums of one version twice, whatever it is handed.

Where `[pipeline] mode` is "local", a stage does not sum gradients for one exact step of the whole batch: its trainer
takes a step of its own optimizer after every `local_micros` microbatches that it has counted, and what all its steps
have moved is its contribution.  What is left over when the batch ends makes a smaller step, so that every microbatch
that is counted is in the contribution.  The rate follows from the run's own step: each version counts as `sync_every`
of them, however many a trainer takes in a batch, since that depends on how many peers share the stage.
"""

from __future__ import annotations

from collections import deque

from farflung.optim.schedule import RunPlace, ScheduleRules, rules_of
from farflung.peer.local.words import (
    Attach,
    LoadState,
    MicrobatchWork,
    NeedSamples,
    Shared,
    ToTrainer,
    WorkDone,
)
from farflung.peer.pipeline.machines.summing_machine import (
    LocalStep,
    StageWork,
    SummingMachine,
    SumsEffect,
    WriteLearned,
)
from farflung.peer.trainer.effects import OpenShared, SayWord, TrainerState, WaitBefore
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema

NO_STAGE = -1


class LocalSteps:
    """Of one trainer; it goes on from version to version."""

    def __init__(self, micros_per_step: int, rules: ScheduleRules) -> None:
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


class StageMachine(SummingMachine[StageWork]):
    def __init__(self, local: LocalSteps | None = None) -> None:
        """`local`: the steps that this stage takes by itself within a batch; None: it only sums."""
        super().__init__()
        self._local = local
        self.stage = NO_STAGE  # that is mine, since the agent said so
        self._need: NeedSamples | None = None
        self._hands: deque[MicrobatchWork] = deque()

    def attach(
        self,
        model: ModelSchema,
        pid: int,
        stages: tuple[int, ...],
        crossing_bytes: int,
        need: NeedSamples,
    ) -> list[SumsEffect]:
        """Say what the model is and which stages fit this machine.  `need`: said by whoever reads samples."""
        self._need = need
        said = Attach(model=model, pid=pid, stages=stages, crossing_bytes=crossing_bytes)
        return [SayWord(said), WaitBefore(TrainerState.ATTACHING)]

    def _on_shared(self, word: Shared) -> list[SumsEffect]:
        if self.stage not in (NO_STAGE, word.stage):
            return self._refuse(
                "stage",
                f"the agent shares stage {word.stage}, and stage {self.stage} is built here: start again",
            )
        self.stage = word.stage
        reads = [SayWord(self._need)] if word.stage == 0 and self._need is not None else []
        return [OpenShared(word), *reads]

    # ---- what is handed over

    def _on_work(self, word: ToTrainer) -> None:
        """Work on a version that is not loaded is none: whoever handed it over has told a `LoadState` since."""
        if isinstance(word, MicrobatchWork) and word.version == self.version:
            self._hands.append(word)

    def _forget_work(self) -> None:
        self._hands.clear()

    def _load(self, load: LoadState) -> list[SumsEffect]:
        if self._local is not None:
            self._local.on_load(load.version)
        return super()._load(load)

    def _write(self, slot: int) -> list[SumsEffect]:
        return super()._write(slot) if self._local is None else [*self._local.rest(), WriteLearned(slot)]

    def _next_due(self) -> StageWork | None:
        if not self._hands:
            return None
        hand = next((each for each in self._hands if each.way != "forward"), self._hands[0])
        self._hands.remove(hand)
        if hand.way != "forward" and hand.micro in self.sums.counted:
            raise RuntimeError(
                f"microbatch {hand.micro} of version {hand.version} is in the sums: it must not count twice"
            )
        return StageWork(hand)

    # ---- what came of it

    def on_made(self, bytes_made: int, tokens: int, loss: float | None) -> list[SumsEffect]:
        """It lies in its slot.  Backward and both: its gradient is in the sums."""
        hand = self._take().word
        said: list[SumsEffect] = [SayWord(_made(hand, bytes_made, tokens, loss, ""))]
        if hand.way == "forward":
            return said
        self._count(hand.micro, tokens, loss)
        if self._local is None or hand.held_out:
            return said
        return [*said, *self._local.on_counted(tokens)]

    def on_unusable(self, problem: str) -> list[SumsEffect]:
        """Nothing came of it, and the sums are as they were before it."""
        hand = self._take().word
        return [SayWord(_made(hand, 0, 0, None, problem))]


def _made(hand: MicrobatchWork, bytes_made: int, tokens: int, loss: float | None, problem: str) -> WorkDone:
    return WorkDone(
        way=hand.way,
        version=hand.version,
        micro=hand.micro,
        bytes_made=bytes_made,
        tokens=tokens,
        loss=loss,
        problem=problem,
    )
