"""Joining a run while it trains, in the lab: how long it takes, what it costs the donors, and what a crash costs.

    python benchmarks/join.py [ROW ...] [--mb 200] [--scale 1] [--json]
    python benchmarks/join.py --list

Three donors with 100 Mbit/s up, a joiner with 300 Mbit/s down, 50 ms round trip; `--mb` of parameters, and as much
momentum.  The donors make a round, pause as if for inner steps, and so on.  `ideal` is the state over the joiner's
rate; a join lasts from the moment when the joiner has said what its model is until the run's state is its own, with
its digest checked.  `--scale 0.25`: all lines at a quarter of their rates, where the machine is too slow for the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.console.bench.bench import BenchOptions, BenchParty
from farflung.protocol.errors import FarflungError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import JOURNAL_VARIABLE, Event, read_events
from rig.lab.emulator import HostSpec
from rig.lab_run import LabRun, Setting

DONORS = ("donor-0", "donor-1", "donor-2")
JOINER = "joiner"
DELAY_MS = 12.5
# A donor whose state is not what it says once a joiner is there: one bit of each piece is another one.  Until then it
# is honest, or a run whose founder it happens to be would never begin.
LIAR = """
import os
import farflung.peer.state.outer_state as state
true = state.OuterState.chunk_bytes
def false(self, chunk):
    raw = bytearray(true(self, chunk)); raw[7] ^= os.path.exists({when!r}); return bytes(raw)
