"""Stages that are far apart, in the lab: what `python benchmarks/pipeline.py wan` measures.

Agents, coordinator, lines and encryption are real, each host in a namespace of its own (docs/lab.md); trainers take
little time and compute nothing (benchmarks/stage_bench/sham_stage.py), so that the lines are what is short.  Two rows:

- three hosts with a stage each: how much of its line the middle one uses while microbatches are counted.  It sends two
  crossings for each microbatch, and gets two; those at the ends send and get one.
- three hosts with two stages, the last one held by two: what the round of that stage takes after crossings that fill
  the lines, beside one after crossings that hardly weigh anything.

Rates count whole packets.  Where the router was late by many milliseconds, the machine was measured and not the line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from stage_bench.crowd import CrowdOptions as CrowdAsked
from stage_bench.pipeline_bench import RUN_TOML
from stage_bench.sham_stage import CHUNKS

from farflung.protocol.errors import FarflungError
from farflung.protocol.limits import MICROS_PER_BATCH
from farflung.protocol.process.journal import Event, read_events
from rig.lab.emulator import HostSpec, Lab
from rig.lab_run import PORT, SAMPLE_S, Wire
from rig.nursery import Child, Nursery, end_in_turn

FAST_MBIT = 1000.0
LOOK_S = 0.05
# Run as a module it would be __main__, where the nursery's process has something else, and there its types are sought.
CROWD = (
    f"import sys; del sys.argv[1]; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); "
    "from stage_bench.crowd import main; sys.exit(main())"
)
CODEC = 'codec = "{codec}"\n'
ENDS = 0.1  # of a batch, in which the pipeline fills and drains
LINE_GOAL, ROUND_GOAL = 0.9, 1.25
ROUND_BATCH = 48  # microbatches before a round that is measured
LEAST_CHUNK_KB = -(-MICROS_PER_BATCH * 4 // (1024 * CHUNKS))  # a value of a stage for each microbatch
LIGHT_KB = 1  # of a crossing that hardly weighs anything


@dataclass(frozen=True)
class Asked:
    mbit: float = 100.0
    rtt_ms: float = 50.0
    batch: int = 200
    batches: int = 3  # that are measured; one more warms up
    crossing_kb: int = 1024  # in fp32
    codec: str = "int8"
    state_mb: int = 16  # of a stage, where its round is measured
    unit_ms: float = 5.0
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Seating:
    """What runs on the three hosts."""

    stage_of: tuple[int, ...]  # by host
    batch: int
    crossing_kb: int
    chunk_kb: int

    @property
    def stages(self) -> int:
        return max(self.stage_of) + 1


@dataclass(frozen=True)
class Seen:
    events: list[Event]  # of the coordinator
    wire: Wire
    late_s: float  # the router's worst

    @property
    def commits(self) -> list[Event]:
        """But the first, which only warms up."""
        return [event for event in self.events if event["event"] == "committed_batch"][1:]

    def opened_at(self, commit: Event, stage: int) -> float:
        """The round of this stage that made this version."""
        made = commit["rounds"][stage]["round"]
        return next(e["at"] for e in self.events if e["event"] == "opened" and e["round"] == made)

    def counting(self) -> list[tuple[float, float]]:
        """From a batch's first word to its first round."""
        begun = {event["version"]: event["at"] for event in self.events if event["event"] == "batch"}
        return [
            (
                begun[commit["rounds"][0]["version"] - 1],
                min(self.opened_at(commit, stage) for stage in range(len(commit["rounds"]))),
            )
            for commit in self.commits
        ]


def run_toml(asked: Asked, seating: Seating) -> str:
    text = RUN_TOML.format(
        rounds=asked.batches + 1,
        min_peers=len(seating.stage_of),
        chunk_kb=seating.chunk_kb,
        batch=seating.batch,
        stages=seating.stages,
        min_per_stage=1,
        rebalance_s=0.0,
    )
    before, found, after = text.rpartition(CODEC.format(codec="fp32"))
    if not found:
        raise FarflungError("the bench's run.toml names its codec in another way now")
    return before + CODEC.format(codec=asked.codec) + after


