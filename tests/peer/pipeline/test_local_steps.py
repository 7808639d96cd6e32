"""Stages that take steps of their own within a batch: over real belts, to the bit what one process computes.

What is expected is computed here by plain loops: torch's AdamW on each stage's parameters, torch's clipping, the
rate as its formula has it, and Nesterov's outer step.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.optim.inner import MuonAdamW
from farflung.optim.recipes import inner_of_stage
from farflung.peer.footprint import MemoryRules
from farflung.peer.pipeline.api import needs_of
from farflung.peer.pipeline.machines.summing_machine import LocalStep
from farflung.peer.pipeline.parts import Stage, as_output, build, seed_of_chance
from farflung.peer.pipeline.pipeline_loop import StageOptimizer
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.protocol.manifest import Manifest
from rig.stage_agents import Pipeline, model_of
from rig.unsplit import BUILT_IN, MICROS, SEQUENTIAL, Nesterov, Task, weights_hash

VERSIONS, STEPS, PER_STEP = 3, 2, 4  # of each batch: a step of 4 microbatches, and one of the last 2
LR, WARMUP, CLIP, BETAS, DECAY = 4e-3, 1, 0.9, (0.8, 0.95), 0.05
OUTER_LR, MOMENTUM = 0.6, 0.7
LOCAL: dict[str, dict[str, Any]] = {
    "run": {"rounds": VERSIONS, "seed": 5},
    "round": {"chunk_kb": 1, "sync_every": STEPS},
    "inner": {
        "lr": LR,
        "betas": list(BETAS),
        "weight_decay": DECAY,
        "warmup_steps": WARMUP,
        "schedule": "cosine",
        "clip": CLIP,
    },
    "outer": {"step": "nesterov", "lr": OUTER_LR, "momentum": MOMENTUM},
    "pipeline": {"mode": "local", "local_micros": PER_STEP},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_stages(
    folder: Path, task: Task, cuts: list[int], in_flight: int
) -> tuple[dict[str, Tensor], list[float]]:
    sections = {name: dict(keys) for name, keys in LOCAL.items()}
    model, micro = model_of(task, 5, VERSIONS, cuts, **sections)
    pipeline, losses = Pipeline.start(folder, model, micro), []
    for version in range(VERSIONS):
        pipeline.load(version)
        losses.append(pipeline.batch(version, in_flight))
        pipeline.freeze(version)
        pipeline.step()
    named: dict[str, Tensor] = {}
    for stage in pipeline.end(VERSIONS):
        named |= dict(stage.named_parameters())
    return named, losses


def rate(step: int) -> float:
    """The share of the rate that [inner] asks for at this step of the run."""
    if step + 1 < WARMUP:
        return (step + 1) / WARMUP
    total = VERSIONS * STEPS
    left = (1.0 + math.cos(math.pi * max(0, step - WARMUP) / (total - WARMUP))) / 2
    return 0.1 + (1.0 - 0.1) * left


class OneProcess:
    """All parts here.  `cuts` say only which gradients are bounded together."""

    def __init__(self, task: Task, cuts: list[int]) -> None:
        self.task = task
        parts = task.parts(5)
        self.modules = [build(part, number, 5) for number, part in enumerate(parts)]
        whole = nn.ModuleList(self.modules)
        self.named = dict(whole.named_parameters())
        self.stages = [list(range(*pair)) for pair in pairwise([0, *cuts, len(parts)])]
        self.of_stage = [
            [p for number in numbers for p in self.modules[number].parameters()] for numbers in self.stages
        ]
        self.optimizers = [torch.optim.AdamW(p, LR, BETAS, weight_decay=DECAY) for p in self.of_stage]
        self.outer = Nesterov(OUTER_LR, MOMENTUM)

    def run_parts(self, version: int, micro: int, numbers: list[int], x: Any) -> Any:
        for number in numbers:
            torch.manual_seed(seed_of_chance(5, version, micro, number))
            y = self.modules[number](*x)
            x = y if isinstance(y, tuple) else (y,)
        return x

    def local_step(self, count: int, tokens: int, run_step: int) -> None:
        for parameters, optimizer in zip(self.of_stage, self.optimizers, strict=True):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / tokens
            nn.utils.clip_grad_norm_(parameters, CLIP / math.sqrt(len(self.stages)))
            optimizer.param_groups[0]["lr"] = LR * (rate(run_step) * (count / PER_STEP))
            optimizer.step()
            optimizer.zero_grad()

    def batch(self, version: int) -> float:
        """One microbatch after the other, with a graph from the data to the loss."""
        anchor = {name: p.detach().clone() for name, p in self.named.items()}
        total, tokens, since, since_tokens, step = 0.0, 0, 0, 0, 0
        for micro, given in self.task.batch(5, version):
            everything = [number for numbers in self.stages for number in numbers]
            loss = self.task.loss(
                as_output(self.run_parts(version, micro.number, everything, given)), micro.riders
            )
            (loss * micro.tokens).backward()
            total, tokens = total + loss.item() * micro.tokens, tokens + micro.tokens
            since, since_tokens = since + 1, since_tokens + micro.tokens
            if since == PER_STEP or micro.number == MICROS - 1:
                self.local_step(since, since_tokens, version * STEPS + step)
                since, since_tokens, step = 0, 0, step + 1
        self.outer_step(anchor)
        return total / tokens

    def outer_step(self, anchor: dict[str, Tensor]) -> None:
        with torch.no_grad():
            moved = {name: anchor[name] - p for name, p in self.named.items()}
            for name, p in self.named.items():
                p.copy_(anchor[name])
            self.outer.step(self.named, moved)


@pytest.mark.parametrize(
    ("task", "cuts"),
    [(BUILT_IN, [3]), (BUILT_IN, [2, 4]), (SEQUENTIAL, [1, 2])],
    ids=["gpt 2", "gpt 3", "chance"],
)
def test_stages_with_steps_of_their_own_learn_the_bits_of_one_process(
    tmp_path: Path, task: Task, cuts: list[int]
) -> None:
    """A microbatch is back before the next one begins: then every stage has the weights of one moment."""
    alone = OneProcess(task, cuts)
    expected = [alone.batch(version) for version in range(VERSIONS)]
    found, losses = train_stages(tmp_path, task, cuts, in_flight=1)
    assert losses == expected
    assert weights_hash(found) == weights_hash(alone.named)


class Mixed(OneProcess):
    """Several microbatches are on their way: an activation was made before a step, and its gradient comes after it.
    The way back runs the forward pass again, with the weights that are there then."""

    def batch_in_flight(self, version: int, in_flight: int) -> None:
        anchor = {name: p.detach().clone() for name, p in self.named.items()}
        self.since = [[0, 0, 0] for _ in self.stages]  # of each: microbatches, tokens, steps
        came: deque[Any] = deque()
        for micro, given in self.task.batch(5, version):
            inputs = [given]
            with torch.no_grad():
                for numbers in self.stages[:-1]:
                    inputs.append(self.run_parts(version, micro.number, numbers, inputs[-1]))
            came.append((micro, inputs))
            if len(came) == in_flight:
                self.go_back(version, *came.popleft())
        while came:
            self.go_back(version, *came.popleft())
        self.outer_step(anchor)

    def go_back(self, version: int, micro: Any, inputs: list[Any]) -> None:
        gradient: list[Tensor] = []
        for stage in reversed(range(len(self.stages))):
            leaves = [t.detach().requires_grad_(stage > 0 and t.is_floating_point()) for t in inputs[stage]]
            gave = self.run_parts(version, micro.number, self.stages[stage], leaves)
            if stage == len(self.stages) - 1:
                (self.task.loss(as_output(gave), micro.riders) * micro.tokens).backward()
            else:
                torch.autograd.backward(gave, gradient)
            gradient = [leaf.grad for leaf in leaves if leaf.grad is not None]
            self.count(version, stage, micro)

    def count(self, version: int, stage: int, micro: Any) -> None:
        since = self.since[stage]
        since[0], since[1] = since[0] + 1, since[1] + micro.tokens
        if since[0] == PER_STEP or micro.number == MICROS - 1:
            every, self.of_stage = self.of_stage, [self.of_stage[stage]]
            optimizers, self.optimizers = self.optimizers, [self.optimizers[stage]]
            self.local_step(since[0], since[1], version * STEPS + since[2])
            self.of_stage, self.optimizers = every, optimizers
            self.since[stage] = [0, 0, since[2] + 1]


@pytest.mark.parametrize("in_flight", [2, MICROS])
def test_the_way_back_is_taken_with_the_weights_that_are_there_then(tmp_path: Path, in_flight: int) -> None:
    alone, apart = Mixed(BUILT_IN, [2, 4]), OneProcess(BUILT_IN, [2, 4])
    for version in range(VERSIONS):
        alone.batch_in_flight(version, in_flight)
        apart.batch(version)
    found, _ = train_stages(tmp_path, BUILT_IN, [2, 4], in_flight)
    assert weights_hash(found) == weights_hash(alone.named)
    assert weights_hash(found) != weights_hash(apart.named), (
        "a step lay between: this shows nothing otherwise"
    )


def test_P11_whoever_moved_takes_steps_as_before_and_nothing_of_its_former_stage_stays(
    tmp_path: Path,
) -> None:
    """Sums of gradients would be merged as if steps had moved the model so far."""
    written: list[list[Tensor]] = []
    for moves in (False, True):
        folder = tmp_path / str(moves)
        folder.mkdir()
        model, micro = model_of(BUILT_IN, 5, 1, [3], **{name: dict(keys) for name, keys in LOCAL.items()})
        pipeline = Pipeline.start(folder, model, micro)
        if moves:
            pipeline.load(0)
            pipeline.batch(0, in_flight=1)
            former = [weakref.ref(loop.stage) for loop in pipeline.loops]
            pipeline.give_up()
            assert [each() for each in former] == [None, None], "there is room for one stage only"
            pipeline.begin_anew(model)
        pipeline.load(0)
        pipeline.batch(0, in_flight=1)
        pipeline.freeze(0)
        written.append(
            [agent.shared.slots[1].clone() for agent in pipeline.agents if agent.shared is not None]
        )
    for stayed, moved in zip(*written, strict=True):
        assert stayed.any() and torch.equal(stayed, moved)


# ---- what takes the steps


def replica_of(**inner: Any) -> tuple[StageOptimizer, StageLoop]:
    pipeline = {"batch": 8, "stages": 4, "mode": "local", "local_micros": 2}
    keys = {"inner": {"betas": [0.0, 0.0], "weight_decay": 0.0, "lr": 0.1} | inner, "pipeline": pipeline}
    manifest = Manifest.model_validate(keys | {"merge": {"policy": "mean"}})
    loop = StageLoop(Stage(0, [nn.Linear(1, 1, bias=False)]), 0, None)
    return StageOptimizer(loop, manifest, is_last=False), loop


def step(replica: StageOptimizer, loop: StageLoop, gradient: float = 1.0, share: float = 1.0) -> float:
    """How far a step of AdamW without memory goes: by its rate, whatever the gradient."""
    [weight] = loop.stage.parameters()
    before = weight.item()
    weight.grad = torch.full_like(weight, gradient)
    assert loop.sums.add_gradients()
    replica.step(LocalStep(run_step=0, tokens=1, share=share))
    assert weight.grad is None and not loop.sums.of(weight).any(), "the next step begins with nothing"
    return before - weight.item()


def test_a_step_of_fewer_microbatches_is_smaller_by_as_much() -> None:
    replica, loop = replica_of()
    assert step(replica, loop) == pytest.approx(0.1, rel=1e-4)
    assert step(replica, loop, share=0.5) == pytest.approx(0.05, rel=1e-4)
    assert step(replica, loop) == pytest.approx(0.1, rel=1e-4), "and the rate itself stays"


def test_whoever_joins_a_run_begins_with_small_steps_and_a_lost_seat_makes_nobody_a_joiner() -> None:
    replica, loop = replica_of()
    replica.on_loaded(7)
    assert [step(replica, loop) for _ in range(11)] == pytest.approx(
        [n / 100 for n in range(1, 11)] + [0.1], rel=1e-4
    )
    replica.on_loaded(7)
    assert step(replica, loop) == pytest.approx(0.1, rel=1e-4)
    founder, loop = replica_of()
    founder.on_loaded(0)
    founder.on_loaded(1)
    assert step(founder, loop) == pytest.approx(0.1, rel=1e-4)


def test_what_a_stages_optimizer_remembers_is_finite_again_with_the_next_version() -> None:
    replica, loop = replica_of(betas=[0.9, 0.9])
    [weight] = loop.stage.parameters()
    step(replica, loop)
    replica.optimizer.state[weight]["exp_avg_sq"].fill_(math.inf)
    assert step(replica, loop) == 0.0
    replica.on_loaded(1)
    assert step(replica, loop) > 0.0


def test_all_stages_together_are_no_longer_than_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []
    clip = nn.utils.clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda p, most: (bounds.append(most), clip(p, most))[1])
    step(*replica_of(clip=0.8))
    assert math.hypot(*bounds * 4) == pytest.approx(0.8)


@pytest.mark.parametrize(("gradient", "told"), [(3.0, 0.4), (0.1, 0.1)])
def test_the_norm_that_is_told_is_that_which_the_optimizer_took(gradient: float, told: float) -> None:
    replica, loop = replica_of(clip=0.8)
    [weight] = loop.stage.parameters()
    weight.grad = torch.full_like(weight, gradient)
    assert loop.sums.add_gradients()
    assert float(replica.step(LocalStep(run_step=0, tokens=1, share=1.0))) == pytest.approx(told)


def test_whoever_tracks_a_stage_with_steps_of_its_own_sees_their_norm(tmp_path: Path) -> None:
    model, micro = model_of(BUILT_IN, 5, 1, [3], **LOCAL)
    pipeline = Pipeline.start(tmp_path, model, micro)
    pipeline.load(0)
    pipeline.batch(0)
    for agent in pipeline.agents:
        assert agent.shared is not None
        assert 0.0 < (agent.shared.read_gradient_norm() or 0.0) <= CLIP / math.sqrt(2) + 1e-6


def test_muon_takes_the_hidden_matrices_of_a_stage_and_none_of_its_ends() -> None:
    manifest = Manifest.model_validate({"inner": {"optimizer": "muon"}})

    def by_muon(stage: nn.Module, is_last: bool) -> set[str]:
        optimizer = inner_of_stage(manifest, stage, is_last)
        names = {id(p): name for name, p in stage.named_parameters()}
        groups = [g for g in optimizer.param_groups if isinstance(optimizer, MuonAdamW) and g["part"] == 0]
        return {names[id(p)] for group in groups for p in group["params"]}

    hidden = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    assert by_muon(nn.Sequential(nn.Embedding(9, 4), hidden), False) == {"1.0.weight", "1.1.weight"}
    assert by_muon(hidden, False) == {"0.weight", "1.weight"}
    assert by_muon(hidden, True) == {"0.weight"}, "the last layer of all is for the loss"
    assert by_muon(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 9)), True) == set(), "AdamW alone"


def test_what_an_optimizer_remembers_must_fit_beside_the_stage() -> None:
    found = []
    for more in ({}, LOCAL):
        model, _ = model_of(BUILT_IN, 5, 1, [3], **more)
        found.append(needs_of(model.whole, MemoryRules.of(model.manifest)))
    for layout, sync, local in zip(model.whole.layouts, *found, strict=True):
        values = layout.total_elements  # fp32, and no buffers
        assert local.gpu_bytes - sync.gpu_bytes == 8 * values, "two moments"
        assert sync.shared_bytes - local.shared_bytes == 4 * values, "a moment less than AdamW's"
        assert local.host_bytes - local.shared_bytes > 4 * values, "the loaded values"
