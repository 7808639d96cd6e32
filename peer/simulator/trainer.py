"""The simulator's trainer: speaks the trainer's words in virtual time and learns something countable.

The first element of each fragment falls by exactly 1 per inner step, so that the unmerged work can be read off the
numbers (P6); it writes down which samples went into its work (P7).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.optim.ahead import ahead
from farflung.optim.schedule import Rules, Schedule
from farflung.peer.local.words import (
    Attach,
    Begin,
    Bye,
    Finish,
    Frozen,
    LeasesNow,
    Load,
    Loaded,
    Need,
    Opened,
    Provide,
    Provided,
    Resume,
    Stop,
    ToTrainer,
)
from farflung.peer.simulator.surroundings import Host, Learned, Surroundings
from farflung.peer.trainer.leased_data import LeaseBook
from farflung.protocol.fragments import BOOKS_FRAGMENT


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
    loaded: bool = False
    mixed: float = 0.0  # what its delta holds of the first element besides steps: see `Rules.mix`


class VirtualTrainer:
    """Examples let it learn for real: they replace `learn`, `first_values` and the numbers."""

    samples_per_step = 2
    dataset_samples = 60

    def __init__(self, host: Host, world: Surroundings, rules: Rules) -> None:
        self.host = host
        self.world = world
        self.alive = True
        self.finished = False
        size = host.model.chunk_elements
        self.parts = [
            Part(each.number, slice(each.first * size, (each.first + each.count) * size))
            for each in host.fragments
        ]
        self._parameters = host.model.first_plain_chunk * size  # the values after them are buffers
        self._schedule = Schedule(rules, world.now())
        self._held: dict[int, Load] = {}
        self._local = torch.zeros_like(host.anchor)
        self._loaded = torch.zeros_like(host.anchor)
        self._due: list[int] = []  # to be frozen as soon as the agent has said how to go on
        self.leases = LeaseBook(len(self.parts))
        self._stepping = False
        self._stopped_at = world.now()
        self.waited_s = 0.0

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
                self._on_load(message)
            case Opened(fragment=fragment, hold=hold):
                self.parts[fragment].blocked |= hold
                self._schedule.on_opened(fragment, self.world.now())
            case Resume(spare=spare, fragment=fragment):
                self.parts[fragment].spare, self.parts[fragment].blocked = spare, False
                self._go_on()
            case LeasesNow(leases=leases, unsure=unsure):
                self.leases.on_leases(leases, unsure)
            case Finish():
                self.finished = True
                self.host.from_trainer(Bye(reason="finished"))
            case Stop():
                self.alive = False
            case _:
                raise AssertionError(f"unexpected {message}")

    def _on_load(self, load: Load) -> None:
        self._load_held([load.fragment])
        early = load.keep in ("all", "rest") and not self._schedule.may_take(load.fragment)
        if early and self._stepping:
            self._held[load.fragment] = load
        else:
            self._load(load)

    def _load_held(self, fragments: list[int]) -> None:
        for load in [self._held.pop(f) for f in fragments if f in self._held]:
            self._load(load)

    def _load(self, load: Load) -> None:
        part = self.parts[load.fragment]
        owed, cells = self.delta(part), part.cells
        part.spare, part.blocked, part.loaded = load.spare, False, True
        match load.keep:
            case "drop":
                part.carry, part.steps, part.work, part.mixed = None, 0, [], 0.0
            case "all":
                part.carry = owed
            case "rest":
                part.carry = owed - self.host.slots[load.slot][cells]
                part.steps -= load.steps
                part.work, part.mixed = part.work[load.steps :], 0.0
            case "restore":
                part.carry, part.steps = self.host.slots[load.slot][cells].clone(), load.steps
                work, part.mixed = self.host.kept_work(load.slot, part.number)
                part.work = list(work)
        if load.keep in ("drop", "restore"):
            self.leases.restart(part.number)
            if part.number == BOOKS_FRAGMENT:
                self._schedule.restart(self.world.now())
        anchor = self.host.anchor[cells]
        values = anchor if part.carry is None else anchor - part.carry
        if load.keep == "rest" and self._schedule.rules.mix:
            values = torch.lerp(values, self._local[cells], self._schedule.rules.mix)
            part.mixed = float((anchor - values - part.carry)[0])  # type: ignore[operator]
            part.carry = anchor - values
        if part.carry is not None and not part.carry.any():
            part.carry = None
        self._local[cells] = values
        self._loaded[cells] = self._local[cells]
        self.world.observe("loaded", (self.host, self, load))
        self.host.from_trainer(Loaded(version=load.version, fragment=part.number))
        self._go_on()

    # ---- inner steps -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._stepping or any(part.blocked for part in self._awaited):
            return
        due, self._due = [number for number in self._due if self.parts[number].steps], []
        if due:
            self._freeze(due)
        if not any(part.blocked for part in self._awaited):
            self._stepping = True
            self.waited_s += self.world.now() - self._stopped_at
            self._schedule.on_waited(self.world.now())
            self._again()

    @property
    def _awaited(self) -> list[Part]:
        """Those that must not be blocked for training to go on."""
        everything = self._schedule.rules.waits or not all(part.loaded for part in self.parts)
        return self.parts if everything else [self.parts[number] for number in self._due]

    def _again(self) -> None:
        self.world.after(self.step_s(), self._step)

    def _step(self) -> None:
        if not self.alive or self.finished:
            return
        per_period = self.samples_per_step * self._schedule.rules.period_steps
        want = self.leases.ask(self.samples_per_step, per_period // 2)
        if want:
            self.host.from_trainer(Need(samples=self.dataset_samples, want=want))
        span = self.leases.next_span(self.samples_per_step)
        if span is None:
            self._load_held(list(self._held))
            self._again()
            return
        self.leases.hand_out(span)
        self._learn(tuple((span.epoch, place) for place in range(span.start, span.stop)))
        now = self.world.now()
        self._schedule.count_step(now)
        self.world.observe("step", self.host)
        self._load_held([f for f in self._held if self._schedule.may_take(f)])
        due = self._schedule.take_due(now)
        self._load_held(due)
        self._due, self._stepping, self._stopped_at = due, False, now
        self._go_on()

    def step_s(self) -> float:
        return self.world.delay("step")

    def _learn(self, samples: Learned) -> None:
        learners, before = self.leases.learners(), self._local.clone()
        self.learn(samples)
        for part in self.parts:
            if part.number in learners:
                part.steps += 1
                part.work.append(samples)
            else:
                self._local[part.cells] = before[part.cells]
        self.leases.on_step()

    def learn(self, samples: Learned) -> None:
        """One inner step: changes `_local` in place, the first value of each fragment by 1."""
        step = torch.full_like(self._local, 0.01 * (1 + samples[0][1] % 7))
        for part in self.parts:
            step[part.cells.start] = 1.0
        self._local -= step

    def first_values(self) -> Tensor:
        return initial_values(self.host.peer, self.host.anchor.numel())

    def _freeze(self, due: list[int]) -> None:
        for part in [self.parts[number] for number in due]:
            self.host.slots[part.spare][part.cells] = self.delta(part)
            self.host.keep_work(part.spare, part.number, (list(part.work), part.mixed))
            part.blocked = True
            if self._schedule.rules.goes_ahead:
                self._train_on(part)
        for part in [self.parts[number] for number in due]:
            frozen = Frozen(
                slot=part.spare,
                tokens=10 * part.steps,
                steps=part.steps,
                used=self.leases.used(part.number),
                loss=1.0,
                fragment=part.number,
                more=part.number != due[-1],
            )
            self.host.from_trainer(frozen)

    def _train_on(self, part: Part) -> None:
        """See `Unmerged.train_on`."""
        host, cells = self.host, part.cells
        part.carry = host.slots[part.spare][cells].clone()
        place = (host.anchor[cells], host.momentum[cells], part.carry)
        learned = max(0, self._parameters - cells.start)
        self._local[cells] = self._loaded[cells] = ahead(host.outer, *place, learned)


def initial_values(peer: str, elements: int) -> Tensor:
    """Each peer's model starts elsewhere: only one of them may become version 0."""
    generator = torch.Generator().manual_seed(sum(peer.encode()))
    return torch.rand(elements, generator=generator)
