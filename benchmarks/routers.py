"""How soon two people at home, each behind a router, make their first commit: the real program behind real NATs.

    python benchmarks/routers.py [--times 3] [--hard]

Each time: a coordinator with a public address, two peers in homes of their own behind routers (nftables; --hard: with
ports by chance), nothing configured.  Told are the seconds from the second hello to the first commit, those of a round
after that, and that both models are equal.  Needs root, iproute2 and nftables.
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
from rig.routers import Homes, Router


def once(router: Router, folder: Path) -> dict[str, object]:
    with Homes(["ann", "bob"], router) as homes:
        run = HomeRun(homes, folder)
        run.coordinate()
        for name in homes.names:
            run.join(name)
        run.finish()
    first, *others = [float(each["at"]) for each in run.commits]
    models = {(folder / name / "model.safetensors").read_bytes() for name in homes.names}
    return {
        "first_commit_s": round(first - run.second_hello_at, 2),
        "round_s": round(statistics.median(float(each["seconds"]) for each in run.commits), 3),
        "commits": len(others) + 1,
        "members": sorted({len(each["members"]) for each in run.commits}),
        "equal": len(models) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--hard", action="store_true")
    asked = parser.parse_args()
    if reason := Homes.unavailable():
        raise SystemExit(reason)
    for _ in range(asked.times):
        with tempfile.TemporaryDirectory(prefix="farflung-routers-") as folder:
            print(json.dumps(once(Router(hard=asked.hard), Path(folder))), flush=True)


if __name__ == "__main__":
    main()
