"""A peer that trains alone is ended at random moments, and joined again: does the run go on from where it was?

    python benchmarks/last_copy.py [ENDS] [SEED] [--values N]

Real processes over encrypted loopback, the default run file but for short rounds, no checkpoints, and a trainer that
takes no computing time.  The peer is killed with -9, or asked to leave as by Ctrl-C; every fifth time it is killed
once more while it has hardly begun.  Then the same command is given again.  It went on if the next version that
commits is the one after the newest committed; nobody else is there to give it any state.  At the end every version
must have been committed once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig.arena import Arena, Party
from rig.nursery import Nursery
from rig.waiting import LONG_S

HARDLY_S = 0.8  # after its start: within this it is let in and reads what it kept


def main(ends: int, seed: int, values: int, folder: Path) -> int:
    draw, took = random.Random(seed), []
    with Nursery(folder) as nursery:
        arena = Arena(folder / "run", nursery, min_peers=1, go_back_after_s=3600.0)
        arena.keep, arena.saves, arena.step_s = "100 GB", False, 0.002
        arena.coordinate()
        join(arena, values)
        version, counts = wait(arena, 0)[0], dict.fromkeys(("killed", "interrupted", "early"), 0)
        try:
            for number in range(ends):
                how = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
                early = number % 5 == 4
                time.sleep(draw.uniform(0.0, 0.6))  # the moment of the end is what is tried here
                version = end(arena, how)
                counts["killed" if how == signal.SIGKILL else "interrupted"] += 1
                if early:
                    join(arena, values)
                    time.sleep(draw.uniform(0.0, HARDLY_S))
                    version = max(version, end(arena, signal.SIGKILL))
                    counts["early"] += 1
                join(arena, values)
                reached, after_s = wait(arena, version)
                assert reached == version + 1, f"after end {number}: {reached} follows {version}"
                took.append(after_s)
        finally:
            for name in list(arena.parties):
                arena.kill(name)
    made = [each["version"] for each in arena.coordinator.events if each["event"] == "committed"]
    assert made == list(range(1, len(made) + 1)), "a version was committed twice, or none"
    log = (folder / "run" / "ann.log").read_text()
    told = log.count("of the state lies on this peer's own disk")
    print(
        f"{len(took)} of {ends} went on from the newest committed version ({counts['killed']} kill -9, "
        f"{counts['interrupted']} Ctrl-C, {counts['early']} killed again while starting); {made[-1]} versions, each "
        f"committed once; read from its own disk {told} times; next commit {statistics.median(took):.1f} s after the "
        f"start, at most {max(took):.1f} s"
    )
    return 0


def join(arena: Arena, values: int) -> Party:
    return arena.join("ann", FARFLUNG_VALUES=str(values))


def newest(arena: Arena) -> int:
    arena.coordinator.look()
    return max(
        (each["version"] for each in arena.coordinator.events if each["event"] == "committed"), default=0
    )


def wait(arena: Arena, version: int) -> tuple[int, float]:
    """The first version that is committed after this one, and how long after the start of the peer."""
    began = time.monotonic()
    arena.until(lambda: newest(arena) > version, f"version {version + 1}", LONG_S)
    found = [e for e in arena.coordinator.events if e["event"] == "committed" and e["version"] > version]
    return int(found[0]["version"]), time.monotonic() - began


def end(arena: Arena, how: int) -> int:
    """The newest committed version, once nothing of it can commit any more."""
    ann = arena.parties["ann"]
    assert ann.process is not None
    if how == signal.SIGKILL:
        arena.kill("ann")
    else:
        ann.signal(how)
        arena.reap("ann")
    before = -1
    while before != (before := newest(arena)):
        time.sleep(0.1)  # what it had told is committed in a moment, or never
    return before


if __name__ == "__main__":
    asked = argparse.ArgumentParser()
    asked.add_argument("ends", nargs="?", type=int, default=100)
    asked.add_argument("seed", nargs="?", type=int, default=1)
    asked.add_argument("--values", type=int, default=65536)
    said = asked.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        sys.exit(main(said.ends, said.seed, said.values, Path(place)))
