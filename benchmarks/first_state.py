"""The first state of a run, in the lab: one peer has it, all others fetch it at the same time.

    python benchmarks/first_state.py [slow] [equal] [--mb 100] [--peers 6] [--founder 5] [--others 200] [--json]

    slow    6 peers, 100 MB of parameters, the founder with 5 Mbit/s up, the others with 200 both ways
    equal   8 peers, 400 MB, 100 Mbit/s each

`once` is how long the founder needs to give its parameters to one other: their bytes over its rate up.  What is
measured begins when the others have said what their models are, and ends when the last of them has version 0, with its
digest checked.  `given` is what left the founder's line, with all headers, in copies of the
parameters.  Each peer's own first values are others than the founder's, or nothing would be fetched at all.
Round trips are 20 ms.  `--mb`, `--peers`, `--founder` and `--others` stand for the row's own figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.console.bench.bench import BenchOptions, BenchParty
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import JOURNAL_VARIABLE
from rig.lab.emulator import HostSpec
from rig.lab_run import LabRun, Setting

FOUNDER = "founder"
DELAY_MS = 5.0
NEVER_S = 1e6


@dataclass(frozen=True)
class Asked:
    row: str
    peers: int
    mb: int
    founder_mbit: float
    others_mbit: float
    goal: float  # times `once`

    @property
    def once_s(self) -> float:
        return 8 * self.mb / self.founder_mbit


ROWS = {
    "slow": Asked("slow", 6, 100, 5.0, 200.0, 1.3),
    "equal": Asked("equal", 8, 400, 100.0, 100.0, 1.5),
}


@dataclass(frozen=True)
class Found:
    row: str
    peers: int
    mb: int
    once_s: float
    last_s: float  # until the last one had it
    first_s: float
    given: float  # copies of the parameters that left the founder's line
    goal_s: float
    late_ms: float  # of the lab's router: figures are only worth something if it was rarely late

    @property
    def met(self) -> bool:
        return self.last_s <= self.goal_s


@dataclass(frozen=True)
class FirstSetting(Setting):
    @property
    def manifest(self) -> Manifest:
        """No round begins before everybody has the state."""
        base = super().manifest
        run = base.run.model_copy(update={"rounds": 10_000, "min_peers": len(self.hosts), "max_peers": 64})
        return base.model_copy(update={"run": run})


class FirstState(LabRun):
    def __init__(self, asked: Asked) -> None:
        others = [f"joiner-{number}" for number in range(1, asked.peers)]
        down = max(asked.founder_mbit, asked.others_mbit)
        hosts = [HostSpec(FOUNDER, asked.founder_mbit, down, DELAY_MS)]
        hosts += [HostSpec(name, asked.others_mbit, asked.others_mbit, DELAY_MS) for name in others]
        options = BenchOptions(peers=asked.peers, mb=asked.mb, rounds=100, codec="int8")
        home = HostSpec("coordinator", 1000, 1000, DELAY_MS)
        super().__init__(FirstSetting(options, hosts, home, timeout_s=60 + 6 * asked.once_s))
        self.asked, self.others = asked, others

    def _join(self, name: str, url: str, number: int) -> BenchParty:
        script = str(Path(__file__).with_name("join_worker.py"))
        environ = os.environ | {"OMP_NUM_THREADS": "1", JOURNAL_VARIABLE: str(self.folder / f"{name}.events")}
        command = [sys.executable, script, "--url", url, "--told", str(self.folder / f"{name}.told")]
        command += ["--identity", str(self.folder / f"{name}.pem"), "--pause", str(NEVER_S)]
        command += ["--value", str(number), "--go", str(self.folder / ("first.go" if not number else "go"))]
        with (self.folder / f"{name}.log").open("w") as log:
            process = self.lab.hosts[name].popen(command, stdout=log, stderr=log, text=True, env=environ)
        return BenchParty(name, process, self.folder)

    def told(self, name: str, what: str) -> list[float]:
        path = self.folder / f"{name}.told"
        words = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else [])
        return [word["at"] for word in words if word["what"] == what]

    def all_told(self, names: list[str], what: str) -> bool:
        return all(self.told(name, what) for name in names)

    def measure(self) -> Found:
        self.wait_until(lambda: self.all_told([FOUNDER, *self.others], "ready"), "the trainers")
        (self.folder / "first.go").touch()
        self.wait_until(lambda: self.all_told([FOUNDER], "load"), "version 0")
        print(f"{self.asked.row}: founded", file=sys.stderr, flush=True)
        sent = self._sent_bytes()
        (self.folder / "go").touch()
        self.wait_until(lambda: self.all_told(self.others, "load"), "version 0 everywhere")
        begin = max(self.told(name, "attach")[0] for name in self.others)
        ends = sorted(self.told(name, "load")[0] - begin for name in self.others)
        asked, given = self.asked, (self._sent_bytes() - sent) / (1e6 * self.asked.mb)
        late_ms = 1000 * self.lab.effort().worst_late_s
        return Found(
            asked.row,
            asked.peers,
            asked.mb,
            asked.once_s,
            ends[-1],
            ends[0],
            given,
            asked.goal * asked.once_s,
            late_ms,
        )

    def _sent_bytes(self) -> int:
        up, _ = self.lab.counters()[FOUNDER]
        return up.delivered_bytes


def as_markdown(rows: list[Found]) -> str:
    lines = [
        "| row | once, s | first has it, s | last has it, s | times once | given | goal, s | met | late ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        what = f"{row.row}: {row.peers} peers, {row.mb} MB"
        times, met = row.last_s / row.once_s, "yes" if row.met else "**no**"
        lines.append(
            f"| {what} | {row.once_s:.1f} | {row.first_s:.1f} | {row.last_s:.1f} | {times:.2f} | "
            f"{row.given:.2f} x | {row.goal_s:.1f} | {met} | {row.late_ms:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"all if none is named: {', '.join(ROWS)}")
    parser.add_argument("--mb", type=int, help="of parameters")
    parser.add_argument("--peers", type=int)
    parser.add_argument("--founder", type=float, help="Mbit/s up")
    parser.add_argument("--others", type=float, help="Mbit/s, both ways")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    if unknown := set(words.rows) - set(ROWS):
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    given = {
        "mb": words.mb,
        "peers": words.peers,
        "founder_mbit": words.founder,
        "others_mbit": words.others,
    }
    found: list[Found] = []
    for name in words.rows or ROWS:
        asked = replace(ROWS[name], **{key: value for key, value in given.items() if value is not None})
        with FirstState(asked) as run:
            found.append(run.measure())
    print(json.dumps([asdict(row) for row in found]) if words.json else as_markdown(found))


if __name__ == "__main__":
    main()
