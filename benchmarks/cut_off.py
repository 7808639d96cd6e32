"""Lines that are cut and heal, in the lab, with the real program: who is back when, and what stood still meanwhile.

    python benchmarks/cut_off.py [coordinator] [peer] [--mb 10] [--mbit 200] [--cut-s SECONDS] [--json]

    coordinator   the coordinator is cut off from all four peers for 25 s
    peer          one of four peers is cut off from everybody for 35 s, and the others go on

Four peers with steps of 50 ms, a round after 40 of them, `--mb` of parameters, lines of `--mbit`, 20 ms round trips,
the manifest's usual heartbeat and patience.  `contact`: from the heal until the coordinator has let the last of them in
again.  `commit`: until the next commit after it (of `peer`: the first that has its work).  `steps`: how fast the peers
took steps between the last round before the cut and the first after the heal, the slowest of them, beside the rounds
before that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
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
    steps: float  # a second, beside as many before the cut
    untrue: int  # peers that were told that they are not who they are
    late_ms: float


def is_frozen(event: Event) -> bool:
    return event["event"] == "frozen"


def pace(since: Event, until: Event) -> float:
    """Steps a second."""
    return float((until["step"] - since["step"]) / (until["at"] - since["at"]))


def has_entered(event: Event) -> bool:
    return event["event"] == "entered"


def cut_and_heal(arena: LabArena, lab: Lab, row: str, cut_s: float, mb: int) -> Found:
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
    shares = []
    for name in PEERS:
        after = arena.event(arena.parties[name], is_frozen, f"{name} is at a round again", healed_at)
        cut_at = healed_at - cut_s
        earlier = [e for e in arena.parties[name].look() if is_frozen(e) and calm[0] < e["at"] < cut_at]
        shares.append(pace(earlier[-1], after) / pace(earlier[0], earlier[-1]))
    untrue = sum(UNTRUE in arena.parties[name].log.read_text(errors="replace") for name in PEERS)
    return Found(
        row,
        mb,
        max(back) - healed_at,
        commit_at - healed_at,
        (calm[-1] - calm[0]) / CALM_COMMITS,
        min(shares),
        untrue,
        1000 * lab.effort().worst_late_s,
    )


def measure(row: str, cut_s: float, mb: int, mbit: float) -> Found:
    os.environ["FARFLUNG_VALUES"] = str(mb * 250_000)  # what the nurseries' children find
    hosts = [HostSpec(name, mbit, mbit, delay_ms=5) for name in (HUB, *PEERS)]
    with tempfile.TemporaryDirectory(prefix="farflung-cut-") as folder, Lab(hosts, seed=1) as lab:
        rules = {**DEFAULT, "sync_every": SYNC_EVERY, "chunk_kb": 1024, "go_back_after_s": 300.0}
        with LabArena(Path(folder), lab, **rules) as arena:
            arena.step_s = STEP_S
            arena.begin(*PEERS)
            return cut_and_heal(arena, lab, row, cut_s, mb)


def as_markdown(rows: list[Found]) -> str:
    lines = [
        "| row | contact | next commit | a round takes | steps | told an untruth | late ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.row}, {row.mb} MB | {row.contact_s:.1f} s | {row.commit_s:.1f} s | {row.round_s:.1f} s | "
        f"{row.steps:.0%} | {row.untrue} of {len(PEERS)} | {row.late_ms:.0f} |"
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
