"""Do regions learn like one crowd?  16 regions of 16 peers, made one every K rounds, against 256 peers in one round.

    python benchmarks/learning/regions.py flat [--regions 16] [--of 16] [--rounds 24] [--steps 20] [--seed 0]
    python benchmarks/learning/regions.py regions --every 4 [--lr 1.0] [--momentum 0.0]
    python benchmarks/learning/regions.py one

`flat` is one round of all; `regions` has a round in each region, and after every K-th the regions' states are merged in
turn: the mean of what they have learned since the last such merge is one more outer step, of a rate and a momentum of
its own (1 and 0: they are averaged).  `one` is a single region: what its peers would have without the others.

It is a sketch: a next-byte model of 28 thousand parameters, all replicas side by side in one tensor, without the
protocol and its codecs.  All settings take equally many rounds, `flat` and `regions` with the same samples.  Held-out
loss is that of the mean of all regions' states.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

CONTEXT, EMBED, WIDTH, BATCH = 8, 12, 64, 16
OUTER_RATE, OUTER_MOMENTUM = 0.8, 0.5  # of the rounds, in every setting
INNER_RATE, WARMUP_STEPS = 5e-3, 20
HELD_OUT = 40_000  # bytes, every seventh of which is predicted
SHAPES = {
    "embed": (256, EMBED),
    "first": (CONTEXT * EMBED, WIDTH),
    "first_bias": (WIDTH,),
    "second": (WIDTH, 256),
    "second_bias": (256,),
}
Params = dict[str, Tensor]


def texts() -> tuple[Tensor, Tensor]:
    """(what is learned from, what is held out): the source of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [
        b"\n".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 0) is out)
        for out in (False, True)
    ]
    learned, held = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return learned, held


def begun() -> Params:
    draw = torch.Generator().manual_seed(1)
    scales = {
        name: 0.5 if name == "embed" else shape[0] ** -0.5 if len(shape) == 2 else 0.0
        for name, shape in SHAPES.items()
    }
    return {name: torch.randn(shape, generator=draw) * scales[name] for name, shape in SHAPES.items()}


def logits_of(params: Params, contexts_nbc: Tensor) -> Tensor:
    """[n, b, 256], of n replicas side by side."""
    count, batch = contexts_nbc.shape[:2]
    index = contexts_nbc.reshape(count, batch * CONTEXT)[..., None].expand(-1, -1, EMBED)
    embedded = torch.gather(params["embed"], 1, index).reshape(count, batch, CONTEXT * EMBED)
    hidden = torch.tanh(torch.baddbmm(params["first_bias"][:, None], embedded, params["first"]))
    return torch.baddbmm(params["second_bias"][:, None], hidden, params["second"])


class Run:
    """`regions` states, each learned by `of` replicas."""

    def __init__(self, regions: int, of: int, seed: int) -> None:
        self.regions, self.of, count = regions, of, regions * of
        self.text, self.held = texts()
        start = begun()
        self.state: Params = {
            name: value.repeat(regions, *[1] * value.dim()) for name, value in start.items()
        }
        self.momentum: Params = {name: torch.zeros_like(value) for name, value in self.state.items()}
        self.anchor, self.anchor_momentum = (
            start,
            {name: torch.zeros_like(value) for name, value in start.items()},
        )
        self.first = {name: torch.zeros(count, *shape) for name, shape in SHAPES.items()}
        self.second = {name: torch.zeros(count, *shape) for name, shape in SHAPES.items()}
        self.draw, self.step = torch.Generator().manual_seed(100 + seed), 0
        self.cosine = 0.0  # between regions, of what they learned since they were merged

    def learn(self, steps: int) -> None:
        """One round of each region."""
        local = {
            name: value.repeat_interleave(self.of, 0).requires_grad_(True)
            for name, value in self.state.items()
        }
        for _ in range(steps):
            self._inner_step(local)
        for name, value in self.state.items():
            learned = value - local[name].detach().unflatten(0, (self.regions, self.of)).mean(1)
            self.momentum[name].mul_(OUTER_MOMENTUM).add_(learned)
            self.state[name] = value - OUTER_RATE * (learned + OUTER_MOMENTUM * self.momentum[name])

    def _inner_step(self, local: Params) -> None:
        count, self.step = self.regions * self.of, self.step + 1
        at = torch.randint(0, len(self.text) - CONTEXT - 1, (count, BATCH), generator=self.draw)
        logits = logits_of(local, self.text[at[..., None] + torch.arange(CONTEXT)])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), self.text[at + CONTEXT].flatten(), reduction="sum"
        )
        gradients = torch.autograd.grad(loss / BATCH, list(local.values()))
        rate = INNER_RATE * min(1.0, self.step / WARMUP_STEPS)
        with torch.no_grad():
            for (name, value), gradient in zip(local.items(), gradients, strict=True):
                self.first[name].mul_(0.9).add_(gradient, alpha=0.1)
                self.second[name].mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                spread = (self.second[name] / (1 - 0.95**self.step)).sqrt_().add_(1e-8)
                value.addcdiv_(self.first[name] / (1 - 0.9**self.step), spread, value=-rate)

    def merge(self, rate: float, momentum: float) -> None:
        """The third level: all regions go on from one state; each keeps the momentum of its rounds."""
        learned = {name: self.anchor[name] - value for name, value in self.state.items()}
        flat = torch.cat([value.flatten(1) for value in learned.values()], 1)
        unit = flat / flat.norm(dim=1, keepdim=True)
        self.cosine = ((unit @ unit.T).sum().item() / self.regions - 1) / max(1, self.regions - 1)
        for name, value in learned.items():
            step = value.mean(0)
            self.anchor_momentum[name].mul_(momentum).add_(step)
            self.anchor[name] = self.anchor[name] - rate * (step + momentum * self.anchor_momentum[name])
            self.state[name] = self.anchor[name].repeat(self.regions, *[1] * self.anchor[name].dim())

    def loss(self) -> float:
        at = torch.arange(0, min(len(self.held) - CONTEXT - 1, HELD_OUT), 7)
        mean = {name: value.mean(0, keepdim=True) for name, value in self.state.items()}
        with torch.no_grad():
            logits = logits_of(mean, self.held[at[:, None] + torch.arange(CONTEXT)][None])
            return functional.cross_entropy(logits[0], self.held[at + CONTEXT]).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", choices=("flat", "regions", "one"))
    parser.add_argument("--regions", type=int, default=16)
    parser.add_argument("--of", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="rounds between merges of the regions")
    parser.add_argument("--lr", type=float, default=1.0, help="of these merges")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    whole = asked.regions * asked.of
    regions, of = {"flat": (1, whole), "regions": (asked.regions, asked.of), "one": (1, asked.of)}[
        asked.setting
    ]
    run, losses, began = Run(regions, of, asked.seed), {}, time.process_time()
    for number in range(1, asked.rounds + 1):
        run.learn(asked.steps)
        if asked.setting == "regions" and number % asked.every == 0:
            run.merge(asked.lr, asked.momentum)
        if number % max(1, asked.rounds // 4) == 0:
            losses[number] = round(run.loss(), 4)
    found = {**vars(asked), "losses": losses, "cosine_of_regions": round(run.cosine, 3)}
    print(json.dumps(found | {"cpu_s": round(time.process_time() - began, 1)}))


if __name__ == "__main__":
    main()