state.OuterState.chunk_bytes = false
"""


@dataclass(frozen=True)
class Asked:
    mb: int
    scale: float
    pause_s: float

    @property
    def state_bits(self) -> float:
        return 8 * 2 * self.mb * 1e6

    @property
    def pieces(self) -> int:
        return -(-self.mb * 10**6 // (1024 * 1024))

    @property
    def ideal_s(self) -> float:
        return self.state_bits / (300e6 * self.scale)


@dataclass
class Row:
    name: str
    got: str
    ideal: str
    goal: str
    met: bool
    late_ms: float


@dataclass(frozen=True)
class JoinSetting(Setting):
    @property
    def manifest(self) -> Manifest:
        base = super().manifest
        run = base.run.model_copy(update={"rounds": 10_000, "min_peers": len(DONORS), "max_peers": 16})
        rounds = base.round.model_copy(update={"keep_results": 3, "deadline_s": 300.0})
        return base.model_copy(update={"run": run, "round": rounds})


class JoinRun(LabRun):
    """Donors from the start; joiners when they are called."""

    def __init__(self, asked: Asked, liar: str = "") -> None:
        up, down = 100 * asked.scale, 300 * asked.scale
        hosts = [HostSpec(name, up, down, DELAY_MS) for name in (*DONORS, JOINER)]
        options = BenchOptions(peers=len(hosts), mb=asked.mb, rounds=100, codec="int8")
        super().__init__(JoinSetting(options, hosts, HostSpec("coordinator", 1000, 1000, DELAY_MS)))
        self.asked, self._liar = asked, liar
        self._joins = 0

    def _join(self, name: str, url: str, number: int) -> BenchParty:
        self.url = url
        if name == JOINER:
            return BenchParty(name, subprocess.Popen(["true"], text=True), self.folder)
        more = {}
        if name == self._liar:
            place = self.folder / "liar"
            place.mkdir()
            when = str(self.folder / f"{JOINER}-1.go")
            (place / "sitecustomize.py").write_text(LIAR.format(when=when))
            more["PYTHONPATH"] = f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return self._worker(name, name, ["--pause", str(self.asked.pause_s)], more)

    def _worker(self, host: str, name: str, words: list[str], more: dict[str, str]) -> BenchParty:
        script = str(Path(__file__).with_name("join_worker.py"))
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | more
        environ[JOURNAL_VARIABLE] = str(self.folder / f"{name}.events")
        command = [sys.executable, script, "--url", self.url, "--told", str(self.folder / f"{name}.told")]
        command += ["--identity", str(self.folder / f"{host}.pem"), *words]
        with (self.folder / f"{name}.log").open("w") as log:
            return BenchParty(
                name,
                self.lab.hosts[host].popen(command, stdout=log, stderr=log, text=True, env=environ),
                self.folder,
            )

    # ---- watching ------------------------------------------------------------------------------------------

    def told(self, name: str, what: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.told"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [word for word in map(json.loads, lines) if word["what"] == what]

    def version(self) -> int:
        loads = [self.told(name, "load") for name in DONORS]
        return min((words[-1]["version"] if words else -1) for words in loads)

    def wait_for_version(self, version: int) -> None:
        self.wait_until(lambda: self.version() >= version, f"version {version}")

    def settle(self) -> None:
        """Up to version 1 on lines that are faster: the donors' own first state is not what is measured."""
        for name in DONORS:
            self.lab.set_rate(name, up_mbit=400, down_mbit=400)
        self.wait_for_version(1)
        for name in DONORS:
            self.lab.set_rate(name, up_mbit=100 * self.asked.scale, down_mbit=300 * self.asked.scale)

    def rounds(self) -> dict[int, tuple[float, float]]:
        """Version that a round made -> when the first donor was told its plan, and the last one of its commit."""
        plans: dict[int, list[float]] = {}
        commits: dict[int, list[float]] = {}
        for name in DONORS:
            numbers = {}
            for event in self.events(name):
                if event["event"] == "plan":
                    numbers[event["round"]] = event["at"]
                elif event["event"] == "committed" and event["round"] in numbers:
                    plans.setdefault(event["version"], []).append(numbers[event["round"]])
                    commits.setdefault(event["version"], []).append(event["at"])
        whole = [version for version in plans if len(plans[version]) == len(DONORS)]
        return {version: (min(plans[version]), max(commits[version])) for version in whole}

    # ---- joining -------------------------------------------------------------------------------------------

    def start_joiner(self) -> BenchParty:
        self._joins += 1
        name = f"{JOINER}-{self._joins}"
        party = self._worker(JOINER, name, ["--joiner", "--go", str(self.folder / f"{name}.go")], {})
        self.parties[JOINER] = party
        self.wait_until(lambda: bool(self.told(name, "ready")), "a joiner")
        return party

    def go(self, party: BenchParty) -> None:
        (self.folder / f"{party.name}.go").touch()

    def pieces(self, party: BenchParty) -> list[int]:
        return [event["chunk"] for event in read_events(party.journal) if event["event"] == "piece"]

    def has_fetched(self, party: BenchParty, pieces: float) -> bool:
        return len(self.pieces(party)) >= pieces

    def seconds(self, party: BenchParty) -> tuple[float, float]:
        """From when to when the join lasted."""
        self.wait_until(lambda: party.process.poll() is not None, "the join")
        if party.process.returncode:
            raise FarflungError(f"the joiner ended: {self.log(party.name)[-800:]}")
        return self.told(party.name, "attach")[0]["at"], self.told(party.name, "load")[0]["at"]

    def kill(self, party: BenchParty) -> None:
        """With its agent, at once."""
        start: Event = next(event for event in read_events(party.journal) if event["event"] == "start")
        os.kill(start["pid"], signal.SIGKILL)
        party.process.kill()
        party.process.wait()
        self.parties[JOINER] = BenchParty(JOINER, subprocess.Popen(["true"], text=True), self.folder)

    def late_ms(self) -> float:
        return 1000 * self.lab.effort().worst_late_s


# ---- rows ------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def join(asked: Asked) -> list[Row]:
    """Between two rounds, and across one, in turn; beside rounds without any joiner.

    Rounds differ by a tenth by themselves, so a figure of some percent wants several of each kind.
    """
    with JoinRun(asked) as run:
        run.settle()
        between, across, joins = [], [], []
        for kind in ("between", "across", "across", "between", "across", "across"):
            party = run.start_joiner()
            run.wait_for_version(run.version() + 1)
            if kind == "across":  # begun so late that the donors' next round falls into it
                time.sleep(asked.pause_s - asked.ideal_s / 3)
            run.go(party)
            begin, end = run.seconds(party)
            (between if kind == "between" else across).append(end - begin)
            joins.append((begin, end))
            say(f"{kind}: {end - begin:.2f} s")
        run.wait_for_version(run.version() + 3)
        late = run.late_ms()
        plain, with_join = [], []
        for version, (begin, end) in sorted(run.rounds().items())[2:]:
            beside = any(begin < until and since < end for since, until in joins)
            (with_join if beside else plain).append(end - begin)
            say(f"round to version {version + 1}: {end - begin:.2f} s{' beside a join' if beside else ''}")
    goal = 1.2 * asked.ideal_s
    took, normal, beside = map(statistics.median, (between, plain, with_join))
    more = 100 * (beside / normal - 1)
    listed = lambda times: ", ".join(f"{each:.2f}" for each in sorted(times))  # noqa: E731
    return [
        Row(
            "join between rounds",
            f"{took:.2f} s ({listed(between)})",
            f"{asked.ideal_s:.2f} s",
            f"{goal:.2f} s",
            took <= goal,
            late,
        ),
        Row(
            "join across a round",
            f"{statistics.median(across):.2f} s ({listed(across)})",
            f"{asked.ideal_s:.2f} s and the round, {normal:.2f} s",
            "",
            True,
            late,
        ),
        Row(
            "donors' round beside a join",
            f"{beside:.2f} s ({listed(with_join)}): {more:+.1f} %",
            f"{normal:.2f} s ({listed(plain)})",
            "+3 %",
            more <= 3,
            late,
        ),
    ]


