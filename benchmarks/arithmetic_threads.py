"""What more threads do for an agent's arithmetic: the same chunks by a pool of one thread, and of several.

    python benchmarks/arithmetic_threads.py [--chunks 100] [--threads 2] [--repeats 9]

Chunks are of 1 MB of fp32 and int8; each function is the one that the agent calls, and the pool is the agent's
(peer/worker.py), from asking until the loop has heard of the last chunk.  Told is the median of the repeats, which are
taken in turns, and the load of the machine.  "control" is SHA-256, which needs no memory to speak of and no lock: what
the machine had to give.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import select
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from farflung.collectives.arithmetic.merge import merged_chunk
from farflung.compression.codec import codec_named
from farflung.compression.native import outer_step
from farflung.optim.outer import checked
from farflung.optim.recipes import outer_of
from farflung.peer.worker import Inbox, Pool
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest

ELEMENTS = 1 << 18


def functions(chunks: int) -> dict[str, Callable[[int], object]]:
    """By name; each is called with the number of a chunk."""
    codec, step = codec_named("int8"), outer_of(Manifest(), checked(outer_step()))
    delta, anchor, moment = (
        torch.randn(chunks, ELEMENTS),
        torch.randn(chunks, ELEMENTS),
        torch.zeros(chunks, ELEMENTS),
    )
    payloads = [codec.encode(chunk) for chunk in delta]

    def merge(at: int) -> bytes:
        return merged_chunk(codec, ELEMENTS, [payloads[at], payloads[at - 1]], [0.5, 0.5])

    def apply(at: int) -> None:
        step.step(anchor[at], moment[at], codec.decode(payloads[at], ELEMENTS))

    return {
        "encode": lambda at: codec.encode(delta[at]),
        "sum": merge,
        "apply": apply,
        "control": lambda at: hashlib.sha256(memoryview(anchor[at].numpy()).cast("B")),
        "hash": lambda at: hash_bytes(memoryview(anchor[at].numpy()).cast("B")),
    }


class Side:
    """An agent's loop and its arithmetic."""

    def __init__(self, threads: int) -> None:
        self._inbox = Inbox()
        self._pool = Pool("arithmetic", self._inbox.submit, threads)

    def seconds(self, work: Callable[[int], object], chunks: int) -> float:
        began, told = time.perf_counter(), list[object]()
        for at in range(chunks):
            self._pool.beside(at, partial(work, at), told.append)
        while len(told) < chunks:
            select.select([self._inbox.wake], [], [])
            self._inbox.collect()
        return time.perf_counter() - began

    def close(self) -> None:
        self._pool.close()
        self._inbox.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sides = [Side(1), Side(asked.threads)]
    for name, work in functions(asked.chunks).items():
        turns = [[side.seconds(work, asked.chunks) for side in sides] for _ in range(asked.repeats)]
        one, many = (statistics.median(each) for each in zip(*turns, strict=True))
        print(
            f"{name:7} one thread {1e3 * one:4.0f} ms, {asked.threads} threads {1e3 * many:4.0f} ms",
            end=" ",
        )
        print(f"({many / one:.2f} times as long)", flush=True)
    for side in sides:
        side.close()
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
