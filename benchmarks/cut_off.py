"""Lines that are cut and heal, in the lab, with the real program: who is back when, and what stood still meanwhile.

    python benchmarks/cut_off.py [coordinator] [peer] [--mb 10] [--mbit 200] [--cut-s SECONDS] [--json]

    coordinator   the coordinator is cut off from all four peers for 25 s
    peer          one of four peers is cut off from everybody for 35 s, and the others go on

Four peers with steps of 50 ms, a round after 40 of them, `--mb` of parameters, lines of `--mbit`, 20 ms round trips,
the manifest's usual heartbeat and patience.  `contact`: from the heal until the coordinator has let the last of them in
again.  `commit`: until the next commit after it (of `peer`: the first that has its work).  `idle steps`: by how many
each peer took fewer while the line was cut than in as long a time before, rounds included; 0 where it took more.
`steps`: what the peer that took fewest took of them.  `pause`: the longest time between two steps of anybody, beside
the longest before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

# rig/ is what tests and benchmarks share.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from farflung.protocol.process.journal import Event
from rig.arena import DEFAULT
from rig.lab.emulator import HostSpec, Lab
from rig.lab_arena import LabArena

HUB, PEERS = "coordinator", ("ann", "bob", "cid", "dan")
CUT_S = {"coordinator": 25.0, "peer": 35.0}
STEP_S, SYNC_EVERY, CALM_COMMITS = 0.05, 40, 4
UNTRUE = "not signed by the identity"


@dataclass(frozen=True)
class Found:
    row: str
    mb: int
    contact_s: float
    commit_s: float
    round_s: float  # between two commits before the cut
    idle_steps: dict[str, int]  # by peer
    steps: float  # of the slowest, beside as many before the cut
    pauses_s: tuple[float, float]  # the longest before the cut, and in it
    untrue: int  # peers that were told that they are not who they are
    late_ms: float


@dataclass(frozen=True)
class Steps:
    """When one peer's steps ended, between two moments."""

    times: list[float]
    begin: float
    end: float

    @staticmethod
    def within(times: list[float], begin: float, end: float) -> Steps:
        return Steps([at for at in times if begin <= at < end], begin, end)

    @property
    def per_s(self) -> float:
        return len(self.times) / (self.end - self.begin)

    @property
    def pause_s(self) -> float:
        moments = [self.begin, *self.times, self.end]
        return max(after - before for before, after in pairwise(moments))


def has_entered(event: Event) -> bool:
    return event["event"] == "entered"


def cut_and_heal(arena: LabArena, lab: Lab, row: str, cut_s: float, mb: int, steps: Path) -> Found:
    calm = [arena.commit(0.0)["at"]]
    for _ in range(CALM_COMMITS):
        calm.append(arena.commit(calm[-1] + 1e-6)["at"])
    away = PEERS if row == "coordinator" else PEERS[-1:]
    pairs = [(HUB, name) for name in away]
    pairs += [] if row == "coordinator" else [(PEERS[-1], name) for name in PEERS[:-1]]
    for pair in pairs:
        lab.cut(*pair)
    time.sleep(cut_s)
    healed_at = time.monotonic()
    for pair in pairs:
        lab.heal(*pair)
    back = [
        arena.event(arena.parties[name], has_entered, f"{name} is back", healed_at)["at"] for name in away
    ]
    whose = "" if row == "coordinator" else arena.parties[PEERS[-1]].id
    commit_at = arena.commit(healed_at, "the commit after it", whose)["at"]
    before, meanwhile = {}, {}
    for name in PEERS:
        times = [float(line) for line in (steps / str(arena.trainer_of(name))).read_text().splitlines()]
        before[name] = Steps.within(times, calm[0], calm[-1])
        meanwhile[name] = Steps.within(times, healed_at - cut_s, healed_at)
    shares = {name: meanwhile[name].per_s / before[name].per_s for name in PEERS}
    idle = {n: max(0, round((1 - share) * before[n].per_s * cut_s)) for n, share in shares.items()}
    untrue = sum(UNTRUE in arena.parties[name].log.read_text(errors="replace") for name in PEERS)
    return Found(
        row,
        mb,
        max(back) - healed_at,
        commit_at - healed_at,
        (calm[-1] - calm[0]) / CALM_COMMITS,
        idle,
        min(shares.values()),
        (max(each.pause_s for each in before.values()), max(each.pause_s for each in meanwhile.values())),
        untrue,
        1000 * lab.effort().worst_late_s,
    )


def measure(row: str, cut_s: float, mb: int, mbit: float) -> Found:
    os.environ["FARFLUNG_VALUES"] = str(mb * 250_000)  # what the nurseries' children find
    hosts = [HostSpec(name, mbit, mbit, delay_ms=5) for name in (HUB, *PEERS)]
    with tempfile.TemporaryDirectory(prefix="farflung-cut-") as folder, Lab(hosts, seed=1) as lab:
        steps = Path(folder, "steps")
        steps.mkdir()
        os.environ["FARFLUNG_STEP_TIMES"] = str(steps)
        rules = {**DEFAULT, "sync_every": SYNC_EVERY, "chunk_kb": 1024, "go_back_after_s": 300.0}
        with LabArena(Path(folder), lab, **rules) as arena:
            arena.step_s = STEP_S
            arena.begin(*PEERS)
            return cut_and_heal(arena, lab, row, cut_s, mb, steps)


def as_markdown(rows: list[Found]) -> str:
    lines = [
        "| row | contact | next commit | a round takes | idle steps | steps | pause | told an untruth | late ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.row}, {row.mb} MB | {row.contact_s:.1f} s | {row.commit_s:.1f} s | {row.round_s:.1f} s | "
        f"{', '.join(map(str, row.idle_steps.values()))} | {row.steps:.0%} | "
        f"{row.pauses_s[1]:.1f} s, {row.pauses_s[0]:.1f} before | {row.untrue} of {len(PEERS)} | {row.late_ms:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"all if none is named: {', '.join(CUT_S)}")
    parser.add_argument("--mb", type=int, default=10, help="of parameters")
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--cut-s", type=float, help="instead of the row's own")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    if unknown := set(words.rows) - set(CUT_S):
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(CUT_S)}")
    rows = [measure(row, words.cut_s or CUT_S[row], words.mb, words.mbit) for row in words.rows or CUT_S]
    print(json.dumps([asdict(row) for row in rows]) if words.json else as_markdown(rows))


if __name__ == "__main__":
    main()
