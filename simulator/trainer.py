"""The simulator's trainer: the real trainer's machine in virtual time, on a model that learns something countable.

The first element of each fragment falls by exactly 1 per inner step, so that the unmerged work can be read off the
numbers (P6); it writes down which samples went into its work (P7).  What is frozen, loaded, kept, put back and read
is decided by the machine alone.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from farflung.collectives.round.effects import Merge, SendFrame
from farflung.optim.outer import OuterStep
from farflung.optim.recipes import ahead, momentum_rate
from farflung.optim.schedule import ScheduleRules
from farflung.peer.data.leased_data import Span
from farflung.peer.local.words import Begin, Bye, FromTrainer, Score, Scored, ToTrainer
from farflung.peer.machine import effects as peer_effects
from farflung.peer.machine.machine import MemberMachine, PeerMachine
from farflung.peer.state.outer_state import OuterState
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.machine import TrainerMachine
from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes
from farflung.protocol.errors import ScoreCause
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import Fragment, ModelSchema

# ---- trainer surroundings ----------------------------------------------------------------------------------
# What the parts of a virtual peer see of each other and of the simulated world: types, and nothing that acts.
#
# Read by the simulator's peer, trainer and disk, so that none of them has to import another.

Sample = tuple[int, int]  # (epoch, place in its order)
Learned = tuple[Sample, ...]  # what one step has learned from
RUN_ID = bytes(range(16))
LOCAL_DELAYS_S = {
    "compute": (0.001, 0.05),
    "local": (0.0, 0.01),
    "step": (0.1, 0.25),
    "unit": (0.02, 0.08),  # a forward pass of a microbatch through a stage
    "store": (0.05, 2.0),
}
KeptWork = tuple[list[Learned], float]  # the steps behind a slot, and what mixing added


class TrainerHost(Protocol):
    """The virtual peer, as its trainer and its disk see it."""

    manifest: Manifest
    model: ModelSchema
    fragments: tuple[Fragment, ...]
    held: tuple[Fragment, ...]  # of these
    anchor: Tensor
    moments: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    outer: OuterStep
    state: OuterState
    member: MemberMachine
    world: TrainerSurroundings
    alive: bool
    offers: tuple[int, ...]  # stages that it could hold
    pace: float  # so many times as long a microbatch takes it as others
    belt: dict[int, bytes]  # slots through which crossings pass to its trainer, and back

    @property
    def peer(self) -> str: ...

    def from_trainer(self, message: FromTrainer) -> None: ...

    def keep_work(self, slot: int, fragment: int, work: KeptWork) -> None: ...

    def kept_work(self, slot: int, fragment: int) -> KeptWork: ...

    def keep_paths(self, slot: int, paths: dict[int, Any]) -> None: ...

    def carry_out(self, effects: list[peer_effects.Effect]) -> None: ...

    def calculate(self, job: Callable[[], object]) -> None: ...


class Trainer(Protocol):
    """The virtual trainer, as its peer sees it."""

    alive: bool

    @property
    def waited_s(self) -> float: ...

    def on_message(self, message: ToTrainer) -> None: ...


@dataclass
class TrainerSurroundings:
    """What a virtual peer needs of the simulated world."""

    now: Callable[[], float]
    after: Callable[[float, Callable[[], object]], None]  # virtual time
    delay: Callable[[str], float]  # of a local thing: "compute", "local", "step", "store"
    to_door: Callable[[str, peer_effects.ToDoor], None]
    to_coordinator: Callable[[str, peer_effects.ToCoordinator], None]
    to_peer: Callable[[str, SendFrame], None]
    survives: Callable[[str], bool]  # may return False: the party is killed here
    observe: Callable[[str, object], None]  # (what happened, details) for the invariants
    machine: type[PeerMachine]
    run_tag: bytes
    trainer: Callable[[Any, TrainerSurroundings, ScheduleRules], Any]  # of a Host; a Trainer
    forge: Callable[[str, dict[int, Payload]], dict[int, Payload]] = lambda peer, payloads: payloads
    forge_sum: Callable[[str, Merge, bytes], bytes] = lambda peer, effect, made: made
    pinned: bytes = b""  # the coordinator's key; empty: it has none


# ---- trainer -----------------------------------------------------------------------------------------------


@dataclass
class VirtualPart:
    """The unmerged work of one fragment: its values, and the truth behind them."""

    number: int
    cells: slice  # of the whole vector
    carry: Tensor | None = None
    work: list[Learned] = field(default_factory=list)  # the unmerged steps, in order
    mixed: float = 0.0  # what its delta holds of the first element besides steps: see `ScheduleRules.mix`


class VirtualTrainer:
    """Examples let it learn for real: they replace `learn`, `first_values` and the numbers."""

    samples_per_step = 2
    tokens_per_step = 10
    dataset_samples = 60
    fingerprint = b"of the simulated"
    machine_class: type[TrainerMachine] = TrainerMachine
    joins_leases = False  # a batch goes on in the next lease where one ends

    def __init__(
        self,
        host: TrainerHost,
        world: TrainerSurroundings,
        rules: ScheduleRules,
        reads_ahead: int = 0,
        looks_every: int = 1,
    ) -> None:
        """`reads_ahead`: so many batches its loader holds back when it gives one out.

        `looks_every`: so many steps it takes, at most, before it hears words, the time and the tokens of its steps, as
        ranks do that look at their agent together (peer/island/parts.py).
        """
        self.host = host
        self.world = world
        self.alive = True
        lease_samples = self.samples_per_step * rules.period_steps // 2
        self.machine = self.machine_class(rules, lease_samples, world.now())
        size = host.model.chunk_elements
        self.parts = [
            VirtualPart(each.number, slice(each.first * size, (each.first + each.count) * size))
            for each in host.fragments
        ]
        self._ahead = reads_ahead
        self.machine.read_ahead(reads_ahead)
        self._unheard: deque[ToTrainer] = deque()
        self._looks_every, self._steps_to_look, self._uncounted = looks_every, 1, 0
        self._now = world.now()  # at the last look
        self._batches: list[tuple[Span, ...]] = []  # handed out, not yet learned from
        self._parameters = host.model.first_plain_chunk * size  # the values after them are buffers
        self._local = torch.zeros_like(host.anchor)
        self._loaded = torch.zeros_like(host.anchor)
        self._before = self._local

    @property
    def waited_s(self) -> float:
        return self.machine.waited_s

    @property
    def holds_the_anchor(self) -> bool:
        """Bit for bit: nothing of its own is in the model."""
        return torch.equal(self._local, self.host.anchor)

    def delta(self, part: VirtualPart) -> Tensor:
        """All that is owed."""
        learned = self._loaded[part.cells] - self._local[part.cells]
        return learned if part.carry is None else part.carry + learned

    # ---- inner steps

    def on_message(self, message: ToTrainer) -> None:
        if not self.alive:
            return
        if isinstance(message, Begin):  # what the real one waits for before there is a model
            self._carry_out(self.machine.attach(self.host.model, pid=0))
        else:
            self._unheard.append(message)
            if self._looks_every == 1 or self.machine.stand is not do.TrainerState.STEPPING:
                self._look()
                self._hear_all()

    def _look(self) -> None:
        self._now = self.world.now()
        self.machine.count_tokens([self.tokens_per_step] * self._uncounted)
        self._uncounted = 0

    def _hear_all(self) -> None:
        while self._unheard:
            self._carry_out(self.machine.on_message(self._unheard.popleft(), self._now))

    def _again(self) -> None:
        self.world.after(self.step_s(), self._step)

    def _step(self) -> None:
        if not self.alive or self.machine.finished:
            return
        while len(self._batches) <= self._ahead:
            out = len(self._batches)
            self._carry_out(
                self.machine.on_want(self.dataset_samples, self.samples_per_step, self._now, self.fingerprint)
            )
            if len(self._batches) == out:
                if self.machine.stand is do.TrainerState.WITHOUT_DATA:
                    self._look()
                    self._hear_all()
                    self._again()  # where the real one waits, this one looks again after the time of a step
                return
        self._learn(self._batches.pop(0))

    def step_s(self) -> float:
        return self.world.delay("step")

    def _take(self, spans: tuple[Span, ...]) -> None:
        """The samples of a batch are here."""
        self.machine.hand_out(spans, tokens=0)
        self._batches.append(spans)

    def _learn(self, spans: tuple[Span, ...]) -> None:
        self._carry_out(self.machine.before_step())
        samples = tuple((span.epoch, place) for span in spans for place in range(span.start, span.stop))
        self.learn(samples)
        for part in self.parts:
            part.work.append(samples)
        self._steps_to_look -= 1
        outlook = self.machine.outlook(self._now)
        looks = outlook.is_due or self._steps_to_look <= 0
        self._now = self.world.now() if looks else self._now
        self._carry_out(self.machine.on_step(self._now, ()))
        self._uncounted += 1
        self.world.observe("step", self.host)
        if looks:
            self._steps_to_look = self._looks_every  # also where `outlook` allows fewer: later is harder
            self._look()
            self._hear_all()
        self._carry_out(self.machine.on_heard(self._now))

    def learn(self, samples: Learned) -> None:
        """One inner step: changes `_local` in place, the first value of each fragment by 1."""
        step = torch.full_like(self._local, 0.01 * (1 + samples[0][1] % 7))
        for part in self.parts:
            step[part.cells.start] = 1.0
        self._local -= step

    def first_values(self) -> Tensor:
        return initial_values(self.host.peer, self.host.anchor.numel())

    # ---- effects

    def _carry_out(self, effects: Sequence[do.Effect]) -> None:
        for effect in effects:
            self._do(effect)

    def _do(self, effect: do.Effect) -> None:
        match effect:
            case do.SayWord(word):
                self.host.from_trainer(word)
            case do.SayFrozen(words):
                for frozen in words:
                    self.host.from_trainer(replace(frozen, loss=1.0))
            case do.WriteAnchor():
                self.host.anchor.copy_(self.first_values())
                self.host.state.restart_moments()
            case do.LoadAnchor():
                self._load(effect)
                self.world.observe("loaded", (self.host, self, effect))
            case do.Freeze():
                self._freeze(effect)
            case do.GoAhead(fragment, slot):
                self._train_on(self.parts[fragment], slot)
            case do.CopyFragments(fragments):
                # What is not to be remembered is no number: whoever puts it back is found out.
                self._before = torch.full_like(self._local, math.nan)
                for part in [self.parts[number] for number in fragments]:
                    self._before[part.cells] = self._local[part.cells]
            case do.PutBack(fragments):
                for part in [self.parts[number] for number in fragments]:
                    self._local[part.cells] = self._before[part.cells]
                    part.work.pop()
            case do.ReadSamples(span, more):
                self._take((span, *more) if self.joins_leases else (span,))
            case do.GoOn():
                self._again()
            case do.RunOver(stopped):
                self.alive = not stopped
                if not stopped:
                    self.world.observe("over", (self.host, self))
                    self.host.from_trainer(Bye(reason="finished"))
            case do.EndWithRefusal():
                self.alive = False
            case do.ComputeScore(word):
                scored = self._scored(word)
                self.world.after(self.world.delay("step"), lambda: self._say_if_alive(scored))
            case do.OpenShared() | do.ForgetLoss() | do.Warn() | do.WaitBefore():
                pass

    def _load(self, load: do.LoadAnchor) -> None:
        part = self.parts[load.fragment]
        owed, slot, anchor = (
            self.delta(part),
            self.host.slots[load.slot][part.cells],
            self.host.anchor[part.cells],
        )
        match load.keep:
            case "drop":
                part.carry, part.work, part.mixed = None, [], 0.0
            case "all":
                part.carry = owed
            case "rest":
                part.carry, part.work, part.mixed = owed - slot, part.work[load.used_steps :], 0.0
            case "restore":
                work, part.mixed = self.host.kept_work(load.slot, part.number)
                part.carry, part.work = slot.clone(), list(work)
        values = anchor if part.carry is None else anchor - part.carry
        if load.mix and part.carry is not None:
            values = torch.lerp(values, self._local[part.cells], load.mix)
            part.mixed = float((anchor - values - part.carry)[0])
            part.carry = anchor - values
        if part.carry is not None and not part.carry.any():
            part.carry = None
        self._local[part.cells] = self._loaded[part.cells] = values

    def _say_if_alive(self, word: Scored) -> None:
        if self.alive:
            self.host.from_trainer(word)

    def _scored(self, word: Score) -> Scored:
        if self.host.state.is_torn:
            return Scored(number=word.number, why_not=ScoreCause.PASSED)
        nats = [virtual_loss(self.host.anchor, window) for window in bits(mask_from_bytes(word.windows))]
        text = virtual_text(self.host.anchor) if word.text else ()
        losses = struct.pack(f"<{len(nats)}f", *nats)
        return Scored(number=word.number, nats=losses, data=self.fingerprint, text=text)

    def _freeze(self, freeze: do.Freeze) -> None:
        part = self.parts[freeze.fragment]
        self.host.slots[freeze.slot][part.cells] = self.delta(part)
        self.host.keep_work(freeze.slot, part.number, (list(part.work), part.mixed))

    def _train_on(self, part: VirtualPart, slot: int) -> None:
        part.carry = self.host.slots[slot][part.cells].clone()
        place = (self.host.anchor[part.cells], self.host.moments[0][part.cells], part.carry)
        learned = max(0, self._parameters - part.cells.start)
        rate = momentum_rate(self.host.outer, self.machine.accounts[part.number].version + 1)
        self._local[part.cells] = self._loaded[part.cells] = ahead(rate, *place, learned)


def virtual_loss(anchor: Tensor, window: int) -> float:
    """Of these values alone: others have another loss."""
    return 2.0 + math.sin(float(anchor.double().sum()) * 1e3) + 0.1 * window


def virtual_text(anchor: Tensor) -> tuple[int, ...]:
    """As `virtual_loss`."""
    return (1, 2, *hash_bytes(anchor.numpy().tobytes()))


def initial_values(peer: str, elements: int) -> Tensor:
    """Each peer's model starts elsewhere: only one of them may become version 0."""
    generator = torch.Generator().manual_seed(sum(peer.encode()))
    return torch.rand(elements, generator=generator)