def killed(asked: Asked) -> list[Row]:
    rows = []
    with JoinRun(asked) as run:
        run.settle()
        for percent in (10, 50, 90):
            party = run.start_joiner()
            run.wait_for_version(run.version() + 1)
            run.go(party)
            enough = percent / 100 * asked.pieces
            run.wait_until(partial(run.has_fetched, party, enough), "pieces")
            run.kill(party)
            before = run.pieces(party)
            again = run.start_joiner()
            run.go(again)
            begin, end = run.seconds(again)
            fetched = run.pieces(again)
            twice = len(set(before) & set(fetched))
            said = re.search(r"(\d+) of \d+ pieces", run.log(again.name))
            rest = asked.ideal_s * (1 - len(before) / asked.pieces)
            got = f"{twice} of {len(before)} pieces fetched twice; {end - begin:.2f} s for the other {len(fetched)}"
            say(f"killed at {percent} %: {got}; recalled {said[1] if said else 'none'}")
            rows.append(
                Row(
                    f"killed at {percent} %",
                    got,
                    f"0 pieces, {rest:.2f} s",
                    "1 piece",
                    twice <= 1,
                    run.late_ms(),
                )
            )
    return rows


def corrupt(asked: Asked) -> list[Row]:
    asked = replace(asked, pause_s=1.5 * asked.pause_s)  # from two donors it takes so much longer
    with JoinRun(asked, liar=DONORS[1]) as run:
        run.settle()
        party = run.start_joiner()
        run.wait_for_version(run.version() + 1)
        run.go(party)
        begin, end = run.seconds(party)
        told = [line for line in run.log(party.name).splitlines() if "not asked any more" in line]
        ideal = asked.state_bits / (200e6 * asked.scale)
        got = f"{end - begin:.2f} s; {len(told)} donor dropped"
        say(f"corrupt: {got}: {told}")
        return [
            Row(
                "one donor of three is corrupt",
                got,
                f"{ideal:.2f} s from two donors",
                f"{1.2 * ideal:.2f} s",
                end - begin <= 1.2 * ideal and len(told) == 1,
                run.late_ms(),
            )
        ]


ROWS: dict[str, Callable[[Asked], list[Row]]] = {"join": join, "killed": killed, "corrupt": corrupt}


def as_markdown(rows: list[Row]) -> str:
    lines = ["| what | measured | ideal | goal | met | late ms |", "|---|---|---|---|---|---|"]
    for row in rows:
        met = "yes" if row.met else "**no**"
        lines.append(f"| {row.name} | {row.got} | {row.ideal} | {row.goal} | {met} | {row.late_ms:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"all if none is named: {', '.join(ROWS)}")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    parser.add_argument("--mb", type=int, default=200, help="of parameters; the state is twice that")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lines' rates")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    unknown = set(words.rows) - set(ROWS)
    if unknown:
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if words.list:
        print("\n".join(ROWS))
        return
    asked = Asked(words.mb, words.scale, 0.0)
    asked = replace(asked, pause_s=1.25 * asked.ideal_s + 4)
    rows: list[Row] = []
    for name in words.rows or ROWS:
        rows += ROWS[name](asked)
    print(json.dumps([asdict(row) for row in rows]) if words.json else as_markdown(rows))


if __name__ == "__main__":
    main()
