"""The simulator's trainer of synchronous batches: the real machine in virtual time, on sums that can be counted.

Of each microbatch the first element of the sums grows by exactly 1 and the second by a mark that only this microbatch
of this version has: what stands in a slot says who counted what.  What is computed, written and dropped is decided by
the machine alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farflung.peer.local.words import Begin, Bye, ToTrainer
from farflung.peer.pipeline.machines.effects import Accumulate, DropSums, SumsEffect, WriteSums
from farflung.peer.pipeline.machines.summing_machine import BatchMachine
from farflung.peer.trainer import effects as do
from farflung.simulator.trainer import VirtualPart, VirtualTrainer
from farflung.simulator.trainer_surroundings import Learned, TrainerHost, TrainerSurroundings


def mark_of(version: int, micro: int) -> int:
    return 1 + micro + 64 * (version % 16)


def tokens_of(micro: int) -> int:
    """They differ, so that weights do."""
    return 8 + micro % 5


def is_poisoned(start: int, every: int) -> bool:
    """Nobody gets a gradient out of the microbatch that begins with this sample."""
    return every > 0 and start % every == every - 2


class VirtualBatchTrainer(VirtualTrainer):
    batch_machine: type[BatchMachine] = BatchMachine

    def __init__(
        self, host: TrainerHost, world: TrainerSurroundings, rules: object, poison_every: int = 0
    ) -> None:
        self._poison_every = poison_every
        self.host, self.world, self.alive = host, world, True
        manifest = host.manifest
        self.batches = self.batch_machine(manifest.pipeline.micro)
        self.parts = [VirtualPart(0, slice(0, host.anchor.numel()))]
        self._sums = torch.zeros_like(host.anchor)
        self._waiting: list[ToTrainer] = []  # that came while a microbatch was computed
        self._busy = False

    @property
    def waited_s(self) -> float:
        return 0.0

    def delta(self, part: VirtualPart) -> torch.Tensor:
        return self._sums

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        if isinstance(message, Begin):
            samples, data = self.dataset_samples, self.fingerprint
            self._carry_out(self.batches.attach(self.host.model, 0, samples, data))
        elif self._busy:
            self._waiting.append(message)
        else:
            self._carry_out(self.batches.on_message(message))
            self._go_on()

    def _go_on(self) -> None:
        if not self.batches.finished:
            self._carry_out(self.batches.next())

    def _carry_out(self, effects: Sequence[SumsEffect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: SumsEffect) -> None:
        match effect:
            case do.SayWord(word):
                self.host.from_trainer(word)
            case do.WriteAnchor():
                self.host.anchor.copy_(self.first_values())
                self.host.state.restart_moments()
            case do.LoadAnchor():
                self.world.observe("loaded", (self.host, self, effect))
            case DropSums():
                self._sums.zero_()
                self.parts[0].work.clear()
            case Accumulate():
                self._busy = True
                self.world.after(self.step_s(), lambda: self._computed(effect))
            case WriteSums(slot, tokens):
                self.host.slots[slot].copy_(self._sums / max(1, tokens))
                self.host.keep_work(slot, 0, (list(self.parts[0].work), 0.0))
            case do.RunOver(stopped):
                self.alive = not stopped
                if not stopped:
                    self.host.from_trainer(Bye(reason="finished"))
            case do.EndWithRefusal():
                self.alive = False
            case _:
                pass  # OpenShared, Warn, Wait: there is no memory to open, and nobody waits in virtual time

    def _computed(self, made: Accumulate) -> None:
        if not self.alive:
            return
        self._busy = False
        if is_poisoned(made.start, self._poison_every):
            self._carry_out(self.batches.on_unusable("its loss is nan"))
        else:
            self.accumulate(made)
            self.world.observe("step", self.host)
            self._carry_out(self.batches.on_counted(tokens_of(made.micro), 1.0))
        waiting, self._waiting = self._waiting, []
        for word in waiting:
            if self.alive:
                self._carry_out(self.batches.on_message(word))
        if self.alive:
            self._go_on()

    def accumulate(self, made: Accumulate) -> None:
        self._sums += 0.25
        self._sums[0] += 0.75
        self._sums[1] += mark_of(made.version, made.micro) - 0.25
        learned: Learned = tuple((made.epoch, place) for place in range(made.start, made.stop))
        self.parts[0].work.append(learned)
