"""How soon two people at home, each behind a router, make their first commit: the real program behind real NATs.

    python benchmarks/routers.py [--times 3] [--hard | --rst]
    python benchmarks/routers.py --meetings 20

Each time: a coordinator with a public address, two peers in homes of their own behind routers (nftables), nothing
configured.  A closed port drops packets; --rst: it says no, and the way is 5 ms long; --hard: ports by chance.  It
tells the seconds from the second hello until the two are connected past their routers (null: never) and to the first
commit, those of a round after that, and whether both models are equal.

With --meetings two bare links meet again and again, behind both kinds of routers: how many of them did, and the seconds
from the instant until a frame had come, median and worst.  Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from rig.home_run import HomeRun
from rig.meetings import met_in
from rig.routers import Homes, Router

WAY_S = 0.005


def once(router: Router, folder: Path) -> dict[str, object]:
    with Homes(["ann", "bob"], router) as homes:
        run = HomeRun(homes, folder)
        run.coordinate()
        for name in homes.names:
            run.join(name)
        run.finish()
    first, *others = [float(each["at"]) for each in run.commits]
    models = {(folder / name / "model.safetensors").read_bytes() for name in homes.names}
    punched = [round(at - run.second_hello_at, 2) for at in run.punched_at]
    return {
        "punched_s": punched[0] if punched else None,
        "first_commit_s": round(first - run.second_hello_at, 2),
        "round_s": round(statistics.median(float(each["seconds"]) for each in run.commits), 3),
        "commits": len(others) + 1,
        "members": sorted({len(each["members"]) for each in run.commits}),
        "equal": len(models) == 1,
    }


def meetings(kind: str, router: Router, count: int) -> dict[str, object]:
    with Homes(["ann", "bob"], router) as homes:
        found = [each["seconds"] for each in met_in(homes, count)]
    met = [each for each in found if each is not None]
    return {
        "router": kind,
        "met": f"{len(met) // 2} of {count}",
        "median_s": statistics.median(met) if met else None,
        "worst_s": max(met, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--rst", action="store_true")
    parser.add_argument("--meetings", type=int, default=0)
    asked = parser.parse_args()
    if reason := Homes.unavailable():
        raise SystemExit(reason)
    if asked.meetings:
        for kind, router in (("drop", Router()), ("rst", Router(resets=True, delay_s=WAY_S))):
            print(json.dumps(meetings(kind, router, asked.meetings)), flush=True)
        return
    router = Router(hard=asked.hard, resets=asked.rst, delay_s=WAY_S if asked.rst else 0.0)
    for _ in range(asked.times):
        with tempfile.TemporaryDirectory(prefix="farflung-routers-") as folder:
            print(json.dumps(once(router, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
