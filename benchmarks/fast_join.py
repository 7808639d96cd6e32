"""Joining a run whose rounds follow each other at once: how many of them a newcomer misses.

    python benchmarks/fast_join.py [--values 262144] [--chunk-kb 16] [--joins 5] [--json]

Three peers on this machine, over encrypted loopback, with trainers that take no time for a step, and one step a round:
their rounds never pause, and each makes what it takes for a joiner to keep what it has got (`keep_results = 3`).  A
fourth peer joins, is killed once its work is in a commit, and joins again.  Seconds and rounds are those from when its
trainer has said what its model is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig.arena import Arena, included
from rig.nursery import Nursery

STANDING, NEWCOMER = ("ann", "bob", "cid"), "dan"


def committed(arena: Arena) -> int:
    return sum(event["event"] == "committed" for event in arena.coordinator.look())


def join(arena: Arena, values: str) -> dict[str, float]:
    """One newcomer, until its work counts."""
    began = time.monotonic()
    party = arena.join(NEWCOMER, FARFLUNG_VALUES=values)
    arena.event(party, lambda event: event["event"] == "trainer", "its trainer is there", began)
    there, before = time.monotonic(), committed(arena)
    arena.event(
        arena.coordinator,
        lambda event: event["event"] == "committed" and party.id in included(event),
        "its work counts",
        there,
    )
    in_s, rounds = time.monotonic() - there, committed(arena) - before
    arena.kill(NEWCOMER)
    return {"in_s": round(in_s, 2), "rounds": rounds, "rounds_per_s": round(rounds / in_s, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, default=262144, help="of the model, fp32")
    parser.add_argument("--chunk-kb", type=int, default=16)
    parser.add_argument("--joins", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder)) as nursery:
        arena = Arena(Path(folder, "run"), nursery, sync_every=1, chunk_kb=asked.chunk_kb)
        arena.step_s = 0.001
        try:
            arena.coordinate()
            for name in STANDING:
                arena.join(name, FARFLUNG_VALUES=str(asked.values))
            arena.takes_part(*STANDING)
            made = [join(arena, str(asked.values)) for _ in range(asked.joins)]
        finally:
            arena.close()
    if asked.json:
        print(json.dumps(made))
        return 0
    for each in made:
        print(
            f"in after {each['in_s']:5.1f} s, {each['rounds']:3} rounds ({each['rounds_per_s']:.1f} a second)"
        )
    print(f"median {statistics.median(each['rounds'] for each in made):g} rounds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