class Hosts:
    """A coordinator and three hosts with a peer each.  All of it ends with the lab."""

    def __init__(self, asked: Asked, seating: Seating, lab: Lab, folder: Path, nursery: Nursery) -> None:
        self._asked, self._seating, self._lab, self._nursery = asked, seating, lab, nursery
        self.folder = folder
        self._children: dict[str, Child] = {}

    def start(self) -> None:
        (self.folder / "run.toml").write_text(run_toml(self._asked, self._seating), encoding="utf-8")
        listen = f"{self._lab.hosts['coordinator'].address}:{PORT}"
        words = [
            "coordinate",
            str(self.folder / "run.toml"),
            "--listen",
            listen,
            "--json",
            "--exit-when-done",
        ]
        coordinator = self._start("coordinator", [*words, "--data", str(self.folder)], subprocess.PIPE)
        assert coordinator.stdout is not None
        line = coordinator.stdout.readline()
        if not line:
            raise FarflungError(f"the coordinator did not start: {self.last_words('coordinator')}")
        url = json.loads(line)["url"]
        for number, stage in enumerate(self._seating.stage_of):
            own = self.folder / f"host-{number}"
            own.mkdir()
            shutil.copy(self.folder / "run.toml", own)
            told = CrowdAsked(
                url=url,
                folder=str(own),
                seats=tuple(int(stage == each) for each in range(self._seating.stages)),
                unit_s=(self._asked.unit_ms / 1000,) * self._seating.stages,
                crossing_kb=self._seating.crossing_kb,
                coordinator_pid=os.getpid(),  # whose CPU it counts: nobody asks here
            )
            asks = msgspec.json.encode(dataclasses.asdict(told)).decode()
            words = ["-c", CROWD, "--asked", asks, "--figures", str(own / "figures.json")]
            self._start(f"host-{number}", words, None)

    def _start(self, name: str, words: list[str], stdout: int | None) -> Child:
        with (self.folder / f"{name}.log").open("w") as log:
            where = self._lab.hosts[name].namespaces
            child = self._nursery.popen(words, {}, log if stdout is None else stdout, log, where)
        self._children[name] = child
        return child

    def last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def wait(self) -> None:
        until = time.monotonic() + self._asked.timeout_s
        while any(child.poll() is None for child in self._children.values()):
            for name, child in self._children.items():
                if child.poll():
                    raise FarflungError(f"{name} ended with code {child.returncode}: {self.last_words(name)}")
            if time.monotonic() > until:
                told = self.last_words("coordinator")
                raise FarflungError(f"not done within {self._asked.timeout_s:g} s: {told}")
            time.sleep(LOOK_S)

    def end(self) -> None:
        end_in_turn(self._children.values(), 10.0)


def watched(asked: Asked, seating: Seating, nursery: Nursery) -> Seen:
    delay_ms = asked.rtt_ms / 4
    specs = [HostSpec(f"host-{n}", asked.mbit, asked.mbit, delay_ms) for n in range(len(seating.stage_of))]
    specs.append(HostSpec("coordinator", FAST_MBIT, FAST_MBIT, delay_ms))
    wire, over = Wire(), threading.Event()
    with tempfile.TemporaryDirectory(prefix="farflung-wan-") as name, Lab(specs, seed=1) as lab:
        hosts = Hosts(asked, seating, lab, Path(name), nursery)

        def watch() -> None:
            while not over.wait(SAMPLE_S):
                wire.sample(lab)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            hosts.start()
            hosts.wait()
        finally:
            over.set()
            watcher.join()
            hosts.end()
        return Seen(read_events(Path(name) / "events.jsonl"), wire, lab.effort().worst_late_s)


# ---- the two rows --------------------------------------------------------------------------------------------------


