"""What a freeze and a load cost the trainer: a GPT of 100 million parameters, on the CPU or on a GPU.

    python benchmarks/freezing.py [--layers 9] [--device cuda] [--json]

benchmarks/gpu.py takes the model and the agent from here.

The agent is a stand-in that answers each frozen fragment as a commit does, so what is measured is the trainer's side
alone: from the end of an inner step to the word that all is frozen, with what goes ahead of the momentum, and from the
commit's word until the model holds the new version.  The anchor moves between them, as an agent moves it, which is in
no figure.  Told is the median of the rounds after the first three, which touch memory that later ones find; `most` is
the first rounds' worst.  `more memory`: how much larger the process became by the rounds, but for the shared memory.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from as_script import called

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import FromTrainer, Frozen, Loaded, LoadState, Provide, ResumeSteps, ToTrainer
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest

WIDTH, VOCABULARY, LENGTH = 768, 50_304, 1024
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM = 3
SHARED = ("RssShmem", "RssFile")


class Gpt(nn.Module):
    """The tensors of one; nothing here is computed with them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(WIDTH)


@dataclass(frozen=True)
class FreezingOptions:
    schedule: Annotated[str, typer.Option(help="Of [outer] schedule; with commas, one after the other.")] = (
        "blocking,overlap"
    )
    dtype: Annotated[str, typer.Option(help="Of the model: bf16,fp32.")] = "bf16,fp32"
    layers: Annotated[
        int, typer.Option(help="Of the GPT; 9 layers are 103 million parameters, 135 are 1,000 million.")
    ] = 9
    rounds: Annotated[int, typer.Option(help="Rounds, the first three of which warm up.")] = 8
    device: Annotated[str, typer.Option(help="Where the model lies: cpu, or cuda.")] = "cpu"
    threads: Annotated[int, typer.Option(help="Of torch; 0: as many as it takes.")] = 0
    json: Annotated[
        bool, typer.Option("--json", help="One JSON list on stdout, in one line, for scripts.")
    ] = False

    def __post_init__(self) -> None:
        if odd := set(self.dtype.split(",")) - set(DTYPES):
            raise UserError(f"--dtype: {', '.join(sorted(odd))} is not known; give {' or '.join(DTYPES)}")
        if self.layers < 1 or self.threads < 0:
            found = f"--layers {self.layers} --threads {self.threads}"
            raise UserError(f"at least 1 layer, and 0 threads for as many as torch takes; found {found}")
        for schedule in self.schedule.split(","):
            manifest_of(schedule)
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device {self.device}: torch finds no CUDA device here")


@dataclass
class Clock:
    """Wall and CPU seconds of this process, all its threads."""

    begun: tuple[float, float] = (0.0, 0.0)
    found: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def start(self) -> None:
        synchronize()
        self.begun = (time.perf_counter(), time.process_time())

    def stop(self, what: str) -> None:
        synchronize()
        wall, cpu = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
        self.found.setdefault(what, []).append((wall, cpu))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StandIn:
    """An agent whose every round commits: at once (blocking), or one inner step later (overlap)."""

    def __init__(self, overlaps: bool) -> None:
        self.words: list[ToTrainer] = []
        self.shared: SharedState | None = None
        self.frozen: Frozen | None = None
        self.version = 0
        self.overlaps = overlaps
        self.on_frozen: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[], None] = lambda: None

    def begin(self, shared: SharedState) -> None:
        self.shared = shared
        begin = LoadState(version=0, keep="drop", slot=0, tokens=0, steps=0, spare=0)
        self.words += [shared.as_message(), Provide(), begin]  # a model of zeros would carry nothing

    def send(self, word: FromTrainer) -> None:
        if isinstance(word, Loaded):
            self.on_loaded()
        elif isinstance(word, Frozen):
            self.frozen = word
            self.on_frozen()
            if self.overlaps:
                self.words.append(ResumeSteps(spare=1 - word.slot))
            else:
                self.commit()

    def commit(self) -> None:
        assert self.shared is not None and self.frozen is not None
        work, self.frozen = self.frozen, None
        slot = self.shared.slots[work.slot]
        self.shared.moments[0].lerp_(slot, 0.1)
        self.shared.anchor.sub_(slot, alpha=0.7)
        self.version += 1
        self.words.append(
            LoadState(
                version=self.version,
                keep="rest",
                slot=work.slot,
                tokens=work.tokens,
                steps=work.steps,
                spare=1 - work.slot,
            )
        )

    def recv(self, timeout_s: float) -> ToTrainer | None:
        return self.words.pop(0) if self.words else None


