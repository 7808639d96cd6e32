"""What does a newcomer's optimizer cost a run, and what do small first steps save?

    python benchmarks/learning/newcomer.py [--rounds 15] [--period 20] [--seeds 3]

Peers train in rounds (plain mean of what they learned); then half of them are replaced by newcomers, whose optimizers
are fresh, or fresh with small first steps (the default).  The data is the same for all.  Shown is the held-out loss of
a newcomer's own model at the end of its first period, and of the run's model after its first rounds, as the difference
to a run in which nobody was replaced.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from tiny_gpt import GPTConfig, TinyGPT, build, evaluate
from torch import nn
from torch.optim import AdamW

from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.trainer.run_optimizer import RunSteps

CONFIG = GPTConfig(layers=2, width=32, heads=4, context=64)
PEERS, BATCH, CLIP = 4, 4, 1.0
WAYS = ("nobody is replaced", "fresh", "fresh, small first steps")
CORPUS = load_corpus()


class Peer:
    def __init__(self, model: TinyGPT, betas: tuple[float, float]) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = AdamW(self.model.parameters(), 6e-3, betas)
        self.steps = RunSteps(self.optimizer, lambda: None)

    def learn(self, steps: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(CORPUS.train.numel() - CONFIG.context - 1, (BATCH,), generator=dice)
            rows = [CORPUS.train[start : start + CONFIG.context + 1] for start in starts]
            self.model(torch.stack(rows).to(torch.int64)).loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()


def a_round(peers: list[Peer], period: int, seed: int) -> float:
    """Everybody learns, and takes the mean; what the last one had learned alone, as its held-out loss."""
    for number, peer in enumerate(peers):
        peer.learn(period, 1000 * seed + number)
    alone = evaluate(peers[-1].model, CORPUS.held_out)
    with torch.no_grad():
        for same in zip(*(peer.model.parameters() for peer in peers), strict=True):
            mean = torch.stack([p.detach() for p in same]).mean(0)
            for parameter in same:
                parameter.copy_(mean)
    return alone


def replaced(peers: list[Peer], way: str, betas: tuple[float, float]) -> None:
    for number in range(PEERS // 2, PEERS if way != WAYS[0] else 0):
        peers[number] = peer = Peer(peers[0].model, betas)
        if way == WAYS[2]:
            peer.steps.start_small(10)


def losses(way: str, betas: tuple[float, float], seed: int, asked: argparse.Namespace) -> list[float]:
    peers = [Peer(build(CONFIG, seed), betas) for _ in range(PEERS)]
    for number in range(asked.rounds):
        a_round(peers, asked.period, 100 * seed + number)
    replaced(peers, way, betas)
    found: list[float] = []
    for number in range(3):
        alone = a_round(peers, asked.period, 100 * seed + 50 + number)
        found += [alone] if number == 0 else []
        found.append(evaluate(peers[0].model, CORPUS.held_out))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="before the newcomers come")
    parser.add_argument("--period", type=int, default=20, help="steps between two rounds")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| betas | newcomers | own model, first period | run, 1 round | 2 rounds | 3 rounds |")
    print("|---|---|---|---|---|---|")
    for betas in ((0.9, 0.95), (0.9, 0.999)):
        normal = [losses(WAYS[0], betas, seed, asked) for seed in range(asked.seeds)]
        told = " | ".join(f"{statistics.mean(each):.4f}" for each in zip(*normal, strict=True))
        print(f"| {betas[0]}, {betas[1]} | {WAYS[0]} | {told} |", flush=True)
        for way in WAYS[1:]:
            rows = [losses(way, betas, seed, asked) for seed in range(asked.seeds)]
            more = [
                [a - b for a, b in zip(row, base, strict=True)]
                for row, base in zip(rows, normal, strict=True)
            ]
            told = " | ".join(f"{statistics.mean(each):+.4f}" for each in zip(*more, strict=True))
            print(f"| {betas[0]}, {betas[1]} | {way} | {told} |", flush=True)


if __name__ == "__main__":
    main()
