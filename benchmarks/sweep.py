"""Many seeds of crossed worlds, in which valid frames come again at bad moments and the machines' knobs are turned.

    python benchmarks/sweep.py                     # 20,000 seeds, on all cores
    python benchmarks/sweep.py --seeds 500 --from 40000
    python benchmarks/sweep.py --seed 7 --log      # one again, with what happened in it

Prints how many came to their end, how many rightly wait, and each seed that broke a promise; exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.simulator.scenario import SimulationReport
from rig.crossed import crossed
from rig.knobs import turned
from rig.replays import ReplayingWorld

SHOWN = 20  # of the seeds that broke a promise


@dataclass(frozen=True)
class Swept:
    seed: int
    layers: tuple[str, ...]
    outcome: str = ""
    broken: str = ""  # the promise, and how
    replayed: int = 0
    knobs: dict[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()


def swept(seed: int, with_log: bool = False) -> Swept:
    scenario, layers = crossed(seed)
    with turned(seed) as knobs:
        world = ReplayingWorld(seed, scenario)
        try:
            report: SimulationReport | None = world.run()
            broken = ""
        except (
            Exception
        ) as error:  # a broken promise, or a machine that fell over: both are what a sweep looks for
            report, place = None, traceback.extract_tb(error.__traceback__)[-1]
            broken = f"{type(error).__name__} {error} ({os.path.basename(place.filename)}:{place.lineno})"
    log = tuple(world.log) if with_log else ()
    return Swept(seed, layers, report.outcome if report else "", broken, world.replayed, knobs, log)


def main() -> int:
    args = _arguments()
    if args.seed is not None:
        one = swept(args.seed, with_log=args.log)
        print(*one.log, f"{' + '.join(one.layers)}; knobs {one.knobs or 'as they are'}", sep="\n")
        print(one.broken or one.outcome, f"({one.replayed} frames came again)")
        return int(bool(one.broken))
    began, outcomes, layers, replayed = time.monotonic(), Counter[str](), Counter[str](), 0
    broken: list[Swept] = []
    seeds = range(getattr(args, "from"), getattr(args, "from") + args.seeds)
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for count, one in enumerate(pool.imap_unordered(swept, seeds, chunksize=4), start=1):
            outcomes["broken" if one.broken else "finished" if one.outcome == "finished" else "waits"] += 1
            layers.update(one.layers)
            replayed += one.replayed
            if one.broken:
                broken.append(one)
                print(f"seed {one.seed} [{' + '.join(one.layers)}] {one.broken}", flush=True)
            if count % 500 == 0:
                print(f"{count} seeds: {dict(outcomes)}", file=sys.stderr, flush=True)
    print(f"{sum(outcomes.values())} seeds in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    print(f"{replayed} frames came again; layers: {dict(layers.most_common())}")
    for one in sorted(broken, key=lambda each: each.seed)[:SHOWN]:
        print(f"again: python benchmarks/sweep.py --seed {one.seed} --log")
    return int(bool(broken))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--from", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
