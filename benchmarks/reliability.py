"""The fault matrix of docs/reliability.md: runs the chaos tests and writes what they measured into the page.

    python benchmarks/reliability.py [--write]                    # about half an hour
    python benchmarks/reliability.py --figures FILE ... [--write] # what FARFLUNG_FIGURES collected before

Every row names the tests that prove it.  Rows without a test of their own in tests/chaos/ point to where the fault is
covered; a row without any is not covered, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pages import write_between

from farflung.protocol.process.failpoints import AGENT, COORDINATOR, TRAINER

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
Figure = dict[str, object]
SIMULATOR = "tests/whole/test_simulator.py"
WALK, MATRIX = "tests/chaos/test_failpoints.py", "tests/chaos/test_matrix.py"
PIPELINES, STAGES = "tests/real/test_pipelines.py", "tests/whole/test_stages.py"
STANDBY = "tests/chaos/test_standby.py"
PARTITIONS, CROWDS = "tests/chaos/test_partitions.py", "tests/chaos/test_crowds.py"


@dataclass(frozen=True)
class Row:
    number: str
    fault: str
    follows: str
    tests: str
    points: tuple[str, ...] = ()  # its figures are those of these failpoints
    faults: tuple[str, ...] = ()  # or of these faults of the matrix


def points(*beginnings: str) -> tuple[str, ...]:
    return tuple(name for name in {**COORDINATOR, **AGENT, **TRAINER} if name.startswith(beginnings))


ROWS = [
    Row(
        "1a",
        "kill, stop: a peer joins",
        "nobody else notices; it joins again",
        WALK,
        points("joining.before", "joining.after"),
    ),
    Row(
        "1b", "... while it fetches the state", "donors go on; it fetches again", WALK, points("joining.mid")
    ),
    Row("1c", "... its trainer, in inner steps", "started again from memory", WALK, tuple(TRAINER)),
    Row(
        "1d",
        "... the agent, ready or planned",
        "chunks move, the same round commits",
        WALK,
        points("ready.", "open.arrived"),
    ),
    Row(
        "1e",
        "... in the middle of SCATTER",
        "in for all chunks or for none",
        WALK,
        ("scatter.before_encode", "scatter.before_sent", "scatter.mid"),
    ),
    Row(
        "1f",
        "... an owner in DECIDE or GATHER",
        "its chunks move, or its results are proven elsewhere",
        WALK,
        points("decide.arrived", "gather."),
    ),
    Row(
        "1g",
        "... after COMMIT, in APPLY",
        "state that is torn is not trusted",
        WALK,
        points("commit.arrived", "apply.", "load.before_word"),
    ),
    Row(
        "1h",
        "... while it saves a checkpoint",
        "the one before stays; tests/checkpoints/test_store.py kills writers at any moment",
        WALK,
        points("checkpoint."),
    ),
    Row(
        "2",
        "the agent's loop hangs, sockets live",
        "dead after `dead_after_s` without beats; its late frames are stale",
        MATRIX,
        (),
        ("loop stuck for 4 s",),
    ),
    Row(
        "2",
        "the trainer hangs",
        "told, not waited for, killed and started again",
        f"{MATRIX}, tests/peer/machine/test_pulse.py",
        (),
        ("trainer stuck",),
    ),
    Row(
        "3",
        "a slow peer",
        "the deadline goes on without it; its work comes later",
        MATRIX,
        (),
        ("a peer ten times slower",),
    ),
    Row("4", "half-open connections", "dead by silence", f"{PARTITIONS}, {SIMULATOR}", (), ("half-open",)),
    Row(
        "5",
        "a minority of the peers is cut off",
        "the others commit; the minority trains on and commits nothing",
        f"{PARTITIONS}, {SIMULATOR}",
        (),
        ("minority cut off",),
    ),
    Row(
        "5",
        "... the majority is, from the coordinator",
        "nobody commits: one peer is too few, three without it have no say",
        PARTITIONS,
        (),
        ("majority cut off",),
    ),
    Row("5", "... one way, to the coordinator", "lost; the others commit", PARTITIONS, (), ("one way cut",)),
    Row(
        "5",
        "... two peers from each other, both ways or one",
        "they own nothing, and all take part through the others",
        f"{PARTITIONS}, tests/whole/test_reachability.py",
        (),
        ("a pair cut",),
    ),
    Row(
        "5",
        "... a line comes and goes every 2 s",
        "the others commit",
        PARTITIONS,
        (),
        ("a line that flaps",),
    ),
    Row(
        "6",
        "the coordinator, at each durable step and word",
        "restarted: the same run, work kept",
        WALK,
        tuple(COORDINATOR),
    ),
    Row(
        "6", "... killed and started at once", "inner steps go on", MATRIX, (), ("coordinator away for 0 s",)
    ),
    Row("6", "... away for 5 s", "inner steps go on", MATRIX, (), ("coordinator away for 5 s",)),
    Row("6", "... away for 60 s", "inner steps go on", MATRIX, (), ("coordinator away for 60 s",)),
    Row(
        "6",
        "... killed 200 times, at random moments",
        "no commit is lost",
        MATRIX,
        (),
        ("coordinator killed",),
    ),
    Row(
        "7",
        "the coordinator's disk is full",
        "it stops in words, exit code 2; nothing half written; it goes on once there is room",
        f"{MATRIX}, tests/coordinator/ledger/test_journal.py",
    ),
    Row(
        "8",
        "damaged contributions",
        "asked for once more; a member that sends nothing else is out, with the reason",
        f"{MATRIX}, tests/whole/test_hostile_members.py",
        (),
        ("contribution damaged",),
    ),
    Row(
        "9-11",
        "cut, oversized, malformed frames",
        "counted, bounded before memory is taken",
        "tests/protocol/test_frames.py, tests/protocol/test_messages.py, tests/coordinator/test_server.py",
    ),
    Row(
        "12",
        "NaN, infinities",
        "out of the round, told why",
        "tests/whole/test_hostile_members.py, tests/peer/machine/test_trainer_proxy.py",
    ),
    Row(
        "13, 14",
        "a contribution 1000 times too long, or with its sign flipped",
        "shortened to the median length, or out of the mean; told why (from four peers on)",
        "tests/coordinator/rounds/test_outliers.py, benchmarks/learning/malicious.py",
    ),
    Row(
        "15, 16",
        "stale, late and repeated frames",
        "counted as stale or duplicate",
        f"tests/collectives/test_member.py, {SIMULATOR}",
    ),
    Row(
        "17, 18",
        "forged hello, another model or manifest",
        "refused at the door",
        "tests/coordinator/run/test_machine.py, tests/real/test_runs.py",
    ),
    Row(
        "19",
        "damaged checkpoints",
        "named; the one before is used",
        "tests/checkpoints/test_store.py, tests/real/test_resume.py",
    ),
    Row("20", "a peer's disk is full while it saves", "training goes on, and it says so", MATRIX),
    Row("21", "clocks 10 minutes off", "nothing depends on them", MATRIX),
    Row(
        "22",
        "a third of the peers replaced, again and again",
        "the others commit",
        f"{MATRIX}, benchmarks/storm.py",
        (),
        ("2 of 6 peers",),
    ),
    Row(
        "23",
        "200 shams join at once",
        "the peers that train go on; all get in",
        CROWDS,
        (),
        ("200 shams",),
    ),
    Row(
        "23",
        "... 16 real peers",
        "four fetch the model at the same time (`joins_at_once`), the others wait; all take part",
        CROWDS,
        (),
        ("16 peers",),
    ),
    Row(
        "24",
        "everybody dies",
        "back to a version of its own, from a checkpoint, or it waits",
        f"{WALK}, tests/whole/test_going_back.py, tests/real/test_resume.py",
    ),
    Row(
        "25",
        "a full uplink",
        "control words keep their way",
        "tests/collectives/test_courtesy.py, benchmarks/wan.py",
    ),
    Row(
        "26",
        "a wrong address, a peer behind NAT",
        "dialled back at the hello; a peer that cannot be reached owns nothing and takes part",
        "tests/whole/test_reachability.py",
    ),
    Row("27", "the same key started twice", "the second is refused as long as the first lives", MATRIX),
    Row(
        "28, 34",
        "a client of another run, or of another protocol version",
        "refused at the knock, in words",
        "tests/coordinator/run/test_machine.py",
    ),
    Row(
        "29",
        "the coordinator restored from an old copy",
        "nothing is committed; peers say that a newer journal exists",
        MATRIX,
    ),
    Row(
        "30",
        "two coordinators on one journal",
        "the second exits with code 2",
        f"{MATRIX}, tests/coordinator/ledger/test_journal.py",
    ),
    Row(
        "40",
        "the coordinator that leads, with another one standing by on etcd: killed, or killed with one of three etcd",
        "the standby leads within its lease, every commit that a peer heard of is there, peers follow by themselves",
        f"{STANDBY}, tests/coordinator/standby/test_standby.py",
        faults=("leader killed, standby on etcd", "leader and one etcd killed"),
    ),
    Row(
        "40",
        "... cut from its store, or standing still until the standby leads",
        "it ends with exit code 40; what it writes late is refused by the store",
        f"{STANDBY}, tests/coordinator/standby/test_etcd_store.py",
        faults=("leader cut from etcd", "leader stopped, standby on etcd"),
    ),
    Row(
        "40",
        "... one etcd of three",
        "the run goes on, after etcd's own election",
        STANDBY,
        faults=("one etcd of three killed",),
    ),
    Row(
        "31",
        "an owner sends results that do not have the hash it told the coordinator",
        "its chunks move, and the round goes on. An owner that sums wrongly for all alike is not found",
        "tests/whole/test_hostile_members.py",
    ),
    Row(
        "32",
        "Ctrl-C, SIGTERM",
        "it leaves in good order; killed on the way it is like any other",
        f"tests/real/test_runs.py, {WALK}",
    ),
    Row(
        "33",
        "a store for checkpoints that fails",
        "training goes on, it is told, the next version is tried",
        "tests/peer/machine/test_checkpoint_policy.py, tests/checkpoints/test_store.py",
    ),
    Row("35", "reordered, doubled, lost messages", "the same digests", SIMULATOR),
    Row(
        "36",
        "a donor breaks while it serves",
        "the next donor is asked",
        f"{WALK}, tests/whole/test_data_plane_bounds.py",
    ),
    Row(
        "37",
        "a peer of any stage: while it counts, with its sums frozen, in SCATTER, at its round's end, at the commit",
        "its stage computes its share again, the others nothing; once its contribution is safe it costs nothing",
        f"{PIPELINES}, {STAGES}",
    ),
    Row(
        "37",
        "... its trainer",
        "its seat and its sums are gone; the agent starts it again, and it gets another seat",
        f"{PIPELINES}, tests/peer/batches/test_stage_transfers.py",
    ),
    Row(
        "37",
        "... the coordinator, before and after the record of all stages",
        "all stages are at the next version or none; rounds at their end begin again",
        f"{PIPELINES}, tests/coordinator/batches/test_stages.py",
    ),
    Row(
        "37",
        "... all peers of a stage",
        "somebody who can hold it is given it before all others; without its newest state all stages go back together",
        f"{STAGES}, tests/coordinator/recovery/test_stages_go_back.py",
    ),
    Row(
        "38",
        "a stage is left with a single seat, or with too few",
        "a peer of another stage moves there between two batches; nothing is computed twice",
        f"{PIPELINES}, {STAGES}, tests/coordinator/batches/test_rebalancing.py",
    ),
    Row(
        "38",
        "... whoever moves dies while it fetches, or never comes",
        "as if it had left; the next look is taken",
        f"{STAGES}, tests/coordinator/batches/test_rebalancing.py",
    ),
    Row(
        "39",
        "neighbours in a pipeline: a cut line, one that answers nothing, damaged crossings, slander",
        "one of the two gives its seat up, to those with whom all get on; one word unseats nobody",
        f"{STAGES}, tests/coordinator/batches/test_complaints.py",
    ),
    Row(
        "39",
        "... all of a stage can't be dialled",
        "one seat has the stage for itself; who can be dialled goes there",
        f"{STAGES}, tests/coordinator/batches/test_stages_of_batches.py",
    ),
]


def measured(row: Row, figures: list[Figure]) -> str:
    mine = [
        f
        for f in figures
        if f.get("point") in row.points
        or any(str(f.get("fault", "")).startswith(each) for each in row.faults)
    ]
    told = []
    commits = sorted(float(str(f["next_commit_s"])) for f in mine if "next_commit_s" in f)
    backs = sorted(float(str(f["back_s"])) for f in mine if "back_s" in f)
    if commits:
        told.append(f"next commit {_span(commits)} of {len(commits)}")
    if backs:
        told.append(f"back {_span(backs)}")
    known = {"test", "point", "action", "row", "fault", "next_commit_s", "back_s", "again_s"}
    for each in mine:
        told += [
            f"{name.replace('_', ' ')} {_short(value)}" for name, value in each.items() if name not in known
        ]
    return "; ".join(told)


def _span(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f} s"
    return f"{statistics.median(values):.1f} s (worst {values[-1]:.1f})"


def _short(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(figures: list[Figure]) -> str:
    lines = ["| row | fault | what follows | measured | tests |", "|---|---|---|---|---|"]
    for row in ROWS:
        tests = ", ".join(f"`{name.strip()}`" for name in row.tests.split(","))
        lines.append(f"| {row.number} | {row.fault} | {row.follows} | {measured(row, figures)} | {tests} |")
    return "\n".join(lines)


def collect() -> tuple[int, list[Path]]:
    place = Path(tempfile.mkdtemp()) / "figures.jsonl"
    environ = os.environ | {"FARFLUNG_LONG": "20", "FARFLUNG_FIGURES": str(place)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(ROOT / "tests" / "chaos")]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode, [place]


def main() -> int:
    parser = argparse.ArgumentParser(description="runs the chaos tests and writes the fault matrix")
    parser.add_argument("--figures", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    code, places = (0, asked.figures) if asked.figures else collect()
    figures = [json.loads(line) for place in places for line in place.read_text().splitlines()]
    machine = f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    text = f"{len(figures)} measured faults, {machine}.\n\n{table(figures)}"
    print(text)
    if asked.write:
        write_between(PAGE, "matrix", text)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
