"""Many seeds of the simulator's bad worlds: how many runs came to their end, waited rightly, or broke a promise.

    python benchmarks/seeds.py stages local_stages moves dense_stages neighbours [--seeds 4000] [--first 0]
                               [--processes 2] [--json]

Each word names a world of simulator/scenario.py (`Scenario.of_stages`, ...); without a word it is the plain one.
The promises are checked at every event of a run.  A seed that breaks one is named with its command, which plays it
again; one that ends before its run does has to wait by the rules, as for a state whose last holder is gone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from farflung.simulator.scenario import Scenario
from farflung.simulator.world import simulate

PLAIN, AT_ONCE = "plain", 50  # seeds that a process plays before it says how they went


def worlds() -> list[str]:
    made = [name.removeprefix("of_") for name in vars(Scenario) if name.startswith("of_")]
    return [PLAIN, *made]


def play(world: str, first: int, count: int) -> tuple[str, Counter[str], list[str]]:
    """How the runs of some seeds went, and the words about those that are bad."""
    torch.set_num_threads(1)  # vectors of a dozen values: more threads only wait for each other
    seen, bad = Counter[str](), list[str]()
    make = Scenario.of if world == PLAIN else getattr(Scenario, f"of_{world}")
    for seed in range(first, first + count):
        seen["runs"] += 1
        try:
            report = simulate(seed, make(seed))
        except Exception as error:  # whatever it is, it is this seed's, and the others are to be played
            seen["bad"] += 1
            again = " ".join(world.split("_")) if world != PLAIN else ""
            bad.append(f"python -m farflung.simulator.world {seed} {again}: {type(error).__name__}: {error}")
            continue
        seen["finished" if report.outcome == "finished" else "waited"] += 1
        seen["kills"] += report.kills
        seen["commits"] += report.version
    return world, seen, bad


def played(asked: argparse.Namespace) -> Iterator[tuple[str, Counter[str], list[str]]]:
    parts = [
        (world, first, min(AT_ONCE, asked.first + asked.seeds - first))
        for first in range(asked.first, asked.first + asked.seeds, AT_ONCE)
        for world in asked.worlds or [PLAIN]
    ]
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(play, *part) for part in parts]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C ends the parts under way as well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help=", ".join(worlds()))
    parser.add_argument("--seeds", type=int, default=200, help="of each world")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.worlds) - set(worlds()):
        parser.error(f"there is no world named {', '.join(sorted(unknown))}; there are {', '.join(worlds())}")
    found: dict[str, Counter[str]] = {}
    try:
        for world, seen, bad in played(asked):
            found.setdefault(world, Counter()).update(seen)
            for words in bad:
                print(words, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped: what was played until now", file=sys.stderr)
    print(json.dumps(found) if asked.json else "\n".join(row(*each) for each in sorted(found.items())))
    return 1 if any(seen["bad"] for seen in found.values()) else 0


def row(world: str, seen: dict[str, Any]) -> str:
    told = {what: seen.get(what, 0) for what in ("finished", "waited", "bad", "kills", "commits")}
    return (
        f"{world}: {seen['runs']} runs, {told['finished']} finished, {told['waited']} waited, {told['bad']} bad; "
        f"{told['kills']} kills, {told['commits']} commits"
    )


if __name__ == "__main__":
    sys.exit(main())
