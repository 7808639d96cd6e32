"""From the URL to the first commit: somebody types `farflung join URL` and has no file of the run.

    python benchmarks/stranger.py [--preset 125M] [--mbit 100] [--turns 1]

In the lab: a host with the coordinator and one peer that trains the preset, and a stranger with `--mbit` both ways, 50
ms of round trip.  Everything is the real program and the built-in trainer; packages are installed, nothing of the run
is on the stranger's machine.  `state`: the run's newest version is there, with its digest checked; `period`: its first
steps are taken; `counts`: a version was committed that has its work.  All seconds are from the command on.  `line`:
what the state alone takes at that rate.  Both peers and the router share this machine's processors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.protocol.errors import FarflungError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import values_of
from farflung.protocol.process.journal import JOURNAL_VARIABLE, Event, read_events
from rig.lab.emulator import Host, HostSpec, Lab

RUN = """
[run]
name = "hundred-million"
rounds = 1000
[model]
preset = "{preset}"
context = 64
[data]
source = "python-stdlib"
batch = 1
[round]
sync_every = 5
deadline_s = 600.0
"""
PATIENCE_S = 900.0
NEEDED_S = 300.0  # the goal
DELAY_MS = 12.5  # of each of two lines, there and back
# fp32: the anchor and its momentum.
STATE_BYTES = 8


class Took(NamedTuple):
    state_s: float
    period_s: float
    counts_s: float


def once(folder: Path, preset: str, mbit: float) -> Took:
    (folder / "run.toml").write_text(RUN.format(preset=preset))
    hosts = [HostSpec("host", 1000, 1000, DELAY_MS), HostSpec("stranger", mbit, mbit, DELAY_MS)]
    with Lab(hosts, seed=1) as lab:
        host, stranger = lab.hosts["host"], lab.hosts["stranger"]
        words = ["coordinate", str(folder / "run.toml"), "--listen", f"{host.address}:29800", "--plain"]
        told = farflung(host, folder, "coordinator", [*words, "--data", str(folder / "data")])
        url = until(lambda: url_in(told), "the URL")
        farflung(host, folder, "founder", ["join", url, "--plain"])
        records = folder / "data" / "events.jsonl"
        until(lambda: of(records, "committed"), "the founder's first commit")
        began = time.monotonic()
        farflung(stranger, folder, "stranger", ["join", url, "--plain"])
        events = folder / "stranger.events.jsonl"
        until(lambda: of(events, "start"), "its agent")
        me = of(events, "start")[0]["peer"]
        state = until(lambda: of(events, "sealed"), "the run's state")[0]
        steps = until(lambda: of(events, "frozen"), "the end of its first period")[0]
        commit = until(
            lambda: [each for each in of(records, "committed") if has_work_of(me, each)], "a commit"
        )[0]
        return Took(state["at"] - began, steps["at"] - began, commit["at"] - began)


def farflung(host: Host, folder: Path, name: str, words: list[str]) -> Path:
    """Where it says what it says.  The lab ends it."""
    home, log = folder / name, folder / f"{name}.log"
    home.mkdir()
    own = {
        "HOME": str(home),
        "FARFLUNG_HOME": str(home),
        JOURNAL_VARIABLE: str(folder / f"{name}.events.jsonl"),
    }
    with log.open("w") as out:
        host.popen(
            [sys.executable, "-m", "farflung", *words],
            env=os.environ | own,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return log


def url_in(log: Path) -> str:
    return next((word.strip('"') for word in log.read_text().split() if "farflung://" in word), "")


def of(path: Path, kind: str) -> list[Event]:
    return [each for each in (read_events(path) if path.exists() else []) if each["event"] == kind]


def has_work_of(peer: str, commit: Event) -> bool:
    return peer in commit["members"] and commit["weights"][commit["members"].index(peer)] > 0


def until(look: Callable[[], Any], what: str) -> Any:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if found := look():
            return found
        time.sleep(0.2)
    raise FarflungError(f"{what} did not come within {PATIENCE_S:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="125M")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--turns", type=int, default=1)
    asked = parser.parse_args()
    if why := Lab.unavailable():
        print(f"NOT RUN: {why}", file=sys.stderr)
        return 2
    values = values_of(Manifest.from_toml(RUN.format(preset=asked.preset), "run.toml").model)
    line_s = values * STATE_BYTES * 8 / (asked.mbit * 1e6)
    print(f"{values:,} values, {asked.mbit:g} Mbit/s, 50 ms: seconds from `farflung join URL` on")
    print(f"{'':8}{'line':>8}{'state':>8}{'period':>8}{'counts':>8}   goal {NEEDED_S:g}")
    for turn in range(asked.turns):
        with tempfile.TemporaryDirectory() as place:
            took = once(Path(place), asked.preset, asked.mbit)
        print(
            f"{turn + 1:<8}{line_s:>8.0f}{took.state_s:>8.0f}{took.period_s:>8.0f}{took.counts_s:>8.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
