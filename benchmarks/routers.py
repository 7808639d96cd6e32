"""How soon two people at home, each behind a router, make their first commit: the real program behind real NATs.

    python benchmarks/routers.py [--times 3] [--hard | --rst]
    python benchmarks/routers.py --meetings 20

Each time: a coordinator with a public address, two peers in homes of their own behind routers (nftables), nothing
configured.  A closed port drops packets; --rst: it says no, and the way is 5 ms long; --hard: ports by chance.  It
tells the seconds from the second hello until the two are connected past their routers (null: never) and to the first
commit, those of a round after that, and whether both models are equal.

    python benchmarks/routers.py --mixed [--mb 400] [--rounds 3] [--mbit 100]

With --mixed eight peers without a model (as `farflung bench allreduce` has them) on lines of so many Mbit/s take rounds
of --mb megabytes of fp32 values, a quarter of that as int8: first all of them behind routers that forward a port, then
four of these, three behind routers that let nobody in, and one behind a hard one.  The relay is as fast as a line.  It
tells a round's median of both, how many owned chunks, how many pairs met, what the relay passed, and the second round
by the first.

With --meetings two bare links meet again and again, behind both kinds of routers: how many of them did, and the seconds
from the instant until a frame had come, median and worst.  Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.console.bench.bench import BenchOptions, as_toml, check
from farflung.console.bench.figures import result_of
from farflung.protocol.errors import NoteCause
from farflung.protocol.process.journal import JOURNAL_VARIABLE, read_events
from rig.home_run import FARFLUNG, PORTS, HomeRun
from rig.meetings import met_in
from rig.routers import HOST, Homes, Router

WAY_S = 0.005
LISTEN = 29801
NAMES = ("ann", "bob", "cyd", "dan", "eve", "fay", "gus", "hal")
OPEN = Router(opens=LISTEN)
MIXED = dict.fromkeys(NAMES[:4], OPEN) | dict.fromkeys(NAMES[4:7], Router()) | {NAMES[7]: Router(hard=True)}


@dataclass
class Eight:
    """Rounds of eight peers without a model, each in a home of its own."""

    homes: Homes
    folder: Path
    mb: int
    rounds: int
    mbit: float
    _trainers: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        url, coordinator = self._coordinate()
        for name in self.homes.names:
            self._join(name, url)
        for name, trainer in self._trainers.items():
            if trainer.wait() != 0:
                said = (self.folder / f"{name}.log").read_text()[-1000:]
                raise SystemExit(f"{name} ended with {trainer.returncode}:\n{said}")
        if coordinator.wait() != 0:
            raise SystemExit((self.folder / "coordinator.log").read_text()[-1000:])
        reports = [json.loads((self.folder / f"{name}.json").read_text()) for name in self.homes.names]
        events = read_events(self.folder / "run.data" / "events.jsonl")
        opened = [each for each in events if each["event"] == "opened"]
        moved = json.loads((self.folder / "run.data" / "relay.json").read_text())["bytes"]
        met = sum(each["event"] == "note" and each.get("cause") == NoteCause.PUNCHED for each in events)
        found = result_of(reports, None)
        return {
            "round_s": found["median_seconds"],
            "identical": found["identical"],
            "owners": sum(count > 0 for count in opened[-1]["owned"]) if opened else 0,
            "pairs_met": met,
            "relayed_mb": round(moved / 1e6, 1),
        }

    def _coordinate(self) -> tuple[str, subprocess.Popen[Any]]:
        options = BenchOptions(peers=len(self.homes.names), mb=self.mb, rounds=self.rounds, codec="int8")
        manifest = check(options)
        net = manifest.net.model_copy(update={"relay": f"{self.mbit:g} Mbit/s"})
        toml = self.folder / "run.toml"
        toml.write_text(as_toml(manifest.model_copy(update={"net": net})), encoding="utf-8")
        words = [*FARFLUNG, "coordinate", "--json", "--exit-when-done", "--listen", f"0.0.0.0:{PORTS}"]
        log = (self.folder / "coordinator.log").open("w")
        process = self.homes.popen(
            HOST, [*words, "--public", self.homes.host_address, toml], stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        return str(json.loads(process.stdout.readline())["url"]), process

    def _join(self, name: str, url: str) -> None:
        words = ["--url", url, "--identity", self.folder / f"{name}.pem"]
        words += ["--figures", self.folder / f"{name}.json"]
        env = os.environ | {"OMP_NUM_THREADS": "1", JOURNAL_VARIABLE: str(self.folder / f"{name}.events")}
        if self.homes.others.get(name, self.homes.router).opens:
            env |= {"FARFLUNG_LISTEN": f"0.0.0.0:{LISTEN}"}
            env |= {"FARFLUNG_ADVERTISE": f"{self.homes.public_address(name)}:{LISTEN}"}
        with (self.folder / f"{name}.log").open("w") as log:
            trainer = [sys.executable, "-m", "farflung.console.bench.trainer", *words]
            self._trainers[name] = self.homes.popen(name, trainer, stdout=log, stderr=log, env=env)


def mixed(mb: int, rounds: int, mbit: float) -> dict[str, object]:
    told: dict[str, dict[str, object]] = {}
    for kind, others in (("dialable", dict.fromkeys(NAMES, OPEN)), ("mixed", MIXED)):
        with (
            tempfile.TemporaryDirectory(prefix="farflung-routers-") as folder,
            Homes(NAMES, Router(mbit=mbit), others) as homes,
        ):
            told[kind] = Eight(homes, Path(folder), mb, rounds, mbit).figures()
    times = float(str(told["mixed"]["round_s"])) / float(str(told["dialable"]["round_s"]))
    return {"mb": mb, "mbit": mbit, **told, "times": round(times, 2)}


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
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=100.0)
    asked = parser.parse_args()
    if reason := Homes.unavailable():
        raise SystemExit(reason)
    if asked.mixed:
        print(json.dumps(mixed(asked.mb, asked.rounds, asked.mbit)), flush=True)
        return
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
