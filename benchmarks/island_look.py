"""What the ranks of an island pay for hearing the same words: one look after every step.

    python benchmarks/island_look.py --ranks 2 --step-ms 20

Every rank computes for so long and then takes its look, over gloo on this machine, with no word to hear and with one.
It says how much longer a step is with a look than without, in the middle of all steps.
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
from farflung.peer.local.words import FromTrainer, Resume, ToTrainer


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


def looks(word: ToTrainer | None, steps: int, step_s: float) -> list[float]:
    """How long each look took, the waiting for a slower rank included."""
    island = Island(GlooGroup())
    island.begin(lambda: Quiet(word))
    matrix = torch.randn(64, 64)
    times = []
    for _ in range(steps):
        compute(matrix, step_s)
        dist.barrier()  # as a sum of gradients does: a look then waits for nobody
        began = time.perf_counter()
        island.tokens_of_step(None, 1, 0)
        times.append(time.perf_counter() - began)
        while island.recv(0.0) is not None:
            pass
    return times


def rank(number: int, ranks: int, port: int, steps: int, step_s: float) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    for name, word in (("no word", None), ("a word", Resume(spare=1))):
        times = looks(word, steps, step_s)
        if number == 0:
            middle = statistics.median(times)
            print(
                f"{ranks} ranks, steps of {1e3 * step_s:g} ms, {name}: {1e6 * middle:.0f} us a look,", end=" "
            )
            print(f"{100 * middle / step_s:.2f} % of a step (fastest tenth: {tenth(times):.0f} us)")
    dist.destroy_process_group()


def tenth(times: list[float]) -> float:
    return 1e6 * sorted(times)[len(times) // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work: Callable[..., None] = rank
    words = (asked.ranks, port, asked.steps, asked.step_ms / 1e3)
    torch.multiprocessing.spawn(work, words, nprocs=asked.ranks)


if __name__ == "__main__":
    main()
