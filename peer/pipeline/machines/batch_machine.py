"""The trainer's machine where updates are synchronous batches of a whole model: what to compute next.  Pure.

Owns: which microbatches of the batch are granted, and which is next.  Sums, loads, the end: summing_machine.py.
Called by its shells: the batch loop (which works on a model) and the simulator's trainer.
Must not know: tensors, clocks, sockets, seats, rounds, who else computes.

    event                        what it decides
    attach, on_message           what to load, when sums are dropped or written, the end
    next                         the next microbatch, or that there is none
    on_counted, on_unusable      what came of it
"""

from __future__ import annotations

from farflung.peer.local.words import Attach, Grants, MicrobatchCounted, NeedSamples, ToTrainer, Unusable
from farflung.peer.pipeline.machines.effects import Accumulate, SumsEffect
from farflung.peer.pipeline.machines.summing_machine import SummingMachine
from farflung.peer.trainer.effects import SayWord, TrainerState, WaitBefore
from farflung.protocol.model_schema import ModelSchema


class BatchMachine(SummingMachine[Accumulate]):
    def __init__(self, micro: int) -> None:
        """`micro`: samples in a microbatch, as the manifest says."""
        super().__init__()
        self._micro = micro
        self._grants: Grants | None = None

    def attach(self, model: ModelSchema, pid: int, samples: int, data: bytes) -> list[SumsEffect]:
        """Say what the model is, how many samples the data set has and what its fingerprint is."""
        said = [
            SayWord(Attach(model=model, pid=pid)),
            SayWord(NeedSamples(samples=samples, want=0, data=data)),
        ]
        return [*said, WaitBefore(TrainerState.ATTACHING)]

    # ---- what is granted

    def _on_work(self, word: ToTrainer) -> None:
        """Grants of a version that is not loaded are none: a `Load` makes them void anyway."""
        if isinstance(word, Grants) and word.version == self.version:
            self._grants = word

    def _forget_work(self) -> None:
        self._grants = None

    def _next_due(self) -> Accumulate | None:
        micro = self._first_open()
        if micro is None or self._grants is None:
            return None
        grants, start = self._grants, self._grants.start + micro * self._micro
        return Accumulate(self.version, micro, grants.epoch, start, min(start + self._micro, grants.stop))

    def _first_open(self) -> int | None:
        done = self.sums.counted | self.sums.unusable
        ranges = self._grants.ranges if self._grants is not None else ()
        return next((m for first, stop in ranges for m in range(first, stop) if m not in done), None)

    # ---- what came of it

    def on_counted(self, tokens: int, loss: float | None) -> list[SumsEffect]:
        """Its gradient is in the sums."""
        done = self._take()
        self._count(done.micro, tokens, loss)
        return [SayWord(MicrobatchCounted(version=done.version, micro=done.micro, tokens=tokens, loss=loss))]

    def on_unusable(self, problem: str) -> list[SumsEffect]:
        """Its loss or its gradient is not finite, and the sums are as they were before it."""
        done = self._take()
        self.sums.unusable.add(done.micro)
        return [SayWord(Unusable(version=done.version, micro=done.micro, problem=problem))]
