"""What the parts of a virtual peer see of each other and of the simulated world: types, and nothing that acts.

Read by the simulator's peer, trainer and disk, so that none of them has to import another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from farflung.collectives.round.effects import Merge, SendFrame
from farflung.optim.outer import OuterStep
from farflung.optim.schedule import ScheduleRules
from farflung.peer.local.words import FromTrainer, ToTrainer
from farflung.peer.machine import effects as do
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.state.outer_state import OuterState
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import Fragment, ModelSchema

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
    machine: PeerMachine
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

    def carry_out(self, effects: list[do.Effect]) -> None: ...

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
    to_door: Callable[[str, do.ToDoor], None]
    to_coordinator: Callable[[str, do.ToCoordinator], None]
    to_peer: Callable[[str, SendFrame], None]
    survives: Callable[[str], bool]  # may return False: the party is killed here
    observe: Callable[[str, object], None]  # (what happened, details) for the invariants
    machine: type[PeerMachine]
    run_tag: bytes
    trainer: Callable[[Any, TrainerSurroundings, ScheduleRules], Any]  # of a Host; a Trainer
    forge: Callable[[str, dict[int, Payload]], dict[int, Payload]] = lambda peer, payloads: payloads
    forge_sum: Callable[[str, Merge, bytes], bytes] = lambda peer, effect, made: made
    pinned: bytes = b""  # the coordinator's key; empty: it has none
