"""All agents and the coordinator of a pipeline in one process: the real trainers of its stages, belts, shared memory.

For tests of peer/pipeline.  One peer a stage; crossings are carried from belt to belt, what stands in the slots into
an exact step (AdamW on sums, Nesterov's on what local steps moved), and versions back by `LoadState`.  Nobody dies
here, and nothing is lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.peer.crossings.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import (
    Anew,
    Attach,
    Finish,
    FreezeSums,
    Frozen,
    Loaded,
    LoadState,
    MicrobatchWork,
    Provide,
    Provided,
    WorkDone,
    from_trainer,
    to_bytes,
    to_trainer,
)
from farflung.peer.pipeline.parts import Stage, survey_parts
from farflung.peer.pipeline.pipeline_loop import PipelineLoop, StageModel
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.whole import whole_model
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import OuterNumbers
from rig.unsplit import MICROS, AdamW, Nesterov, Task

CPU = torch.device("cpu")


class Recorded(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The samples of a task's batches, placed so that the run's order of the first epoch gives them as they were."""

    def __init__(self, task: Task, seed: int, updates: int) -> None:
        found = []
        for version in range(updates):
            for micro, (x,) in task.batch(seed, version):
                labels = micro.riders["labels"]
                found += [{"x": x[at], "labels": labels[at]} for at in range(len(x))]
        order = permuted_range(seed, 0, len(found), 0, len(found))
        self._items = dict(zip(order, found, strict=True))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return self._items[place]


@dataclass
class Agent:
    """Of one stage: what its trainer will hear, and what it said last."""

    folder: Path
    stage: int
    coming: deque[Any] = field(default_factory=deque)
    said: deque[Any] = field(default_factory=deque)
    shared: SharedState | None = None
    belt: SharedSlots | None = None
    everything: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.said.append(from_trainer(to_bytes(message)))
        self.everything.append(self.said[-1])

    def heard(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.everything if isinstance(each, kind)]

    def recv(self, timeout_s: float) -> Any:
        return to_trainer(to_bytes(self.coming.popleft())) if self.coming else None

    def share(self, model: StageModel) -> None:
        """The trainer has attached: it gets its stage."""
        attach = self.answer(Attach)
        elements = model.whole.layouts[self.stage].total_elements
        self.shared = SharedState.create(self.folder, elements, ("params", "momentum", "second_moment"))
        self.belt = SharedSlots.create(self.folder / "belt", PLACES, attach.crossing_bytes)
        self.coming += [_with_belt(self.shared.as_message(), self.stage, self.folder / "belt"), Provide()]

    def provided(self) -> None:
        self.said = deque(each for each in self.said if isinstance(each, Provided))
        self.answer(Provided)

    def answer(self, kind: type[Any]) -> Any:
        found = self.said.popleft()
        assert isinstance(found, kind), found
        return found