def shares_of(seen: Seen, host: str, mbit: float, cut: float = 0.0) -> list[tuple[float, float]]:
    """Of each batch: of this host's line up, and down, while microbatches were counted; `cut`: but for so much of that
    time at its beginning and at its end."""
    shares = []
    for from_s, to_s in seen.counting():
        rest_s = cut * (to_s - from_s)
        span = from_s + rest_s, to_s - rest_s
        shares.append(tuple(seen.wire.rate_mbit(host, way, *span) / mbit for way in (0, 1)))
    return shares


def rounds_s(seen: Seen, stage: int) -> list[float]:
    """From the moment in which a stage's round opens to the commit."""
    return [commit["at"] - seen.opened_at(commit, stage) for commit in seen.commits]


def line_row(asked: Asked, nursery: Nursery) -> tuple[bool, str]:
    seating = Seating((0, 1, 2), asked.batch, asked.crossing_kb, LEAST_CHUNK_KB)
    seen = watched(asked, seating, nursery)
    shares = shares_of(seen, "host-1", asked.mbit)
    up, down = (statistics.median(way) for way in zip(*shares, strict=True))
    ends = [statistics.median(max(each) for each in shares_of(seen, f"host-{n}", asked.mbit)) for n in (0, 2)]
    full = statistics.median(max(each) for each in shares_of(seen, "host-1", asked.mbit, ENDS))
    rate = statistics.median(seating.batch / (to_s - from_s) for from_s, to_s in seen.counting())
    got = (
        f"{100 * up:.0f} % up, {100 * down:.0f} % down (those at the ends {100 * ends[0]:.0f} and "
        f"{100 * ends[1]:.0f} % of theirs); {100 * full:.0f} % without a batch's first and last tenth; "
        f"{rate:.1f} microbatches/s"
    )
    what = f"line of the middle one of 3 stages, {shape_of(asked)}, batches of {asked.batch}"
    return row(what, got, f">= {100 * LINE_GOAL:.0f} %", max(up, down) >= LINE_GOAL, [seen])


def round_row(asked: Asked, nursery: Nursery) -> tuple[bool, str]:
    chunk_kb = asked.state_mb * 1024 // CHUNKS
    alone, beside = (
        watched(asked, Seating((0, 1, 1), min(asked.batch, ROUND_BATCH), kb, chunk_kb), nursery)
        for kb in (LIGHT_KB, asked.crossing_kb)
    )
    alone_s, beside_s = (statistics.median(rounds_s(seen, 1)) for seen in (alone, beside))
    got = (
        f"{beside_s:.2f} s; {alone_s:.2f} s after crossings of {LIGHT_KB} kB; {beside_s / alone_s:.2f} of it"
    )
    what = f"a round of two peers with {asked.state_mb} MB in fp32 of a stage, right after crossings as above"
    return row(what, got, f"<= {ROUND_GOAL:g}", beside_s <= ROUND_GOAL * alone_s, [alone, beside])


def shape_of(asked: Asked) -> str:
    return f"{asked.mbit:g} Mbit/s, {asked.rtt_ms:g} ms, crossings of {asked.crossing_kb} kB in {asked.codec}"


def row(what: str, got: str, goal: str, met: bool, seen: Sequence[Seen]) -> tuple[bool, str]:
    late_ms = 1000 * max(each.late_s for each in seen)
    return met, f"| {what} | {got} | {goal} | {'yes' if met else '**no**'} | {late_ms:.0f} |"


def wan(asked: Asked, nursery: Nursery) -> tuple[bool, str]:
    """Whether both goals are met, and the table."""
    if (reason := Lab.unavailable()) is not None:
        return False, f"Not measured: {reason}."
    rows = [line_row(asked, nursery), round_row(asked, nursery)]
    head = ["| what | measured | goal | met | router late, ms |", "|---|---|---|---|---|"]
    return all(met for met, _ in rows), "\n".join([*head, *(text for _, text in rows)])
