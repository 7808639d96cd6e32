"""Trainers of benchmarks/stages.py: each holds a stage of a model that is none, and its work takes a given time.

Many live in one process (crowd.py).  Each has a real agent, speaks the words that a script's trainer speaks, and lets
the real machine of a trainer (peer/pipeline/machines/stage_machine.py) decide; only what a work computes is left out.
A work is as one on a GPU: it begins when it is handed over, or when the one before it ends if it lay ready by then.

The sums say who counted what.  Value m of a seat's slot is 1 over its tokens if it counted microbatch m, else 0.  So
in the merged result of a round, which is the mean by tokens, value m times the tokens of the batch is how many times
microbatch m was counted in this stage; `AdamW`'s first moment shows that result.  Must not know how figures are shown.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from farflung.collectives.pipeline.crossing import Border, border_after, pack
from farflung.compression.codec import codec_named, payload_bytes
from farflung.peer.crossings.shared_slots import MADE, PLACES, SharedSlots, slot_of
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import FINISHED, Anew, Begin, Frozen, MicrobatchWork, NeedSamples, Shared
from farflung.peer.pipeline.machines.stage_machine import StageMachine
from farflung.peer.pipeline.machines.summing_machine import DropSums, StageWork, SumsEffect, WriteSums
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import Refused
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec
from farflung.protocol.outer_numbers import AdamWNumbers

CHUNKS = 4  # of a stage
# Of the time for a microbatch: the way back runs forward again, and costs twice a way there besides.
FORWARD_PART = 0.25
SLOW_TIMES = 4.0
WHOLE_PATIENCE_S = 5.0

Floats = npt.NDArray[np.float32]


def model_of(manifest: Manifest, crossing_kb: int) -> ModelSchema:
    """Each stage has as many values as there are microbatches, at least; what crosses a border is fp32."""
    stages, elements = manifest.pipeline.stages, manifest.round.chunk_kb * 256
    gives = (BorderTensor("float32", (crossing_kb * 256,)),)
    return ModelSchema(
        tuple(
            TensorSpec(f"stage {number}", (CHUNKS * elements,), "float32", "param")
            for number in range(stages)
        ),
        elements,
        CHUNKS * stages,
        CHUNKS * stages,
        hash_bytes(b""),
        tuple(
            StageSpec(number, number, CHUNKS, 0, gives if number < stages - 1 else ())
            for number in range(stages)
        ),
    )


def border_of(model: ModelSchema, manifest: Manifest) -> Border:
    """All borders are alike."""
    return border_after(0, model, manifest.pipeline, payload_bytes)


@dataclass
class Works:
    """What all trainers that ever held a stage have done there for one version."""

    made: int = 0  # microbatches that went into somebody's sums
    busy_s: float = 0.0
    last_at: float = 0.0  # when one went in last
    counted_once: bool | None = None  # as the merged result says; None: nobody could tell


@dataclass(frozen=True)
class Shape:
    """What all trainers of a run have in common."""

    manifest: Manifest
    model: ModelSchema
    unit_s: tuple[float, ...]  # for one microbatch, by stage
    slow: tuple[str, ...] = ()  # peers that take turns: one is slow from the middle of a batch on
    # (stage, version that is learned from) -> what was done for it
    works: dict[tuple[int, int], Works] = field(default_factory=lambda: defaultdict(Works))

    @property
    def crossing(self) -> tuple[bytes, bytes]:
        """What goes over a border there, and back: zeros, which are as long as anything else."""
        border = border_of(self.model, self.manifest)
        there, back = (
            pack(border, way, 1, 1, [_zeros(codec, tensor.dims(1)) for codec, tensor in border.items(way)])
            for way in (False, True)
        )
        return there, back

    def takes_s(self, name: str, stage: int, hand: MicrobatchWork) -> float:
        """How long this work takes this peer, if it begins now."""
        part = {"forward": FORWARD_PART, "backward": 1.0 - FORWARD_PART, "both": 1.0}[hand.way]
        late = 2 * self.works[stage, hand.version].made >= self.manifest.pipeline.batch
        slow = late and self.slow and self.slow[hand.version % len(self.slow)] == name
        return part * self.unit_s[stage] * (SLOW_TIMES if slow else 1.0)

    @property
    def samples(self) -> int:
        """No epoch ends within a run, so that all batches are alike."""
        return self.manifest.pipeline.batch * (self.manifest.run.rounds + 1)


def _zeros(codec: str, dims: tuple[int, ...]) -> bytes:
    return bytes(codec_named(codec).encode(torch.zeros(dims)))


class ShamTrainer:
    """Of one peer: as long as its agent lives."""

    def __init__(
        self,
        name: str,
        stages: tuple[int, ...],
        shape: Shape,
        crossing: tuple[bytes, bytes],
        agent: AgentProcess,
    ) -> None:
        """`stages`: those that it says it could hold."""
        self.name, self.agent = name, agent
        self.machine = StageMachine()
        self.peer = ""
        self.frozen_at = -1  # the version whose sums it has frozen last
        self._stages, self._shape, self._crossing = stages, shape, crossing
        self._work: MicrobatchWork | None = None
        self._ends_at = self._takes_s = 0.0  # of this work: when it ends, how long it takes
        self._shared: SharedState | None = None
        self._belt: SharedSlots | None = None
        self._momentum: tuple[int, Floats] | None = None  # as it was at a version

    @property
    def stage(self) -> int:
        return self.machine.stage

    @property
    def counted(self) -> frozenset[int]:
        return frozenset(self.machine.sums.counted)

    @property
    def ends_at(self) -> float | None:
        """When the work in hand is done; None: it waits for words."""
        return self._ends_at if self._work is not None else None

    # ---- words, and time that passes

    def on_words(self, began: float) -> None:
        """There may be some; it works on nothing.  A work that one of them hands over began then."""
        channel = self.agent.channel
        while not self.machine.finished and (word := channel.recv(0.0)) is not None:
            if isinstance(word, Begin):
                self.peer = word.peer
                self._carry_out(self._attach())
            elif isinstance(word, Anew):
                self.machine, self._shared, self._belt, self._momentum = StageMachine(), None, None, None
                self._carry_out(self._attach())
            else:
                self._carry_out(self.machine.on_message(word))
        if self.peer:
            self._carry_out(self.machine.next())
        if self._work is not None:
            self._takes_s = self._shape.takes_s(self.name, self.stage, self._work)
            self._ends_at = began + self._takes_s

    def on_time(self) -> None:
        """The work in hand is done."""
        hand, ended = self._work, self._ends_at
        if hand is None or self._belt is None:
            return
        self._work = None
        works = self._shape.works[self.stage, hand.version]
        works.busy_s += self._takes_s
        payload = self._crossing[hand.way != "forward"] if hand.way == "forward" or self.stage else b""
        made = self._belt.write(slot_of(hand.place, MADE), payload) if payload else 0
        if hand.way != "forward":
            works.made, works.last_at = works.made + 1, ended
        is_last = hand.way == "both"
        self._carry_out(self.machine.on_made(made, 1, 0.0 if is_last else None))
        self.on_words(ended)

    def close(self) -> None:
        self.agent.close(FINISHED if self.machine.finished else "the bench is over")

    # ---- effects

    def _attach(self) -> list[SumsEffect]:
        model, need = self._shape.model, NeedSamples(samples=self._shape.samples, want=0)
        longest = max(map(len, self._crossing))
        return self.machine.attach(model, os.getpid(), self._stages, longest, need)

    def _carry_out(self, effects: list[SumsEffect]) -> None:
        for effect in effects:
            match effect:
                case do.SayWord(word):
                    if isinstance(word, Frozen):
                        self.frozen_at = self.machine.version
                    self.agent.channel.send(word)
                case do.EndWithRefusal(code, reason):
                    raise Refused(code, f"{self.name}: {reason}")
                case do.OpenShared(word):
                    self._open(word)
                case do.WriteAnchor():
                    self._there.anchor.zero_()
                case do.LoadAnchor(version=version):
                    self._look_at_result(version)
                case WriteSums(slot, tokens):
                    self._write_sums(slot, tokens)
                case StageWork(word):
                    self._work = word
                case DropSums() | do.WaitBefore() | do.RunOver():
                    pass
                case _:
                    raise RuntimeError(f"{type(effect).__name__} is no effect of a stage")

    @property
    def _there(self) -> SharedState:
        if self._shared is None:
            raise RuntimeError("before the agent shared its memory")
        return self._shared

    def _open(self, word: Shared) -> None:
        self._shared = SharedState.open(word)
        self._belt = SharedSlots.open(word.belt, PLACES, max(map(len, self._crossing)))

    def _write_sums(self, slot: int, tokens: int) -> None:
        values: Floats = self._there.slots[slot].numpy()
        values.fill(0.0)
        values[sorted(self.machine.sums.counted)] = 1.0 / tokens

    def _look_at_result(self, version: int) -> None:
        """Of the round that made this version, if it was loaded one version before."""
        now = self._momentum_now()
        before, self._momentum = self._momentum, (version, now)
        if before is None or before[0] != version - 1:
            return
        numbers = self._shape.manifest.outer_numbers
        if not isinstance(numbers, AdamWNumbers):
            raise RuntimeError(f"{type(numbers).__name__} is not what a run in stages has")
        by, batch = numbers.at(version), self._shape.manifest.pipeline.batch
        times = batch * (now - by.keep_m * before[1]) / by.take_m
        once = bool(np.all(np.abs(times[:batch] - 1.0) < 0.01) and np.all(np.abs(times[batch:]) < 0.01))
        works = self._shape.works[self.stage, version - 1]
        works.counted_once = once and works.counted_once is not False

    def _momentum_now(self) -> Floats:
        [momentum, _] = self._there.moments
        return self._there.copy_whole(lambda: np.array(momentum.numpy(), np.float32), WHOLE_PATIENCE_S)
