"""What a peer's own arithmetic of one round costs, phase by phase, beside what the memory and the hash allow.

    python benchmarks/round_phases.py [--values 25000000] [--codec int8] [--gather-codec int8] [--repeats 9]

A peer encodes its pseudo-gradient (with the hash of each payload), applies the results (what the chunks were goes into
a file first) and seals the version.  Here that is one thread and the product's own `OuterState`, without sockets; each
figure is the median of the repeats, in CPU seconds (user and system) and in seconds of the clock.  The rows below are
the ideals: one copy of the pseudo-gradient, one pass over parameters and momentum there and back, and the same hash
over what is sealed, in one go.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from farflung.collectives.round.effects import Roll
from farflung.compression.codec import codec_named
from farflung.compression.native import outer_step
from farflung.optim.outer import checked
from farflung.optim.recipes import outer_of
from farflung.peer.machine.effects import Encode
from farflung.peer.state.outer_state import Files, OuterState, unnamed_file
from farflung.protocol.digests import hash_bytes
from farflung.protocol.manifest import Manifest, RoundSection
from farflung.protocol.model_schema import ModelSchema, TensorSpec

ELEMENTS = 1 << 18  # of a chunk: 1 MB of fp32
Times = tuple[float, float]  # CPU seconds, seconds


class PeerArithmetic:
    """One peer with a model of so many values; every round contributes the same and applies the same."""

    def __init__(self, values: int, codec: str, gather_codec: str, folder: Path) -> None:
        self.chunks = -(-values // ELEMENTS)
        count = self.chunks * ELEMENTS
        model = ModelSchema(
            (TensorSpec("w", (count,), "float32", "param"),), ELEMENTS, self.chunks, self.chunks, bytes(32)
        )
        rules = RoundSection(codec=codec, gather_codec=gather_codec)
        files = Files(unnamed_file(folder), unnamed_file(folder))
        generator = torch.Generator().manual_seed(1)
        self.slot = torch.randn(count, generator=generator).mul_(1e-3)
        outer = outer_of(Manifest(), checked(outer_step()))
        self.state = OuterState(torch.randn(count, generator=generator), model, rules, outer, files=files)
        self.codec, self.version = codec, 0
        self.results = [codec_named(gather_codec).encode(part) for part in self.slot.view(self.chunks, -1)]
        self.state.choose_paths()
        self.digest = self.seal()

    def encode(self) -> None:
        effect = Encode(self.version, 0, self.codec, tuple(range(self.chunks)))
        hashes = [
            hash_bytes(payload)
            for payloads, problem in self.state.encode(self.slot, effect)
            for payload in payloads.values()
        ]
        assert len(hashes) == self.chunks
        self.state.resolve(self.slot, used=True)

    def apply(self) -> None:
        self.state.keep_before(0, self.version)
        self.version += 1
        for chunk, payload in enumerate(self.results):
            self.state.roll(Roll(chunk, self.version, payload))

    def seal(self) -> bytes:
        return self.state.seal()


def timed(work: Callable[[], object]) -> Times:
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - began


def ideals(peer: PeerArithmetic) -> dict[str, Callable[[], object]]:
    count = peer.slot.numel()
    theta, momentum, delta = peer.slot.numpy(), np.zeros(count, np.float32), np.empty(count, np.float32)
    sealed = memoryview(np.ones(2 * count, np.float32)).cast("B")
    return {
        "one copy of the values": lambda: np.copyto(delta, theta),
        "one pass over both parts": lambda: (
            np.add(momentum, 1.0, out=momentum),
            np.add(delta, 1.0, out=delta),
        ),
        "one hash of both parts": lambda: hash_bytes(sealed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--gather-codec", default="int8")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache", help="where a peer keeps its files"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    peer = PeerArithmetic(asked.values, asked.codec, asked.gather_codec, asked.folder)
    phases = {"encode": peer.encode, "apply": peer.apply, "seal": peer.seal}
    taken: dict[str, list[Times]] = {name: [] for name in phases}
    for repeat in range(asked.repeats + 1):
        for name, work in phases.items():
            times = timed(work)
            if repeat:  # the first round takes the memory
                taken[name].append(times)
    told = {name: tuple(map(statistics.median, zip(*each, strict=True))) for name, each in taken.items()}
    show("encode + apply + seal", *map(sum, zip(*told.values(), strict=True)))
    for name, times in told.items():
        show(name, *times)
    for name, ideal in ideals(peer).items():
        turns = [timed(ideal) for _ in range(asked.repeats)]
        show(name, *map(statistics.median, zip(*turns, strict=True)))
    print(
        f"digest {peer.state.digests[0].hex()[:16]}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    )


def show(name: str, cpu: float, wall: float) -> None:
    print(f"{name:26} {cpu:7.3f} CPU s {wall:7.3f} s", flush=True)


if __name__ == "__main__":
    main()
