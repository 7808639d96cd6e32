"""All peers of benchmarks/stages.py in one process but for their agents, which are real ones.

Started by pipeline_bench.py beside it; starts an agent for each peer, plays their trainers, kills and brings back
whom the plan of deaths (deaths.py) names, and writes at the end what was done for which version.  Everything waits in
one place, so that sixteen trainers cost less of the machine than one that computes.  Must not know how a run ended.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from stage_bench.deaths import DeathPlan, Deaths
from stage_bench.forked import Forked, forked
from stage_bench.sham_stage import ShamTrainer, Shape, model_of

from farflung.peer.agent.main import main as agent_main
from farflung.peer.crossings import crossing_hand
from farflung.peer.local.channel import those_that_hear
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.protocol.caps import parse_bytes
from farflung.protocol.errors import FarflungError, Refused
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.exit_codes import OK, code_for

LOOK_S = 0.25
AIM_S = 0.002  # between two looks at who is to die at a certain moment
TERMINATED = 143


@dataclass(frozen=True)
class CrowdOptions:
    """As JSON on the command line."""

    url: str
    folder: str
    seats: tuple[int, ...]  # by stage
    unit_s: tuple[float, ...]
    crossing_kb: int
    coordinator_pid: int
    memory: str = ""
    movable: bool = False  # each peer could hold any stage
    deaths: DeathPlan = field(default_factory=DeathPlan)
    slow_stage: int = -1  # somebody there becomes slow in the middle of each batch


class BenchCrowd:
    def __init__(self, asked: CrowdOptions, manifest: Manifest) -> None:
        self._asked = asked
        if asked.memory:  # of the agents, which are forks of this process
            crossing_hand.CROSSINGS_BYTES = parse_bytes(asked.memory)
        self.folder = Path(asked.folder)
        self.url = JoinUrl.parse(asked.url)
        model = model_of(manifest, asked.crossing_kb)
        slow = range(asked.seats[asked.slow_stage] if asked.slow_stage >= 0 else 0)
        names = tuple(f"peer-{asked.slow_stage}-{number}" for number in slow)
        self.shape = Shape(manifest, model, asked.unit_s, names)
        self._crossing = self.shape.crossing
        self.here: dict[str, ShamTrainer] = {}
        self._stages: dict[str, tuple[int, ...]] = {}
        self._done: list[ShamTrainer] = []
        self.deaths: Deaths | None = None
        self.cpu: list[dict[str, float]] = []  # at each version that somebody loaded first

    @property
    def seats(self) -> tuple[int, ...]:
        return self._asked.seats

    @property
    def version(self) -> int:
        return max((each.machine.version for each in self.here.values()), default=-1)

    def start(self) -> None:
        """The seats of each stage.  Peers that could hold any are seated evenly: then there are as many in each
        stage as in the fullest one, and those beyond the seats go once it has begun (deaths.py)."""
        stages = range(len(self.seats))
        for stage in stages:
            for number in range(max(self.seats) if self._asked.movable else self.seats[stage]):
                self.bring(f"peer-{stage}-{number}", tuple(stages) if self._asked.movable else (stage,))

    def bring(self, name: str, stages: tuple[int, ...] = ()) -> None:
        """A peer, or one that was here before, with the same key."""
        stages = self._stages.setdefault(name, stages)
        own = {"identity": str(self.folder / f"{name}.pem")}
        agent = AgentProcess.start_or_find(self._asked.url, own, forked_agent)
        self.here[name] = ShamTrainer(name, stages, self.shape, self._crossing, agent)

    def kill(self, name: str) -> None:
        """Agent and trainer at once, without a word."""
        gone = self.here.pop(name)
        if gone.agent.pid is not None:
            os.kill(gone.agent.pid, signal.SIGKILL)
        gone.close()

    def run(self) -> None:
        deaths = self.deaths = Deaths(self._asked.deaths, self, self._asked.movable)
        looked_at = 0.0
        while self.here:
            now = time.monotonic()
            ends = [each.ends_at for each in self.here.values() if each.ends_at is not None]
            until = min([now + (AIM_S if deaths.aims else LOOK_S), *ends])
            idle = {each.agent.channel: each for each in self.here.values() if each.ends_at is None}
            for channel in those_that_hear(list(idle), until - now):
                idle[channel].on_words(time.monotonic())
            self._end_works()
            now = time.monotonic()
            deaths.on_turn(now)
            if now - looked_at >= LOOK_S:
                looked_at = now
                self._look()

    def _end_works(self) -> None:
        now = time.monotonic()
        for each in self.here.values():
            while each.ends_at is not None and each.ends_at <= now:
                each.on_time()

    def _look(self) -> None:
        if self.version >= len(self.cpu):
            at = {"at": time.monotonic(), "shams": time.process_time(), "version": self.version}
            self.cpu.append(at | {"coordinator": cpu_s_with_children(self._asked.coordinator_pid)})
        for name, each in list(self.here.items()):
            if each.machine.finished:
                self._done.append(self.here.pop(name))
            elif (problem := each.agent.problem()) is not None:
                raise Refused("agent", f"{name}: {problem}")

    def close(self) -> None:
        for each in (*self.here.values(), *self._done):
            each.close()

    def told(self) -> dict[str, Any]:
        works = [
            {"stage": stage, "version": version} | dataclasses.asdict(done)
            for (stage, version), done in sorted(self.shape.works.items())
        ]
        deaths = [dataclasses.asdict(death) for death in self.deaths.all] if self.deaths is not None else []
        thinned_at = self.deaths.thinned_at if self.deaths is not None else None
        return {"works": works, "cpu": self.cpu, "deaths": deaths, "thinned_at": thinned_at}


def forked_agent(words: list[str]) -> Forked:
    return forked(agent_main, ["agent", *words])


def cpu_s_with_children(pid: int) -> float:
    """Of a process and of those that it started and that live."""
    total, fields = 0.0, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # it ended just now
            total += cpu_s_with_children(int(child))
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stage_bench.crowd")
    parser.add_argument("--asked", required=True, help="JSON")
    parser.add_argument("--figures", required=True, type=Path, help="where to write them at the end")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    asked = msgspec.json.decode(options.asked, type=CrowdOptions)
    manifest = Manifest.from_toml((Path(asked.folder) / "run.toml").read_text(encoding="utf-8"), "run.toml")
    crowd = BenchCrowd(asked, manifest)
    try:
        try:
            crowd.start()
            crowd.run()
        finally:
            crowd.close()
    except FarflungError as error:
        print(f"farflung: {error.reason if isinstance(error, Refused) else error}", file=sys.stderr)
        return code_for(error)
    aside = options.figures.with_suffix(".new")
    aside.write_text(json.dumps(crowd.told()), encoding="utf-8")
    aside.rename(options.figures)
    return OK


if __name__ == "__main__":
    sys.exit(main())
