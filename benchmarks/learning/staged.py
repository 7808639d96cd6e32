"""What local steps within a batch cost in loss and save in bytes, beside synchronous batches and plain DiLoCo.

    python benchmarks/learning/staged.py [--steps 600] [--period 20] [--seeds 3] [--only 0 1] [--jobs 2]
        [--plot FILE] [--write]

A TinyGPT in 2 stages of 4 peers each learns in one process from the same samples in the same order: by synchronous
batches of as many microbatches as a stage has peers; by local steps of one microbatch, merged every `--period`, with 4
or 16 microbatches on their way, so that one step or four lie between the two ways of one; and the same 8 peers as
plain DiLoCo, each with the whole model.  The stages' work, what crosses a border, when a step is due and the steps are
the program's own (peer/pipeline, peer/trainer, optim); only the way of a microbatch through the seats is made here: at
each stage a seat drawn by chance, or the one with the number that it had before.
Bytes: crossings in int8 as their codec has them, and rounds in fp32, of which a peer sends 2 (n - 1) / n values of its
stage.  `--write` puts the table into docs/pipelines.md, and `--plot` draws the curves of the first seed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]  # rig/ is what both share
from pages import write_between
from tiny_gpt import GPTConfig, next_byte_loss, untied_parts

from farflung.console.history.curves import draw
from farflung.optim.outer import advance
from farflung.optim.recipes import outer_of
from farflung.optim.schedule import rules_of
from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.pipeline.machines.stage_machine import LocalSteps
from farflung.peer.pipeline.parts import Stage, Tensors
from farflung.peer.pipeline.pipeline_loop import StageOptimizer
from farflung.peer.pipeline.stage_loop import MicroActivations, StageLoop
from farflung.protocol.manifest import Manifest
from rig.local_pipeline import BorderCrossing

PAGE = HERE.parents[1] / "docs" / "pipelines.md"
CONFIG = GPTConfig(layers=2, width=32, heads=4, context=64)
CORPUS = load_corpus()
WINDOWS = (CORPUS.train.numel() - 1) // CONFIG.context
HELD_OUT = 64  # windows
PEERS, CUT, SAMPLES = 8, 2, 4
LR = 6e-3
Item = tuple[
    MicroActivations, list[Tensors], list[int]
]  # on its way: what each stage was given, and its seat there


@dataclass(frozen=True)
class Setting:
    name: str
    stages: int
    local: bool
    codec: str = "int8"
    in_flight: int = 4  # microbatches on their way
    fixed: bool = False  # paths: the seats with one number work on the same microbatches

    @property
    def seats(self) -> int:
        """Of a stage."""
        return PEERS // self.stages


SETTINGS = (
    Setting("synchronous batches", 2, local=False),
    Setting('"local", 4 on their way', 2, local=True),
    Setting('"local", 16 on their way', 2, local=True, in_flight=16),
    Setting('"local", 4, paths of their own', 2, local=True, fixed=True),
    Setting("plain DiLoCo, no stages", 1, local=True),
)


@dataclass
class Row:
    setting: Setting
    seed: int
    curve: list[tuple[int, float]] = field(default_factory=list)  # (tokens, held-out loss of the anchor)
    crossed_bytes: float = 0.0  # that a peer sends, in all: the mean of all peers
    rounds_bytes: float = 0.0

    @property
    def loss(self) -> float:
        return self.curve[-1][1]


def manifest_of(setting: Setting, seed: int, micros: int, period: int) -> Manifest:
    """`micros`: of the whole run."""
    in_batch = setting.seats * (period if setting.local else 1)
    inner = {
        "lr": LR,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "clip": 1e9,
        "warmup_steps": micros // (12 * PEERS),
        "schedule": "linear",
    }
    outer = {} if setting.local else {"step": "adamw"}
    staged = {"batch": in_batch, "stages": setting.stages, "local_micros": 1}
    mode = {"mode": "local" if setting.local else "sync"}
    content: dict[str, Any] = {
        "run": {"seed": seed, "rounds": micros // in_batch},
        "inner": inner,
        "outer": outer,
        "merge": {"policy": "mean"},
        "round": {"sync_every": period},
        "pipeline": staged | mode if setting.stages > 1 else {"local_micros": 1},
    }
    return Manifest.model_validate(content)


class Seat:
    """One peer's stage."""

    def __init__(self, stage: Stage, manifest: Manifest, is_last: bool, local: bool) -> None:
        self.loop = StageLoop(stage, manifest.run.seed, next_byte_loss if is_last else None)
        self.replica = StageOptimizer(self.loop, manifest, is_last) if local else None
        self.steps = LocalSteps(manifest.pipeline.local_micros, rules_of(manifest))
        self.tokens = 0

    @torch.no_grad()
    def take(self, anchor: list[Tensor]) -> None:
        for parameter, values in zip(self.loop.stage.parameters(), anchor, strict=True):
            parameter.copy_(values)

    def load(self, anchor: list[Tensor], version: int) -> None:
        self.take(anchor)
        self.tokens = 0
        self.steps.on_load(version)
        if self.replica is not None:
            self.replica.on_loaded(version)

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        for due in self.steps.on_counted(tokens) if self.replica is not None else []:
            self.replica.step(due)

    @torch.no_grad()
    def contribution(self, anchor: list[Tensor]) -> list[Tensor]:
        """What falls, weighed by tokens."""
        if self.replica is None:
            return [self.loop.sums.of(p) for p in self.loop.stage.parameters()]
        moved = zip(anchor, self.loop.stage.parameters(), strict=True)
        return [(then - now) * self.tokens for then, now in moved]


