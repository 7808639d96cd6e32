"""The coordinator is cut off from its peers for long: how many committed rounds are lost.  In virtual time.

    python benchmarks/cut_lines.py [--seeds 500] [--first 0] [--json]

Two worlds for each seed, played by the simulator with its promises checked at every event.  In the first the
coordinator loses the lines to all its peers for ten times `go_back_after_s`, while a stranger gets through, mostly with
an older checkpoint.  In the second one peer is cut off with the newest state, and all others are killed: they go back
to a checkpoint, and the peer, when it comes back, drops what they gave up.
A round counts as lost if a living peer held its version when the lines were cut, and the run has it no more at the end
(first world); that is a broken promise, P20, and the seed is named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable

import torch

from farflung.simulator.invariants import Broken
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World

WORLDS: dict[str, Callable[[int], Scenario]] = {
    "cut off from all": Scenario.cut_off_from_all,
    "cut off from one": Scenario.cut_off_from_one,
}


def play(name: str, seed: int) -> Counter[str]:
    """What happened in one run."""
    world, seen = World(seed, WORLDS[name](seed)), Counter({"runs": 1})
    try:
        report = world.run()
    except Broken as broken:
        print(f"seed {seed}, {name}: {broken}", file=sys.stderr)
        return seen + Counter({"broken": 1})
    at_cut = next(at for at, line in enumerate(report.log) if "is cut off from" in line)
    before = any("CommittedRound" in line for line in report.log[:at_cut])
    after = any("CommittedRound" in line for line in report.log[at_cut:])
    seen["finished"] = report.outcome == "finished"
    seen["cut in its midst"] = before and after
    seen["went back"] = any(line.endswith("RolledBack") for line in report.log)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # vectors of a dozen values: more threads only wait for each other
    found = {name: Counter[str]() for name in WORLDS}
    for seed in range(asked.first, asked.first + asked.seeds):
        for name, seen in found.items():
            seen.update(play(name, seed))
    if asked.json:
        print(json.dumps(found))
    else:
        for name, seen in found.items():
            told = ", ".join(f"{count} {what}" for what, count in seen.items() if what != "runs")
            print(f"{name}: {seen['runs']} runs: {told}; {seen['broken']} broke a promise")
    return 1 if any(seen["broken"] for seen in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