class Pipeline:
    """One trainer for each stage.  `agents[s].said` and `.coming` are for tests that say a word themselves."""

    def __init__(self, loops: list[PipelineLoop], agents: list[Agent], samples: int) -> None:
        self.loops, self.agents, self.samples = loops, agents, samples
        self.crossed_bytes = 0
        self._optimizers = [self._outer(loop) for loop in loops]  # each stage counts its own steps

    @staticmethod
    def _outer(loop: PipelineLoop) -> AdamW | Nesterov:
        manifest = loop.manifest
        numbers = manifest.outer_numbers
        return Nesterov(numbers.lr, numbers.momentum) if isinstance(numbers, OuterNumbers) else AdamW()

    @classmethod
    def start(cls, folder: Path, model: StageModel, samples: int) -> Pipeline:
        loops, agents = [], []
        for stage in range(model.stages):
            place = folder / str(stage)
            place.mkdir()
            agent = Agent(place, stage)
            loop = PipelineLoop(agent, model, tuple(range(model.stages)), CPU)
            loop.begin()
            agent.share(model)
            loop.turn()
            agent.provided()
            loops.append(loop)
            agents.append(agent)
        return cls(loops, agents, samples)

    # ---- words

    def give_up(self) -> None:
        """Every peer is to hold another stage."""
        for stage in range(len(self.agents)):
            self.tell(stage, Anew())

    def begin_anew(self, model: StageModel) -> None:
        """Each is given a stage again: the same, here."""
        for stage, agent in enumerate(self.agents):
            agent.share(model)
            self.tell(stage)
            agent.provided()

    def load(self, version: int) -> None:
        for stage, agent in enumerate(self.agents):
            said = LoadState(version=version, keep="drop", slot=0, tokens=0, steps=0, spare=0, fragment=stage)
            self.tell(stage, said)
            assert agent.answer(Loaded) == Loaded(version=version, fragment=stage)

    def tell(self, stage: int, *words: Any) -> None:
        self.agents[stage].coming.extend(words)
        while self.agents[stage].coming:
            self.loops[stage].turn()

    def work(self, stage: int, way: Any, version: int, micro: int, given: bytes, returned: bytes) -> Any:
        """(what was said, what lies in the slot for it)."""
        agent, place = self.agents[stage], micro % PLACES
        assert agent.belt is not None
        agent.belt.write(slot_of(place, GIVEN), given)
        agent.belt.write(slot_of(place, RETURNED), returned)
        start = self.start_of(version, micro)
        hand = MicrobatchWork(
            way=way,
            version=version,
            micro=micro,
            epoch=0,
            start=start,
            stop=start + self.samples,
            place=place,
            given_bytes=len(given),
            returned_bytes=len(returned),
        )
        self.tell(stage, hand)
        made = agent.answer(WorkDone)
        assert (made.way, made.version, made.micro) == (way, version, micro)
        self.crossed_bytes += made.bytes_made
        return made, agent.belt.read(slot_of(place, MADE), made.bytes_made)

    def start_of(self, version: int, micro: int) -> int:
        return (version * MICROS + micro) * self.samples

    # ---- a batch

    def batch(self, version: int, in_flight: int = MICROS) -> float:
        """All microbatches there and back, in their order, so many of them on their way; the mean loss of a token."""
        total, tokens = 0.0, 0
        came: deque[tuple[int, list[bytes]]] = deque()  # microbatch, and what each stage was given
        for micro in range(MICROS):
            came.append((micro, self._there(version, micro)))
            if len(came) == in_flight or micro == MICROS - 1:
                for _ in range(len(came) if micro == MICROS - 1 else 1):
                    made = self._back(version, *came.popleft())
                    total, tokens = total + made.loss * made.tokens, tokens + made.tokens
        return total / tokens

    def _there(self, version: int, micro: int) -> list[bytes]:
        given = [b""]
        for stage in range(len(self.loops) - 1):
            made, out = self.work(stage, "forward", version, micro, given[-1], b"")
            assert not made.problem, made.problem
            given.append(out)
        return given

    def _back(self, version: int, micro: int, given: list[bytes]) -> WorkDone:
        last = len(self.loops) - 1
        of_loss, gradient = self.work(last, "both", version, micro, given[last], b"")
        for stage in reversed(range(last)):
            _, gradient = self.work(stage, "backward", version, micro, given[stage], gradient)
        assert gradient == b"", "the data has no gradient"
        assert isinstance(of_loss, WorkDone)
        return of_loss

    def freeze(self, version: int) -> None:
        for stage in range(len(self.loops)):
            self.tell(stage, FreezeSums(version=version, slot=1))
            frozen = self.agents[stage].answer(Frozen)
            assert frozen.counted == mask_to_bytes(mask_of(range(MICROS))) and frozen.slot == 1

    def step(self) -> None:
        """What the agents do when the round of their stage is committed: one exact step, on anchor and sums."""
        for loop, agent, optimizer in zip(self.loops, self.agents, self._optimizers, strict=True):
            assert agent.shared is not None
            anchor, sums = agent.shared.anchor, agent.shared.slots[1]
            entries = loop.held.layout.entries
            at = {e.name: slice(e.offset, e.offset + e.numel) for e in entries}
            theta = {e.name: anchor[at[e.name]].view(e.shape) for e in entries if e.kind == "param"}
            named = {name: sums[at[name]].view(values.shape) for name, values in theta.items()}
            with torch.no_grad():
                optimizer.step(theta, named)
                for e in entries:
                    if e.kind == "buffer":
                        anchor[at[e.name]] -= sums[at[e.name]]

    def end(self, version: int) -> list[Stage]:
        for stage, loop in enumerate(self.loops):
            self.tell(stage, Finish(version=version))
            assert loop.machine.finished
            loop.end()
        return [loop.stage for loop in self.loops]


def _with_belt(word: Any, stage: int, path: Path) -> Any:
    fields = {name: getattr(word, name) for name in word.__struct_fields__}
    return type(word)(**{**fields, "stage": stage, "belt": os.fspath(path)})


def model_of(
    task: Task,
    seed: int,
    updates: int,
    cuts: Sequence[int],
    codec: str = "fp32",
    **sections: dict[str, Any],
) -> tuple[StageModel, int]:
    """The user's half of `farflung.pipeline`, and the samples of a microbatch.  `sections`: keys of run.toml."""
    data = Recorded(task, seed, updates)
    micro = len(data) // (updates * MICROS)
    due: dict[str, dict[str, Any]] = {
        "run": {"seed": seed},
        "round": {"chunk_kb": 1},
        "merge": {"policy": "mean"},
        "outer": {"step": "adamw"},
        "pipeline": {
            "batch": MICROS,
            "micro": micro,
            "stages": len(cuts) + 1,
            "cuts": list(cuts),
            "codec": codec,
        },
    }
    keys = {name: due.get(name, {}) | sections.get(name, {}) for name in due.keys() | sections.keys()}
    manifest = Manifest.model_validate(keys)
    samples = Samples(data, ("x",), ("labels",), seed)
    parts = task.parts(seed)
    item = samples.one_item()
    facts = survey_parts(parts, item, samples.inputs, task.loss)
    whole = whole_model(facts, item, samples.riders, manifest)
    return StageModel(parts, whole, samples, task.loss, manifest), micro


def train_stages(
    folder: Path, task: Task, seed: int, updates: int, cuts: Sequence[int], codec: str
) -> tuple[dict[str, Tensor], list[float], Pipeline]:
    """All tensors of the whole model by name, and the loss of each update."""
    model, micro = model_of(task, seed, updates, cuts, codec)
    pipeline, losses = Pipeline.start(folder, model, micro), []
    for version in range(updates):
        pipeline.load(version)
        losses.append(pipeline.batch(version))
        pipeline.freeze(version)
        pipeline.step()
    named: dict[str, Tensor] = {}
    for stage in pipeline.end(updates):
        named |= dict(stage.named_parameters()) | dict(stage.named_buffers())
    return named, losses, pipeline