class Crew:
    """All peers of one setting."""

    def __init__(self, setting: Setting, manifest: Manifest) -> None:
        self.setting, self.outer = setting, outer_of(manifest)
        parts = untied_parts(CONFIG)
        borders = [0, CUT, len(parts)] if setting.stages > 1 else [0, len(parts)]
        self.stages = [
            [
                Seat(
                    Stage.build(parts, first, stop, manifest.run.seed),
                    manifest,
                    stop == len(parts),
                    setting.local,
                )
                for _ in range(setting.seats)
            ]
            for first, stop in pairwise(borders)
        ]
        self.anchors = [[p.detach().clone() for p in s[0].loop.stage.parameters()] for s in self.stages]
        self.moments = [
            [[torch.zeros(p.numel()) for _ in range(self.outer.parts - 1)] for p in anchor]
            for anchor in self.anchors
        ]
        self.crossing = BorderCrossing(setting.codec)
        self._chance = random.Random(f"seats {manifest.run.seed}")
        self._in_flight = setting.in_flight if setting.stages > 1 else 1

    @property
    def round_bytes(self) -> float:
        """That a peer sends in one round, the mean of all stages."""
        seats = self.setting.seats
        values = statistics.mean(sum(p.numel() for p in anchor) for anchor in self.anchors)
        return 2 * (seats - 1) / seats * values * 4

    def batch(self, version: int, micros: list[tuple[MicroActivations, Tensors]]) -> None:
        for seats, anchor in zip(self.stages, self.anchors, strict=True):
            for seat in seats:
                seat.load(anchor, version)
        under_way: deque[Item] = deque()
        ways = [self._shares(len(micros)) for _ in self.stages]
        ways = [ways[0]] * len(ways) if self.setting.fixed else ways
        for number, (micro, given) in enumerate(micros):
            under_way.append(self._there(micro, given, [way[number] for way in ways]))
            if len(under_way) == self._in_flight:
                self._back(*under_way.popleft())
        while under_way:
            self._back(*under_way.popleft())
        self._round(version)

    def _shares(self, count: int) -> list[int]:
        """The seat of each microbatch: equal shares, drawn by chance."""
        seats = [number % self.setting.seats for number in range(count)]
        self._chance.shuffle(seats)
        return seats

    def _there(self, micro: MicroActivations, given: Tensors, seats: list[int]) -> Item:
        inputs = [given]
        for stage, seat in list(zip(self.stages, seats, strict=True))[:-1]:
            gave = stage[seat].loop.forward(micro, inputs[-1])
            inputs.append(self.crossing.pass_on(gave))
        return micro, inputs, seats

    def _back(self, micro: MicroActivations, inputs: list[Tensors], seats: list[int]) -> None:
        gradients: Tensors = ()
        for number in reversed(range(len(self.stages))):
            seat = self.stages[number][seats[number]]
            if number == len(self.stages) - 1:
                gradients, _ = seat.loop.last(micro, inputs[number])
            else:
                gradients = seat.loop.backward(micro, inputs[number], self.crossing.pass_on(gradients))
            seat.count(micro.tokens)

    @torch.no_grad()
    def _round(self, version: int) -> None:
        for seats, anchor, moments in zip(self.stages, self.anchors, self.moments, strict=True):
            tokens = sum(seat.tokens for seat in seats)
            made = [seat.contribution(anchor) for seat in seats]
            for number, theta in enumerate(anchor):
                merged = torch.stack([each[number] for each in made]).sum(0) / tokens
                advance(self.outer, [theta.view(-1), *moments[number]], merged.view(-1), version + 1)
            for seat in seats:
                seat.loop.drop()

    @torch.no_grad()
    def held_out(self) -> float:
        """Of the anchor."""
        length = CONFIG.context + 1
        last = CORPUS.held_out.numel() - length
        starts = [last * number // (HELD_OUT - 1) for number in range(HELD_OUT)]
        rows = torch.stack([CORPUS.held_out[start : start + length] for start in starts]).long()
        x: Any = rows[:, :-1]
        for seats, anchor in zip(self.stages, self.anchors, strict=True):
            seats[0].take(anchor)
            x = seats[0].loop.stage(x)
        return float(next_byte_loss(x, {"labels": rows[:, 1:]}))


def samples(seed: int, first: int, version: int, count: int) -> Iterator[tuple[MicroActivations, Tensors]]:
    for number in range(count):
        start = (first + number) * SAMPLES
        places = [
            permuted_range(seed, each // WINDOWS, WINDOWS, each % WINDOWS, each % WINDOWS + 1)[0]
            for each in range(start, start + SAMPLES)
        ]
        at = [place * CONFIG.context for place in places]
        rows = torch.stack([CORPUS.train[each : each + CONFIG.context + 1] for each in at]).long()
        labels = rows[:, 1:]
        yield MicroActivations(version, number, labels.numel(), {"labels": labels}), (rows[:, :-1],)


def learn(setting: Setting, seed: int, micros: int, period: int) -> Row:
    torch.set_num_threads(1)
    manifest = manifest_of(setting, seed, micros, period)
    crew, row = Crew(setting, manifest), Row(setting, seed)
    in_batch = micros // manifest.run.rounds
    every = max(1, manifest.run.rounds // 15)
    for version in range(manifest.run.rounds):
        crew.batch(version, list(samples(seed, version * in_batch, version, in_batch)))
        if (version + 1) % every == 0 or version + 1 == manifest.run.rounds:
            tokens = (version + 1) * in_batch * SAMPLES * CONFIG.context
            row.curve.append((tokens, crew.held_out()))
    row.crossed_bytes = crew.crossing.sent_bytes / PEERS
    row.rounds_bytes = manifest.run.rounds * crew.round_bytes
    print(f"{setting.name}, seed {seed}: {row.loss:.3f}", file=sys.stderr, flush=True)
    return row


def table(rows: list[Row]) -> str:
    lines = [
        "| 8 peers | loss, by seed | against synchronous | a peer sends: crossings | rounds |",
        "|---|---|---|---|---|",
    ]
    base = {row.seed: row.loss for row in rows if not row.setting.local}
    for setting in SETTINGS:
        mine = [row for row in rows if row.setting == setting]
        if not mine:
            continue
        losses = ", ".join(f"{row.loss:.3f}" for row in mine)
        apart = [100 * (row.loss / base[row.seed] - 1) for row in mine if row.seed in base]
        beside = f"{statistics.mean(apart):+.1f} %" if apart and setting.local else ""
        crossed, rounds = mine[0].crossed_bytes / 1e6, mine[0].rounds_bytes / 1e6
        lines.append(f"| {setting.name} | {losses} | {beside} | {crossed:.1f} MB | {rounds:.1f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="of each peer of a stage in a setting of 2 stages"
    )
    parser.add_argument("--period", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(SETTINGS)))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    micros = options.steps * PEERS // 2
    due = [
        (SETTINGS[number], seed, micros, options.period)
        for seed in range(options.seeds)
        for number in options.only
    ]
    if options.jobs > 1:
        with Pool(options.jobs) as pool:
            rows = pool.starmap(learn, due, chunksize=1)
    else:
        rows = [learn(*each) for each in due]
    text = table(rows)
    print(text)
    if options.plot is not None:
        first = {row.setting.name: row.curve for row in rows if row.seed == 0}
        draw(options.plot, "held-out loss, nats per byte", "tokens", first)
    if options.write:
        write_between(PAGE, "local", text)


if __name__ == "__main__":
    main()
