"""A storm: many peers, and faults that come by chance: what is committed, who takes part, who comes back.

    python benchmarks/storm.py [--peers 16] [--minutes 15] [--harsh] [--seed 1] [--json] [--write]

Faults come as a Poisson process (tests/rig/storms.py): agents are killed and started again after 1 s, or stopped for 3
to 10 s, and the coordinator is killed.  `--harsh` is the weather in which all kinds of processes are struck, the
coordinator more than once a minute by far: killed and stopped, its children and all trainers too.  Trainers are light
(light_trainer.py): a step sleeps.  Before the storm a calm minute shows what is committed without faults.  At the end
the audit judges all journals; footprints.py measures how memory and open files grew, and what was left behind.  Exit
code 1: a promise was broken, a traceback was written, the guard threw work away, or something is left over.  `--write`
puts the result into docs/reliability.md.

    python benchmarks/storm.py --harsh --peers 4 --seed 5
"""

from __future__ import annotations

import argparse
import json
import random
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
from rig.storms import CALM, HARSH, Storm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
CALM_S = 60.0


@dataclass
class Prints:
    """Looks at what processes hold, every few seconds."""

    arena: Arena
    found: Footprints = field(default_factory=Footprints)
    at: float = 0.0

    def due(self, now: float) -> None:
        if now >= self.at:
            self.found.look(self.arena.processes(), now)
            self.at = now + LOOK_S


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
        broken = {ids[f.who] for f in storm.faults if f.who in ids and f.at <= each["at"] < f.until}
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
        if fault.who == "coordinator":
            later = (c["at"] for c in events if c["event"] == "committed" and c["at"] > fault.at)
        first = next(later, None)
        fault.back_s = None if first is None else first - fault.at
    return {
        "faults": dict(storm.killed),
        "commits": len(commits),
        "commit_rate": sum(each["round"] in rounds for each in commits) / max(1, len(rounds)),
        "participation_of_the_living": statistics.mean(shares),
        "participation_of_all": statistics.mean(of_all),
        "goodput": rate[1] / rate[0],
        "kill_to_back_s": _quantiles([f.back_s for f in storm.faults if f.kind == "agent killed"]),
        "coordinator_kill_to_commit_s": _quantiles(
            [f.back_s for f in storm.faults if f.kind == "coordinator killed"]
        ),
        "never_back": sum(f.back_s is None for f in storm.faults),
        "ended by themselves": dict(storm.ended) or "none",
        "rounds whose work the guard threw away": len(storm.dropped()),
        "tracebacks": len(storm.tracebacks()),
    }


def _quantiles(values: list[float | None]) -> list[float]:
    """Median and the worst."""
    known = [value for value in values if value is not None]
    return [round(statistics.median(known), 2), round(max(known), 2)] if known else []


def as_text(asked: argparse.Namespace, found: dict[str, object], lines: list[str]) -> str:
    command = " ".join(["python", "benchmarks/storm.py", *sys.argv[1:]])
    rows = [f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in found.items()]
    per_hour = sum((HARSH if asked.harsh else CALM).values())
    head = f"`{command}`: {asked.peers} peers, {asked.minutes:g} minutes, {per_hour:g} faults per hour,"
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
    parser.add_argument("--harsh", action="store_true", help="strike all kinds of processes, and more often")
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
            weather = HARSH if asked.harsh else CALM
            prints = Prints(arena)
            storm = Storm(arena, random.Random(asked.seed), names, weather, prints.due)
            begin = time.monotonic()
            end = storm.rage(60 * asked.minutes)
            arena.takes_part(*names)
            found = figures_of(storm, (calm, begin), (begin, end))
        finally:
            arena.close()
        found |= prints.found.growth()
        found["processes left"] = len(prints.found.still_running())
        found["shared memory and folders left"] = len(left := prints.found.left_behind())
        report = arena.audit()
    text = as_text(asked, found, report.lines())
    print(json.dumps(found) if asked.json else text)
    if asked.write:
        write_between(PAGE, "storm", text)
    for each in left:
        print(f"left behind: {each}", file=sys.stderr)
    for each in storm.tracebacks():
        print(each, file=sys.stderr)
    clean = not (
        found["never_back"] or left or found["processes left"] or found["tracebacks"] or storm.dropped()
    )
    return 0 if report.kept and clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
