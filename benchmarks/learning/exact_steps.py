"""What the exact steps make of the gradients of large batches: AdamW and Muon, in chunks of several sizes.

    python benchmarks/learning/exact_steps.py [--steps 300] [--seeds 2] [--only 0 3] [--lr 6e-3 1e-2]
        [--plot FILE] [--write] [--time 512 512]

A TinyGPT learns in one process, one batch to a step: its values lie in chunks as in a run, and each step is the one
that a run's agents take (optim/).  `--lr`: of several rates the one with the least loss counts for a row.  `--write`
puts the table into docs/learning.md, `--plot` draws the curves of the first seed, and `--time ROWS COLUMNS` only says
how long a matrix takes with one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]
from pages import write_between
from tiny_gpt import GPTConfig, TinyGPT, build, evaluate

from farflung.console.history.curves import draw
from farflung.optim.outer import advance, orthogonal
from farflung.optim.recipes import outer_of
from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.manifest import Manifest

PAGE = HERE.parents[1] / "docs" / "learning.md"
CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
CORPUS = load_corpus()
BATCH = 16  # windows
HELD_OUT = 64  # windows
CURVE_EVERY = 10


@dataclass(frozen=True)
class Setting:
    step: str
    chunk_kb: int = 256  # the largest matrix has 64 KB

    @property
    def name(self) -> str:
        return self.step if self.chunk_kb == 256 else f"{self.step}, chunks of {self.chunk_kb} KB"


SETTINGS = (
    Setting("adamw"),
    Setting("muon"),
    Setting("muon", chunk_kb=16),
    Setting("muon", chunk_kb=4),
)


class Run:
    def __init__(self, setting: Setting, seed: int, steps: int, lr: float) -> None:
        self.setting, self.steps = setting, steps
        outer = {"step": setting.step, "lr": lr}
        sections = {
            "run": {"rounds": steps},
            "inner": {"warmup_steps": max(1, steps // 10), "schedule": "linear"},
            "outer": outer,
            "merge": {"policy": "mean"},
            "pipeline": {"batch": 1, "micro": BATCH},
        }
        self._step = outer_of(Manifest.model_validate(sections))
        self.model: TinyGPT = build(CONFIG, seed)
        self.layout = ModelLayout.of(self.model, setting.chunk_kb * 256)
        schema = self.layout.model_schema(self.model, with_matrices=setting.step == "muon")
        self._tiles = schema.tiles(range(schema.chunk_count))
        count, size = self.layout.chunk_count, self.layout.chunk_elements
        self._parts = [torch.zeros(count * size) for _ in range(self._step.parts)]
        self.layout.write_anchor(self.model, self._parts[0])
        self._dice = torch.Generator().manual_seed(seed)

    def losses(self) -> list[float]:
        """Of windows that it never learns from, every few steps and at the end."""
        found = []
        for version in range(1, self.steps + 1):
            self._advance(self._gradient_at(self._parts[0]), version)
            if version % CURVE_EVERY == 0 or version == self.steps:
                self.layout.load(self.model, self._parts[0])
                found.append(evaluate(self.model, CORPUS.held_out, HELD_OUT))
        return found

    def _gradient_at(self, weights: Tensor) -> Tensor:
        self.layout.load(self.model, weights)
        starts = torch.randint(len(CORPUS.train) - CONFIG.context - 1, (BATCH,), generator=self._dice)
        rows = torch.stack([CORPUS.train[s : s + CONFIG.context + 1] for s in starts.tolist()])
        self.model.zero_grad()
        loss = self.model(rows.to(torch.int64)).loss
        loss.backward()
        flat = torch.zeros_like(weights)
        self.layout.write_each(self.model, flat, lambda entry, tensor: _gradient_of(tensor))
        return flat

    def _advance(self, gradient: Tensor, version: int) -> None:
        size = self.layout.chunk_elements
        with torch.no_grad():
            for chunk in range(self.layout.chunk_count):
                cells = slice(chunk * size, (chunk + 1) * size)
                parts = [part[cells] for part in self._parts]
                advance(self._step, parts, gradient[cells], version, 1.0, self._tiles.get(chunk, ()))


def _gradient_of(tensor: Tensor) -> Tensor:
    if tensor.grad is None:
        raise RuntimeError("a tensor of this model gets no gradient")
    return tensor.grad


def best_of(setting: Setting, seeds: int, steps: int, rates: list[float]) -> tuple[float, list[list[float]]]:
    """The rate with the least mean loss at the end, and by seed the curves with it."""
    tried = {lr: [Run(setting, seed, steps, lr).losses() for seed in range(seeds)] for lr in rates}
    best = min(tried, key=lambda lr: statistics.fmean(curve[-1] for curve in tried[lr]))
    return best, tried[best]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", default=range(len(SETTINGS)))
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 6e-3, 1.2e-2])
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--time", type=int, nargs=2, metavar=("ROWS", "COLUMNS"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.time:
        values = torch.randn(*asked.time).numpy()
        took = [timeit.timeit(lambda: orthogonal(values), number=1) for _ in range(5)]
        print(f"{asked.time[0]} x {asked.time[1]}: {statistics.median(took):.3f} s, one core, fp64")
        return
    rows = ["| step | rate | loss, by seed | against adamw |", "|---|---|---|---|"]
    curves: dict[str, list[tuple[float, float]]] = {}
    print("\n".join(rows))
    first = 0.0
    for number in asked.only:
        setting = SETTINGS[number]
        rate, found = best_of(setting, asked.seeds, asked.steps, asked.lr)
        ends = [curve[-1] for curve in found]
        mean = statistics.fmean(ends)
        first = first or mean
        told = ", ".join(f"{end:.3f}" for end in ends)
        rows.append(f"| {setting.name} | {rate:g} | {told} | {100 * (mean / first - 1):+.1f} % |")
        print(rows[-1], flush=True)
        curves[setting.name] = [(float((n + 1) * CURVE_EVERY), y) for n, y in enumerate(found[0])]
    if asked.write:
        write_between(PAGE, "exact steps", "\n".join(rows))
    if asked.plot:
        draw(asked.plot, "held-out loss, nats per byte", "steps", curves)


if __name__ == "__main__":
    main()
