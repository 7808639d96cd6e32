"""Our pipeline beside a star of hivemind's MoE servers, over far lines: `python benchmarks/pipeline.py beside --lab`.

SWARM's shape: a driver calls the server of each stage in turn.  For each microbatch and stage its line carries what
goes in and what comes out, and on the way back what went in once more, the gradient, and the gradient that comes back:
five crossings.  Ours go from stage to stage: two a border.  Both here in hosts of the lab with the same lines, the same
bytes in fp32, and stages that compute next to nothing; a rate of ours is from commit to commit, so its rounds are in
it, and theirs have none.  hivemind needs an environment of its own; where none is named, or it does not run, the row
says so.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeline_wan

from rig.lab.emulator import Host, HostSpec, Lab
from rig.nursery import Nursery

STAR = str(Path(__file__).resolve().with_name("hivemind_star.py"))
GOAL = 2.0
WIDTH = 1024
PATIENCE_S = 240.0
LOOK_S = 0.05
LAST_WORDS = 200


@dataclass(frozen=True)
class Asked:
    python: str | None = None  # of an environment with hivemind
    mbit: float = 200.0
    rtt_ms: float = 50.0
    crossing_kb: int = 1024
    stages: int = 3
    micros: int = 96
    opened: int = 16  # microbatches at a time, of theirs
    batches: int = 3  # of ours


class Fails(Exception):
    """What hivemind said last."""


@dataclass(frozen=True)
class Told:
    """A process of hivemind's: what it prints as JSON; other lines are its log.

    Its own children write into the same files, and may live longer than it does: so these are no pipes.
    """

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def __call__(self, key: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while True:
            over = self.process.poll() is not None or time.monotonic() > until
            for line in self.out.read_text().splitlines():
                if line.startswith("{") and line.endswith("}") and key in (found := json.loads(line)):
                    return found[key]
            if over:
                lines = [line.strip() for line in self.log.read_text().splitlines() if line.strip()]
                raise Fails(lines[-1][-LAST_WORDS:] if lines else "it said nothing")
            time.sleep(LOOK_S)


def started(host: Host, folder: Path, words: list[str]) -> Told:
    """It ends with the lab, and its children too."""
    told = folder / f"{host.name}.out", folder / f"{host.name}.log"
    with told[0].open("w") as out, told[1].open("w") as log:
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        environ.pop("PYTHONPATH", None)  # it has packages of its own
        return Told(host.popen(words, stdout=out, stderr=log, env=environ), *told)


def star(asked: Asked, python: str) -> float:
    """Microbatches a second."""
    names = ["driver", *(f"stage-{number}" for number in range(asked.stages))]
    specs = [HostSpec(name, asked.mbit, asked.mbit, asked.rtt_ms / 4) for name in names]
    with tempfile.TemporaryDirectory(prefix="farflung-star-") as name, Lab(specs, seed=1) as lab:
        folder, seed = Path(name), ""
        for stage in range(asked.stages):
            host = lab.hosts[f"stage-{stage}"]
            words = [python, STAR, "server", host.address, str(stage), str(WIDTH), seed]
            maddr = started(host, folder, words)("maddr")  # it serves now
            seed = seed or maddr
        host = lab.hosts["driver"]
        sizes = [asked.stages, asked.crossing_kb * 256 // WIDTH, WIDTH, asked.micros, asked.opened]
        told = started(host, folder, [python, STAR, "driver", host.address, *map(str, sizes), seed])
        return float(told("per_s"))


def ours(asked: Asked, nursery: Nursery) -> tuple[float, float]:
    """(microbatches a second from commit to commit, the worst by which the router was late)."""
    of = pipeline_wan.Asked(
        asked.mbit, asked.rtt_ms, asked.micros, asked.batches, asked.crossing_kb, codec="fp32"
    )
    seating = pipeline_wan.Seating(
        tuple(range(asked.stages)), asked.micros, asked.crossing_kb, pipeline_wan.LEAST_CHUNK_KB
    )
    seen = pipeline_wan.watched(of, seating, nursery)
    commits = [event["at"] for event in seen.events if event["event"] == "committed_batch"]
    return asked.micros / statistics.median(b - a for a, b in itertools.pairwise(commits)), seen.late_s


def beside_lab(asked: Asked, nursery: Nursery) -> tuple[bool, str]:
    if (reason := Lab.unavailable()) is not None:
        return False, f"Not measured: {reason}."
    per_s, late_s = ours(asked, nursery)
    met, theirs, ratio = True, "not installed", ""
    if asked.python is not None:
        try:
            rate = star(asked, asked.python)
            met, theirs, ratio = per_s >= GOAL * rate, f"{rate:.2f}", f"{per_s / rate:.1f}"
        except (Fails, OSError) as error:
            theirs = f"does not run here: {error}"
    how = (
        f"{asked.stages} stages, {asked.mbit:g} Mbit/s, {asked.rtt_ms:g} ms, crossings of {asked.crossing_kb} kB in "
        f"fp32; microbatches a second; the router was late by {1000 * late_s:.0f} ms at most"
    )
    head = ["| farflung | hivemind's star | ours over theirs | goal |", "|---|---|---|---|"]
    return met, "\n".join([f"{how}.", "", *head, f"| {per_s:.2f} | {theirs} | {ratio} | >= {GOAL:g} |"])
