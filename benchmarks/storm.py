"""A storm: many peers, and faults that come by chance: what is committed, who takes part, who comes back.

    python benchmarks/storm.py [--peers 16] [--minutes 15] [--faults-per-hour 125] [--seed 1] [--json] [--write]

Faults come as a Poisson process: 28 of 36 kill a peer (it is started again after 1 s), 8 of 36 stop one for 3 to 10 s;
besides, the coordinator is killed twice and started again at once.  Trainers are light (light_trainer.py): a step
sleeps.  Before the storm a calm minute shows what is committed without faults.  At the end the audit judges all
journals; how memory and open files grew, and what was left behind, is told by footprints.py.  `--write` puts the
result into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from footprints import LOOK_S, Footprints
from pages import write_between

from farflung.protocol.process.journal import Event
from rig.arena import Arena, included
from rig.nursery import Nursery

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
CALM_S = 60.0
KILLS, STOPS = 28, 8
RESTART_S = 1.0
STOP_S = (3.0, 10.0)


@dataclass
class Fault:
    at: float
    kind: str
    who: str
    until: float  # when it is started again, or woken
    back_s: float | None = None  # from then on until its work is in a commit


@dataclass
class Storm:
    arena: Arena
    draw: random.Random
    names: list[str]
    per_hour: float
    faults: list[Fault] = field(default_factory=list)
    pending: list[Fault] = field(default_factory=list)
    prints: Footprints = field(default_factory=Footprints)

    def rage(self, seconds: float) -> float:
        """Returns when it was over: no more faults, all that was broken mended."""
        begin = time.monotonic()
        end, next_at = begin + seconds, begin + self._pause()
        look_at = begin
        broker = [begin + seconds / 3, begin + 2 * seconds / 3]
        while (now := time.monotonic()) < end or self.pending:
            self._mend(now)
            if now >= look_at:
                self.prints.look(self.arena.processes(), now)
                look_at = now + LOOK_S
            if broker and now >= broker[0]:
                broker.pop(0)
                self.faults.append(Fault(self.arena.kill("coordinator"), "coordinator", "coordinator", now))
                self.arena.coordinate()
            if now >= next_at and now < end:
                next_at = now + self._pause()
                self._strike(now)
            time.sleep(0.02)
        return time.monotonic()

    def _pause(self) -> float:
        return self.draw.expovariate(self.per_hour / 3600.0)

    def _strike(self, now: float) -> None:
        whole = [name for name in self.names if name not in {fault.who for fault in self.pending}]
        if not whole:
            return
        who = self.draw.choice(whole)
        if self.draw.random() < KILLS / (KILLS + STOPS):
            self.pending.append(Fault(self.arena.kill(who), "kill", who, now + RESTART_S))
        else:
            self.arena.parties[who].signal(signal.SIGSTOP)
            self.pending.append(Fault(now, "stop", who, now + self.draw.uniform(*STOP_S)))

    def _mend(self, now: float) -> None:
        for fault in [each for each in self.pending if now >= each.until]:
            self.pending.remove(fault)
            self.faults.append(fault)
            if fault.kind == "kill":
                self.arena.join(fault.who)
            else:
                self.arena.parties[fault.who].signal(signal.SIGCONT)


def figures_of(storm: Storm, calm: tuple[float, float], rage: tuple[float, float]) -> dict[str, object]:
    arena = storm.arena
    events = arena.coordinator.look()
    ids = {name: arena.parties[name].id for name in storm.names}

    def within(kind: str, span: tuple[float, float]) -> list[Event]:
        return [each for each in events if each["event"] == kind and span[0] <= each["at"] < span[1]]

    commits = within("committed", rage)
    rounds = {each["round"] for each in within("opened", rage)}
    rate = [
        sum(each["steps"] for each in within("committed", span)) / (span[1] - span[0])
        for span in (calm, rage)
    ]
    shares, of_all = [], []
    for each in commits:
        broken = {
            ids[f.who] for f in storm.faults if f.kind != "coordinator" and f.at <= each["at"] < f.until
        }
        living = set(ids.values()) - broken
        shares.append(len(included(each) & living) / len(living))
        of_all.append(len(included(each)) / len(ids))
    for fault in storm.faults:
        of = ids.get(fault.who, "")
        later = (
            c["at"]
            for c in events
            if c["event"] == "committed" and c["at"] > fault.until and of in included(c)
        )
        if fault.kind == "coordinator":
            later = (c["at"] for c in events if c["event"] == "committed" and c["at"] > fault.at)
        first = next(later, None)
        fault.back_s = None if first is None else first - fault.at
    return {
        "faults": {
            kind: sum(f.kind == kind for f in storm.faults) for kind in ("kill", "stop", "coordinator")
        },
        "commits": len(commits),
        "commit_rate": sum(each["round"] in rounds for each in commits) / max(1, len(rounds)),
        "participation_of_the_living": statistics.mean(shares),
        "participation_of_all": statistics.mean(of_all),
        "goodput": rate[1] / rate[0],
        "kill_to_back_s": _quantiles([f.back_s for f in storm.faults if f.kind == "kill"]),
        "coordinator_kill_to_commit_s": _quantiles(
            [f.back_s for f in storm.faults if f.kind == "coordinator"]
        ),
        "never_back": sum(f.back_s is None for f in storm.faults),
    }


def _quantiles(values: list[float | None]) -> list[float]:
    """Median and the worst."""
    known = [value for value in values if value is not None]
    return [round(statistics.median(known), 2), round(max(known), 2)] if known else []


def as_text(asked: argparse.Namespace, found: dict[str, object], lines: list[str]) -> str:
    command = " ".join(["python", "benchmarks/storm.py", *sys.argv[1:]])
    rows = [f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in found.items()]
    head = f"`{command}`: {asked.peers} peers, {asked.minutes:g} minutes, {asked.faults_per_hour:g} faults per hour,"
    table = [
        f"{head} seed {asked.seed}, {time.strftime('%Y-%m-%d')}.",
        "",
        "| figure | value |",
        "|---|---|",
        *rows,
    ]
    return "\n".join([*table, "", "```", *lines, "```"])


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    if isinstance(value, list):
        return f"median {value[0]} s, worst {value[1]} s" if value else "none"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="many peers, and faults that come by chance")
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
        arena = Arena(Path(folder) / "run", nursery, sync_every=30)
        arena.step_s = asked.step_s
        names = [f"peer{number:02}" for number in range(asked.peers)]
        try:
            arena.begin(*names)
            calm = time.monotonic()
            time.sleep(min(CALM_S, asked.minutes * 20))
            storm = Storm(arena, random.Random(asked.seed), names, asked.faults_per_hour)
            begin = time.monotonic()
            end = storm.rage(60 * asked.minutes)
            arena.takes_part(*names)
            found = figures_of(storm, (calm, begin), (begin, end))
        finally:
            arena.close()
        found |= storm.prints.growth()
        found["processes left"] = len(storm.prints.still_running())
        found["shared memory and folders left"] = len(left := storm.prints.left_behind())
        report = arena.audit()
    text = as_text(asked, found, report.lines())
    print(json.dumps(found) if asked.json else text)
    if asked.write:
        write_between(PAGE, "storm", text)
    for each in left:
        print(f"left behind: {each}", file=sys.stderr)
    clean = not found["never_back"] and not left and not found["processes left"]
    return 0 if report.kept and clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
