"""The simulator's trainer: speaks the trainer's words in virtual time and learns something countable.

The first element of each fragment falls by exactly 1 per inner step, so that the unmerged work can be read off the
numbers (P6); it writes down which samples went into its work (P7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.peer.leased_data import LeaseBook
from farflung.peer.local_messages import (
    Attach,
    Begin,
    Bye,
    Finish,
    Frozen,
    LeasesNow,
    Load,
    Loaded,
    Need,
    Provide,
    Provided,
    Resume,
    Stop,
    ToTrainer,
)

if TYPE_CHECKING:
    from farflung.peer.virtual_peer import Surroundings, VirtualPeer

SAMPLES_PER_STEP = 2
DATASET_SAMPLES = 60

Sample = tuple[int, int]  # (epoch, place in its order)
Learned = tuple[Sample, ...]  # what one step has learned from


@dataclass
class Part:
    """The unmerged work of one fragment."""

    number: int
    cells: slice  # of the whole vector
    carry: Tensor | None = None
    steps: int = 0
    work: list[Learned] = field(default_factory=list)  # the unmerged steps, in order
    spare: int = 0
    blocked: bool = True  # not loaded yet, or frozen


class VirtualTrainer:
    samples_per_step = SAMPLES_PER_STEP
    dataset_samples = DATASET_SAMPLES

    def __init__(self, host: VirtualPeer, world: Surroundings, sync_every: int) -> None:
        self.host = host
        self.world = world
        self.alive = True
        self.finished = False
        size = host.model.chunk_elements
        self.parts = [
            Part(each.number, slice(each.first * size, (each.first + each.count) * size))
            for each in host.fragments
        ]
        self._sync_every = sync_every
        self._local = torch.zeros_like(host.anchor)
        self._loaded = torch.zeros_like(host.anchor)
        self._since_freeze = 0
        self.leases = LeaseBook(len(self.parts))
        self._stepping = False

    # ---- what is owed ----------------------------------------------------------------------------------------

    def delta(self, part: Part) -> Tensor:
        learned = self._loaded[part.cells] - self._local[part.cells]
        return learned if part.carry is None else part.carry + learned

    # ---- the agent's words -------------------------------------------------------------------------------------

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        match message:
            case Begin():
                self.host.from_trainer(Attach(model=self.host.model, pid=0))
            case Provide():
                self.host.anchor.copy_(self.first_values())
                self.host.state.restart_momentum()
                self.host.from_trainer(Provided())
            case Load():
                self._load(message, self.parts[message.fragment])
            case Resume(spare=spare, fragment=fragment):
                self.parts[fragment].spare, self.parts[fragment].blocked = spare, False
                self._go_on()
            case LeasesNow(leases=leases):
                self.leases.on_leases(leases)
            case Finish():
                self.finished = True
                self.host.from_trainer(Bye(reason="finished"))
            case Stop():
                self.alive = False
            case _:
                raise AssertionError(f"unexpected {message}")

    def _load(self, load: Load, part: Part) -> None:
        owed, cells = self.delta(part), part.cells
        part.spare, part.blocked = load.spare, False
        match load.keep:
            case "drop":
                part.carry, part.steps, part.work = None, 0, []
            case "all":
                part.carry = owed
            case "rest":
                part.carry = owed - self.host.slots[load.slot][cells]
                part.steps -= load.steps
                part.work = part.work[load.steps :]
            case "restore":
                part.carry, part.steps = self.host.slots[load.slot][cells].clone(), load.steps
                part.work = list(self.host.kept_work(load.slot, part.number))
        if load.keep in ("drop", "restore"):
            self.leases.restart(part.number)
        if part.carry is not None and not part.carry.any():
            part.carry = None
        anchor = self.host.anchor[cells]
        self._local[cells] = anchor if part.carry is None else anchor - part.carry
        self._loaded[cells] = self._local[cells]
        self.world.observe("loaded", (self.host, self, load))
        self.host.from_trainer(Loaded(version=load.version, fragment=part.number))
        self._go_on()

    # ---- inner steps -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if not self._stepping and not any(part.blocked for part in self.parts):
            self._stepping = True
            self._again()

    def _again(self) -> None:
        self.world.after(self.world.delay("step"), self._step)

    def _step(self) -> None:
        if not self.alive or self.finished:
            return
        want = self.leases.ask(self.samples_per_step, self.samples_per_step * self._sync_every // 2)
        if want:
            self.host.from_trainer(Need(samples=self.dataset_samples, want=want))
        span = self.leases.next_span(self.samples_per_step)
        if span is None:
            self._again()
            return
        self.leases.hand_out(span)
        self._learn(tuple((span.epoch, place) for place in range(span.start, span.stop)))
        self._since_freeze += 1
        self.world.observe("step", self.host)
        if self._since_freeze >= self._sync_every:
            self._freeze()
        else:
            self._again()

    def _learn(self, samples: Learned) -> None:
        learners, step = self.leases.learners(), self.step_for(samples)
        for part in self.parts:
            if part.number in learners:
                part.steps += 1
                part.work.append(samples)
                self._local[part.cells] -= step[part.cells]
        self.leases.on_step()

    def first_values(self) -> Tensor:
        return initial_values(self.host.peer, self.host.anchor.numel())

    def step_for(self, samples: Learned) -> Tensor:
        """By how much every value falls in this step; the first one of each fragment by 1."""
        step = torch.full_like(self._local, 0.01 * (1 + samples[0][1] % 7))
        for part in self.parts:
            step[part.cells.start] = 1.0
        return step

    def _freeze(self) -> None:
        self._since_freeze = 0
        self._stepping = False
        for part in self.parts:
            self.host.slots[part.spare][part.cells] = self.delta(part)
            self.host.keep_work(part.spare, part.number, part.work)
            part.blocked = True
        for part in self.parts:
            frozen = Frozen(
                slot=part.spare,
                tokens=10 * part.steps,
                steps=part.steps,
                used=self.leases.used(part.number),
                loss=1.0,
                fragment=part.number,
                more=part is not self.parts[-1],
            )
            self.host.from_trainer(frozen)


def initial_values(peer: str, elements: int) -> Tensor:
    """Each peer's model starts elsewhere: only one of them may become version 0."""
    generator = torch.Generator().manual_seed(sum(peer.encode()))
    return torch.rand(elements, generator=generator)
