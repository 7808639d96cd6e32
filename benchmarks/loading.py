"""How fast batches come: `run.batches(workers=N)` beside a DataLoader with N workers, on rows of 1,024 tokens.

    python benchmarks/loading.py [--workers 2] [--batch 8] [--batches 3000] [--repeats 5] [--step-ms 0]

Both read the same shards on a disk, visit them in a random order, stack rows to a batch, and take a step of a model of
six values after each; `--step-ms` makes the steps longer, as a real model's are.  The agent is a stand-in that has
leased everything, so what is compared is the trainer's side alone.  Told is the median of the repeats, which take
turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung.peer.data.token_shards import TokenShards
from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import LeasesNow, LoadState
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Lease

LENGTH = 1024
SHARDS = 4


def shards_of(folder: Path, rows: int) -> TokenShards:
    tokens = np.arange(rows // SHARDS * LENGTH, dtype=np.int64) % 50_000
    for number in range(SHARDS):
        tokens.astype("<u2").tofile(folder / f"{number}.bin")
    return TokenShards(folder, LENGTH)


def leased_run(folder: Path, rows: int, batch: int) -> Run:
    """A run whose agent has leased all rows, and never freezes anything."""
    text = f"[round]\nsync_every = 10000000\n[data]\nbatch = {batch}\nlease_samples = {2**24}\n"
    folder.mkdir()
    model = nn.Linear(2, 2)
    words: list[Any] = []
    channel: Any = SimpleNamespace(
        send=lambda word: None, recv=lambda timeout_s: words.pop(0) if words else None
    )
    loop = InnerLoop(channel, model, Manifest.from_toml(text, "run.toml"))
    shared = SharedState.create(folder, loop.layout.total_elements)
    words += [shared.as_message(), LoadState(version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0)]
    loop.attach()
    words.append(LeasesNow(leases=(Lease(1, 0, 0, rows, 0),)))
    optimizer = RunSteps(torch.optim.SGD(model.parameters(), lr=0.1), loop.after_step, loop.before_step)
    return Run(SimpleNamespace(), loop, optimizer, "me")  # type: ignore[arg-type]


def rate(batches: Iterable[Any], step: Callable[[], None], count: int, warm: int) -> float:
    """Batches a second, without the first ones: processes that start are not what is measured."""
    begun = 0.0
    for number, batch in enumerate(batches):
        if number == warm:
            begun = time.perf_counter()
        assert tuple(batch.shape)[1:] == (LENGTH,) and batch.dtype == torch.int64
        step()
        if number == warm + count:
            return count / (time.perf_counter() - begun)
    raise SystemExit("too few rows for so many batches")


def by_loader(shards: TokenShards, asked: argparse.Namespace) -> float:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        time.sleep(asked.step_ms / 1000)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    loader = DataLoader(shards, asked.batch, shuffle=True, num_workers=asked.workers)
    return rate(loader, step, asked.batches, asked.warm)


def by_run(shards: TokenShards, folder: Path, asked: argparse.Namespace) -> float:
    run = leased_run(folder, len(shards), asked.batch)

    def step() -> None:
        time.sleep(asked.step_ms / 1000)
        run.step()

    return rate(run.batches(shards, workers=asked.workers), step, asked.batches, asked.warm)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "shards")
        folder.mkdir()
        shards = shards_of(folder, (asked.batches + asked.warm + 1000) * asked.batch)
        loader, ours = [], []
        for repeat in range(asked.repeats):
            loader.append(by_loader(shards, asked))
            ours.append(by_run(shards, Path(place, f"run{repeat}"), asked))
            print(f"  {loader[-1]:9.0f} {ours[-1]:9.0f} batches/s", flush=True)
    there, here = statistics.median(loader), statistics.median(ours)
    tokens = asked.batch * LENGTH
    print(f"{asked.workers} workers, {asked.batch} rows of {LENGTH} tokens, steps of {asked.step_ms} ms:")
    print(f"DataLoader    {there:9.0f} batches/s  {there * tokens / 1e6:7.1f} million tokens/s")
    print(f"run.batches   {here:9.0f} batches/s  {here * tokens / 1e6:7.1f} million tokens/s")
    ratios = [one / other for one, other in zip(ours, loader, strict=True)]
    print(f"ratio         {here / there:9.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
