"""What more threads would do for an agent's arithmetic: the same chunks by one thread, and by several.

    python benchmarks/arithmetic_threads.py [--chunks 100] [--threads 2] [--repeats 9]

Chunks are of 1 MB of fp32 and int8; each function is the one that the agent calls, and its chunks do not depend on each
other.  Told is the median of the repeats, which are taken in turns, and the load of the machine.  Not in it: the order
in which one chunk's state is saved, changed and hashed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from farflung.collectives.arithmetic.merge import merged_chunk
from farflung.compression.codec import codec_named
from farflung.compression.native import outer_step
from farflung.optim.outer import checked
from farflung.optim.recipes import outer_of
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
        "hash": lambda at: hash_bytes(memoryview(anchor[at].numpy()).cast("B")),
    }


def seconds(work: Callable[[int], object], chunks: int, pool: ThreadPoolExecutor | None) -> float:
    began = time.perf_counter()
    if pool is None:
        for at in range(chunks):
            work(at)
    else:
        list(pool.map(work, range(chunks)))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(asked.threads) as pool:
        for name, work in functions(asked.chunks).items():
            pairs = [
                (seconds(work, asked.chunks, None), seconds(work, asked.chunks, pool))
                for _ in range(asked.repeats)
            ]
            one, many = (statistics.median(each) for each in zip(*pairs, strict=True))
            print(
                f"{name:7} one thread {1e3 * one:4.0f} ms, {asked.threads} threads {1e3 * many:4.0f} ms",
                end=" ",
            )
            print(f"({many / one:.2f} times as long)", flush=True)
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
