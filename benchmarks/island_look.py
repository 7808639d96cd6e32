"""What the ranks of an island pay for hearing the same words: a look at the agent every few steps.

    python benchmarks/island_look.py --ranks 2 --step-ms 20

Every rank computes for so long, and after each step the ranks look, or do not, as in training: over gloo on this
machine, with no word to hear and with one.  It says how many looks there were, how long one takes, and what all of it
adds to the time of training.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing

from farflung.peer.island.group import GlooGroup
from farflung.peer.island.island import Island
from farflung.peer.island.parts import SEEN, Outlook
from farflung.peer.local.words import FromTrainer, ResumeSteps, ToTrainer


class Quiet:
    """An agent that says a word with every look, or none."""

    def __init__(self, word: ToTrainer | None) -> None:
        self._word, self._said = word, False

    @property
    def channel(self) -> Quiet:
        return self

    def problem(self) -> str | None:
        return None

    def send(self, message: FromTrainer) -> None:
        pass

    def recv(self, timeout_s: float) -> ToTrainer | None:
        self._said = not self._said
        return self._word if self._said else None


def compute(matrix: torch.Tensor, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def looks(word: ToTrainer | None, steps: int, step_s: float) -> tuple[list[float], list[float], float]:
    """How long it took after each step, the waiting for a slower rank included: with a look, and without; and how long
    all of it took."""
    island = Island(GlooGroup())
    island.begin(lambda: Quiet(word))
    matrix = torch.randn(64, 64)
    looked: list[float] = []
    passed: list[float] = []
    start = 0.0
    for step in range(-SEEN - 1, steps):
        start = time.perf_counter() if step == 0 else start
        compute(matrix, step_s)
        dist.barrier()  # as a sum of gradients does: a look then waits for nobody
        began = time.perf_counter()
        told = island.tokens_of_step(None, 1, 0, Outlook(is_due=False))
        took_s = time.perf_counter() - began
        if step >= 0:  # those before are all looked at
            (looked if told else passed).append(took_s)
        while island.recv(0.0) is not None:
            pass
    return looked, passed, time.perf_counter() - start


def rank(number: int, ranks: int, port: int, steps: int, step_s: float) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    for name, word in (("no word", None), ("a word", ResumeSteps(spare=1))):
        looked, passed, all_s = looks(word, steps, step_s)
        if number == 0:
            print(
                f"{ranks} ranks, {name}: {len(looked)} looks in {steps} steps of {1e3 * all_s / steps:.0f} ms,",
                end=" ",
            )
            print(
                f"{1e6 * statistics.median(looked):.0f} us each (fastest {1e6 * min(looked):.0f});", end=" "
            )
            share = 100 * (sum(looked) + sum(passed)) / all_s
            print(
                f"{share:.2f} % of the time, {1e6 * statistics.median(passed):.0f} us of a step without",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=1000)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work: Callable[..., None] = rank
    words = (asked.ranks, port, asked.steps, asked.step_ms / 1e3)
    torch.multiprocessing.spawn(work, words, nprocs=asked.ranks)


if __name__ == "__main__":
    main()