def manifest_of(schedule: str, steps: int = 0) -> Manifest:
    """`steps` of a period; 0: as few as show a whole round."""
    steps = steps or (1 if schedule == "blocking" else 2)
    return Manifest.from_toml(
        f'[round]\nsync_every = {steps}\nchunk_kb = 1024\n[outer]\nschedule = "{schedule}"\n', "run.toml"
    )


def train_a_step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.995)


def measured(
    schedule: str, dtype: str, layers: int, rounds: int, device: str, threads: int
) -> dict[str, Any]:
    logging.disable()  # that this script reads no leased data
    if threads:
        torch.set_num_threads(threads)
    model = Gpt(layers).to(device, DTYPES[dtype])
    agent = StandIn(schedule != "blocking")
    loop = InnerLoop(agent, model, manifest_of(schedule))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        agent.begin(SharedState.create(Path(folder), loop.layout.total_elements))
        on_device = device_bytes(device, anew=True)
        loop.attach()
        clock = Clock()
        before = own_bytes()
        for _ in range(rounds):
            for _ in range(1 if schedule == "blocking" else 2):
                train_a_step(model)
                take(loop, agent, clock)
        grown, more_on_device = own_bytes() - before, device_bytes(device) - on_device
    steady = {what: seconds[WARM:] for what, seconds in clock.found.items()}
    return {
        "schedule": schedule,
        "dtype": dtype,
        "device": device,
        "threads": torch.get_num_threads(),
        "values": sum(each.numel() for each in model.parameters()),
        **{f"{what}_s": statistics.median(wall for wall, _ in found) for what, found in steady.items()},
        **{f"{what}_cpu_s": statistics.median(cpu for _, cpu in found) for what, found in steady.items()},
        "most_s": max(sum(wall for wall, _ in one) for one in zip(*clock.found.values(), strict=False)),
        "more_memory_bytes": grown,
        "gpu_extra_bytes": more_on_device,
    }


def take(loop: InnerLoop, agent: StandIn, clock: Clock) -> None:
    """The end of one inner step, and all that follows from it."""
    was_frozen = agent.frozen is not None

    def frozen() -> None:
        if not agent.overlaps:
            clock.stop("freeze")

    def loaded() -> None:
        clock.stop("load")
        clock.start()

    agent.on_frozen, agent.on_loaded = frozen, loaded
    committed = agent.commit

    def commit() -> None:
        committed()
        clock.start()

    agent.commit = commit  # type: ignore[method-assign]
    if agent.overlaps and was_frozen:
        agent.commit()
    clock.start()
    loop.after_step()
    if agent.overlaps and not was_frozen:
        clock.stop("freeze")  # going ahead is in it
    agent.commit = committed  # type: ignore[method-assign]


def device_bytes(device: str, anew: bool = False) -> int:
    """The most that its tensors have taken since it was asked `anew`; 0 for the CPU."""
    if not device.startswith("cuda"):
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.max_memory_allocated(device)


def own_bytes() -> int:
    """The most that this process has held by now, without what lies in files and shared memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    most, shared = int(rows["VmHWM"].split()[0]), sum(int(rows[each].split()[0]) for each in SHARED)
    return 1024 * (most - shared)


def bench_freezing(asked: FreezingOptions) -> Iterator[dict[str, Any]]:
    """One after the other; each in a process of its own: what the one before held would be in its memory."""
    rounds = max(WARM + 1, asked.rounds)
    for schedule in asked.schedule.split(","):
        for dtype in asked.dtype.split(","):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                words = (schedule, dtype, asked.layers, rounds, asked.device, asked.threads)
                yield pool.apply(measured, words)


def row(one: dict[str, Any]) -> str:
    return (
        f"{one['schedule']:9} {one['dtype']}  {one['values'] / 1e6:.0f} million values, {one['threads']} threads:  "
        f"freeze {one['freeze_s']:.2f} s ({one['freeze_cpu_s']:.2f} s CPU)  load {one['load_s']:.2f} s "
        f"({one['load_cpu_s']:.2f} s CPU)  a round {one['freeze_s'] + one['load_s']:.2f} s, at the most "
        f"{one['most_s']:.2f} s  more memory {one['more_memory_bytes'] / 1e6:.0f} MB"
    )


def freezing(**words: object) -> None:
    """Time how long a round holds a trainer up: freeze and load of a GPT, with an agent that answers at once."""
    asked = FreezingOptions(**words)  # type: ignore[arg-type]
    found = []
    for one in bench_freezing(asked):
        found.append(one)
        if not asked.json:
            print(row(one), flush=True)
    if asked.json:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(called(freezing, FreezingOptions))
