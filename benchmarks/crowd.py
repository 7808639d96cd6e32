"""What a coordinator costs over the number of its members: real processes and connections, sham members (shams.py).

    python benchmarks/crowd.py --write                        # 1,000 and 4,000 and 10,000, some ten minutes
    python benchmarks/crowd.py --members 1000 --gateways 0
    python benchmarks/crowd.py --members 2000 --kill          # and one gateway is killed while they beat

Members come in lots of 500.  When all are in, their beats are measured without rounds and with them.  All shares the
machine: the coordinator is on one core, the shams are on the other, the gateways and the door where there is room.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pages import write_between

from coordinator import OWNERS, PAGE, Process, Worker, cpu_s, quantile

LOT = 500
JOINS_WITHIN_S = 120.0


@dataclass
class Measured:
    """A row; its fields' names are the table's heads."""

    members: int
    gateways: int
    rounds: str
    join_p99_s: float
    beat_p50_ms: float
    beat_p99_ms: float
    beats_per_s: float
    coordinator_core: float  # shares of a core
    gateways_core: float
    coordinator_ms_per_beat: float
    sent_bytes_per_member_s: float
    memory_kb_per_member: float
    shams_late_ms: float


def joined(coordinator: Process, workers: list[Worker], count: int) -> float:
    """All members, a lot after the other; the p99 of the time from the knock to the welcome, of the last lot."""
    welcome_s: list[float] = []
    for at in range(0, count, LOT):
        worker = Worker(coordinator.url, min(LOT, count - at), OWNERS if at == 0 else 0, 1)
        workers.append(worker)
        worker.say("begin")
        until = time.monotonic() + JOINS_WITHIN_S
        told: dict[str, Any] = worker.ask()
        while told["inside"] < worker.count and time.monotonic() < until:
            time.sleep(0.5)
            told = worker.ask()
        welcome_s = told["welcome_s"]
        if told["inside"] < worker.count:
            raise SystemExit(
                f"{told['inside']} of {worker.count} are in after {JOINS_WITHIN_S:g} s: {told['counts']}"
            )
    return quantile(welcome_s, 0.99)


def beats(coordinator: Process, workers: list[Worker], rounds: bool, seconds: float) -> dict[str, Any]:
    for worker in workers:
        worker.say("rounds", "on" if rounds else "off")
    time.sleep(5.0)
    done = len(coordinator.rounds())
    for worker in workers:
        worker.say("mark")
    pids = [coordinator.process.pid, *coordinator.gateways]
    cpu, begun = [cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    used = [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
    took, told = time.monotonic() - begun, [worker.ask() for worker in workers]
    counts: dict[str, int] = {}
    for each in told:
        for name, number in each["counts"].items():
            counts[name] = counts.get(name, 0) + number
    print("   ", counts, flush=True)
    return {
        "took": took,
        "beats": [s for each in told for s in each["beat_s"]],
        "sent": sum(each["received"] for each in told),
        "late_s": max(each["late_s"] for each in told),
        "coordinator_s": used[0],
        "gateways_s": sum(used[1:]),
        "rounds": [len(each["members"]) for each in coordinator.rounds()[done:]],
    }


def measure(count: int, options: argparse.Namespace) -> list[Measured]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Process(Path(folder), 1.0, options.profile, 1, options.gateways, max(1024, count))
        workers: list[Worker] = []
        before = coordinator.mb()
        try:
            join_s = joined(coordinator, workers, count)
            for rounds in (False, True):
                found = beats(coordinator, workers, rounds, options.seconds)
                number, took = max(1, len(found["beats"])), found["took"]
                rows.append(
                    Measured(
                        members=count,
                        gateways=options.gateways,
                        rounds=f"{len(found['rounds'])} of {max(found['rounds'], default=0)}"
                        if rounds
                        else "none",
                        join_p99_s=join_s,
                        beat_p50_ms=1000 * quantile(found["beats"], 0.5),
                        beat_p99_ms=1000 * quantile(found["beats"], 0.99),
                        beats_per_s=len(found["beats"]) / took,
                        coordinator_core=found["coordinator_s"] / took,
                        gateways_core=found["gateways_s"] / took,
                        coordinator_ms_per_beat=1000 * found["coordinator_s"] / number,
                        sent_bytes_per_member_s=found["sent"] / took / count,
                        memory_kb_per_member=1024 * (coordinator.mb() - before) / count,
                        shams_late_ms=1000 * found["late_s"],
                    )
                )
                print(rows[-1], flush=True)
            if options.kill and coordinator.gateways:
                for worker in workers:
                    worker.say("mark")
                os.kill(coordinator.gateways[0], signal.SIGKILL)
                time.sleep(options.seconds)
                told = [worker.ask() for worker in workers]
                late = [s for each in told for s in each["beat_s"]]
                print(f"a gateway was killed: beats p99 {quantile(late, 0.99):.2f} s, most {max(late):.2f} s")
                print(
                    f"{sum(each['inside'] for each in told)} of {count} inside,",
                    [each["counts"] for each in told],
                )
        finally:
            coordinator.end()
            for worker in workers:
                with contextlib.suppress(BrokenPipeError):  # it has died, and said why
                    worker.end()
            log = coordinator.log.read_text().splitlines()
            print(*[line for line in log if "rror" in line or "Traceback" in line][:5], sep="\n")
    return rows


def table(rows: list[Measured], command: str) -> str:
    names = [field.name for field in fields(Measured)]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        values = [getattr(row, name) for name in names]
        told = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        lines.append("| " + " | ".join(told) + " |")
    return f"`{command}`; two cores.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, nargs="+", default=[1000, 4000, 10_000])
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kill", action="store_true", help="kill one gateway in the end")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = [row for count in options.members for row in measure(count, options)]
    if options.write:
        command = " ".join(
            ["python benchmarks/crowd.py", *[each for each in sys.argv[1:] if each != "--write"]]
        )
        write_between(PAGE, "crowd", table(rows, command))


if __name__ == "__main__":
    main()
