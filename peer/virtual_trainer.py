"""The simulator's trainer: speaks the trainer's words in virtual time and learns something countable.

Element 0 of its vector falls by exactly 1 per inner step, so that the unmerged work can be read off the
numbers (P6); it writes down which samples went into its work (P7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.collectives.plan import Used
from farflung.coordinator.messages import Lease
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


class VirtualTrainer:
    def __init__(self, host: VirtualPeer, world: Surroundings, sync_every: int) -> None:
        self.host = host
        self.world = world
        self.alive = True
        self.finished = False
        self._sync_every = sync_every
        self._local = torch.zeros_like(host.anchor)
        self._loaded = torch.zeros_like(host.anchor)
        self._carry: Tensor | None = None
        self._steps = self._since_freeze = 0
        self.work: list[tuple[int, int]] = []  # (epoch, sample) in the unmerged work, in order
        self._spare = 0
        self._leases: dict[int, Lease] = {}
        self._at: dict[int, int] = {}
        self._stepping = False
        self._asked = False

    # ---- what is owed ----------------------------------------------------------------------------------------

    def delta(self) -> Tensor:
        learned = self._loaded - self._local
        return learned if self._carry is None else self._carry + learned

    @property
    def steps(self) -> int:
        return self._steps

    # ---- the agent's words -------------------------------------------------------------------------------------

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        match message:
            case Begin():
                self.host.from_trainer(Attach(model=self.host.model, pid=0))
            case Provide():
                self.host.anchor.copy_(initial_values(self.host.peer, self.host.anchor.numel()))
                self.host.state.restart_momentum()
                self.host.from_trainer(Provided())
            case Load():
                self._load(message)
            case Resume(spare=spare):
                self._spare = spare
                self._go_on()
            case LeasesNow(leases=leases):
                self._on_leases(leases)
            case Finish():
                self.finished = True
                self.host.from_trainer(Bye(reason="finished"))
            case Stop():
                self.alive = False
            case _:
                raise AssertionError(f"unexpected {message}")

    def _load(self, load: Load) -> None:
        owed, self._spare = self.delta(), load.spare
        match load.keep:
            case "drop":
                self._carry, self._steps, self.work = None, 0, []
                self._at = {i: lease.upto for i, lease in self._leases.items()}
            case "all":
                self._carry = owed
            case "rest":
                self._carry = owed - self.host.slots[load.slot]
                self._steps -= load.steps
                self.work = self.work[load.steps * SAMPLES_PER_STEP :]
            case "restore":
                self._carry, self._steps = self.host.slots[load.slot].clone(), load.steps
                self.work = list(self.host.kept_work(load.slot))
                self._at = {i: lease.upto for i, lease in self._leases.items()}
        if self._carry is not None and not self._carry.any():
            self._carry = None
        self._local = self.host.anchor.clone() if self._carry is None else self.host.anchor - self._carry
        self._loaded = self._local.clone()
        self.world.observe("loaded", (self.host, self, load))
        self.host.from_trainer(Loaded(version=load.version))
        self._go_on()

    def _on_leases(self, leases: tuple[Lease, ...]) -> None:
        self._leases = {lease.lease: lease for lease in leases}
        self._at = {i: max(lease.upto, self._at.get(i, 0)) for i, lease in self._leases.items()}
        self._asked = False

    # ---- inner steps -------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._again()

    def _again(self) -> None:
        self.world.after(self.world.delay("step"), self._step)

    def _step(self) -> None:
        if not self.alive or self.finished:
            return
        samples = self._take(SAMPLES_PER_STEP)
        if len(samples) < SAMPLES_PER_STEP:
            if not self._asked:
                self._asked = True
                self.host.from_trainer(
                    Need(samples=DATASET_SAMPLES, want=SAMPLES_PER_STEP * self._sync_every)
                )
            self._again()
            return
        self.work += samples
        step = torch.full_like(self._local, 0.01 * (1 + samples[0][1] % 7))
        step[0] = 1.0
        self._local -= step
        self._steps += 1
        self._since_freeze += 1
        self.world.observe("step", self.host)
        if self._since_freeze >= self._sync_every:
            self._freeze()
        else:
            self._again()

    def _take(self, count: int) -> list[tuple[int, int]]:
        """The next samples of my leases, in order; all or none."""
        room = sum(lease.stop - self._at[i] for i, lease in self._leases.items())
        if room < count:
            return []
        taken: list[tuple[int, int]] = []
        for i, lease in sorted(self._leases.items()):
            while self._at[i] < lease.stop and len(taken) < count:
                taken.append((lease.epoch, self._at[i]))
                self._at[i] += 1
        return taken

    def _freeze(self) -> None:
        self._since_freeze = 0
        self._stepping = False
        slot = self._spare
        self.host.slots[slot].copy_(self.delta())
        self.host.keep_work(slot, self.work)
        # Every lease that was begun, also one whose samples came with a restored slot: naming it again is harmless.
        used = tuple(Used(i, at) for i, at in sorted(self._at.items()) if at > self._leases[i].start)
        tokens = 10 * self._steps
        self.host.from_trainer(Frozen(slot=slot, tokens=tokens, steps=self._steps, used=used, loss=1.0))


def initial_values(peer: str, elements: int) -> Tensor:
    """Each peer's model starts elsewhere: only one of them may become version 0."""
    generator = torch.Generator().manual_seed(sum(peer.encode()))
    return torch.rand(elements, generator=generator)
