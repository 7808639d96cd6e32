"""The trainer's machine of one stage of a model: which work is next, what is said of it.  Pure.

Owns: the works that the agent handed over and that are not done yet.  Sums, loads and the end are in summing.py.
Called by its shells: the pipeline loop (which works on a stage's parts) and the simulator's trainer.
Must not know: tensors, clocks, sockets, seats, who sends what comes over a border, what its bytes are.

    event                        what it decides
    attach, on_message           which stage to build, what to load, when sums are dropped or written, the end
    next                         the next work, gradients before activations, or that there is none
    on_made, on_unusable         what is said of it; a backward pass, or both passes of the last stage, count; in mode
                                 "local", whether a step is taken (local_steps.py)

The agent decides who works on what (collectives/flow): this machine only sees that no microbatch gets into the sums of
one version twice, whatever it is handed.
"""

from __future__ import annotations

from collections import deque

from farflung.peer.local.words import Attach, Hand, Load, Made, Need, Shared, ToTrainer
from farflung.peer.trainer.effects import Effect, OpenShared, Say, Stand, Wait, Work, WriteLearned
from farflung.peer.trainer.local_steps import LocalSteps
from farflung.peer.trainer.summing import SummingMachine
from farflung.protocol.model_schema import ModelSchema

NO_STAGE = -1


class StageMachine(SummingMachine[Work]):
    def __init__(self, local: LocalSteps | None = None) -> None:
        """`local`: the steps that this stage takes by itself within a batch; None: it only sums."""
        super().__init__()
        self._local = local
        self.stage = NO_STAGE  # that is mine, since the agent said so
        self._need: Need | None = None
        self._hands: deque[Hand] = deque()

    def attach(
        self,
        model: ModelSchema,
        pid: int,
        stages: tuple[int, ...],
        crossing_bytes: int,
        need: Need,
    ) -> list[Effect]:
        """Say what the model is and which stages fit this machine.  `need`: said by whoever reads samples."""
        self._need = need
        said = Attach(model=model, pid=pid, stages=stages, crossing_bytes=crossing_bytes)
        return [Say(said), Wait(Stand.ATTACHING)]

    def _on_shared(self, word: Shared) -> list[Effect]:
        if self.stage not in (NO_STAGE, word.stage):
            return self._refuse(
                "stage",
                f"the agent shares stage {word.stage}, and stage {self.stage} is built here: start again",
            )
        self.stage = word.stage
        reads = [Say(self._need)] if word.stage == 0 and self._need is not None else []
        return [OpenShared(word), *reads]

    # ---- what is handed over

    def _on_work(self, word: ToTrainer) -> None:
        """Work on a version that is not loaded is none: whoever handed it over has told a `Load` since."""
        if isinstance(word, Hand) and word.version == self.version:
            self._hands.append(word)

    def _forget_work(self) -> None:
        self._hands.clear()

    def _load(self, load: Load) -> list[Effect]:
        if self._local is not None:
            self._local.on_load(load.version)
        return super()._load(load)

    def _write(self, slot: int) -> list[Effect]:
        return super()._write(slot) if self._local is None else [*self._local.rest(), WriteLearned(slot)]

    def _next_due(self) -> Work | None:
        if not self._hands:
            return None
        hand = next((each for each in self._hands if each.way != "forward"), self._hands[0])
        self._hands.remove(hand)
        if hand.way != "forward" and hand.micro in self.sums.counted:
            raise RuntimeError(
                f"microbatch {hand.micro} of version {hand.version} is in the sums: it must not count twice"
            )
        return Work(hand)

    # ---- what came of it

    def on_made(self, bytes_made: int, tokens: int, loss: float | None) -> list[Effect]:
        """It lies in its slot.  Backward and both: its gradient is in the sums."""
        hand = self._take().word
        said: list[Effect] = [Say(_made(hand, bytes_made, tokens, loss, ""))]
        if hand.way == "forward":
            return said
        self._count(hand.micro, tokens, loss)
        return said if self._local is None else [*said, *self._local.on_counted(tokens)]

    def on_unusable(self, problem: str) -> list[Effect]:
        """Nothing came of it, and the sums are as they were before it."""
        hand = self._take().word
        return [Say(_made(hand, 0, 0, None, problem))]


def _made(hand: Hand, bytes_made: int, tokens: int, loss: float | None, problem: str) -> Made:
    return Made(
        way=hand.way,
        version=hand.version,
        micro=hand.micro,
        bytes_made=bytes_made,
        tokens=tokens,
        loss=loss,
        problem=problem,
    )
