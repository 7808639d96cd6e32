"""How many members one coordinator carries: a real `farflung coordinate` on one core, sham members on the other.  Its
front door, a process of its own, takes whichever is free.

    python benchmarks/coordinator.py                    # all of it, about four minutes
    python benchmarks/coordinator.py --members 200 --seconds 5 --idle 500
    python benchmarks/coordinator.py --stages 32        # of a model in so many stages: seats and a batch that goes on

Half of the members join at once, then the other half while the first half beats; then all of them beat, without
rounds and with them; then connections that never say a word come and stay.  Prints a table; with --write it goes
into docs/performance.md.  Shams: see shams.py.  Seconds are the shams', who share the machine with the coordinator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import write_between

from farflung.protocol.join_url import JoinUrl

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
RIG = Path(__file__).resolve().parent.parent / "tests" / "rig"
TABLE_BYTES_MOST = 40 * 1024
OWNERS = 8
PATIENCE_S = 60.0
RUN = """
[run]
name = "crowd"
rounds = 1000000
min_peers = 2
max_peers = {most}
[model]
kind = ""
[data]
source = ""
[round]
deadline_s = 2.0
scatter_grace_s = 5.0
[net]
heartbeat_s = {heartbeat_s}
dead_after_s = 20.0
[admission]
joins_at_once = 1024
"""
IN_STAGES = """
[outer]
step = "adamw"
[merge]
policy = "mean"
[pipeline]
stages = {stages}
batch = 4096
"""


@dataclass(frozen=True)
class Row:
    what: str
    figure: str
    goal: str = ""
    met: str = ""


class Process:
    """The coordinator, and what the kernel tells of it."""

    def __init__(
        self,
        folder: Path,
        heartbeat_s: float,
        profile: Path | None,
        stages: int,
        gateways: int = 0,
        most: int = 1024,
    ) -> None:
        run = folder / "run.toml"
        text = RUN.format(heartbeat_s=heartbeat_s, most=most)
        # With two peers all stages would be empty but two: a batch begins once they are served.
        run.write_text(text + IN_STAGES.format(stages=stages) if stages > 1 else text)
        words = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else [])]
        words += ["-m", "farflung", "coordinate", str(run), "--listen", "127.0.0.1:0", "--plain", "--json"]
        words += ["--gateways", str(gateways)]
        self.log = folder / "coordinator.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=lambda: pin(0)
            )
        assert self.process.stdout is not None
        self.url = JoinUrl.parse(json.loads(self.process.stdout.readline())["url"])
        self.gateways = [
            pid for pid in self.children() if "gateway" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        for pid in (self.door_pid(), *self.gateways):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
        self.events = folder / "run.data" / "events.jsonl"

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def door_pid(self) -> int:
        """Of its child process, where strangers knock."""
        return self.children()[0]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def mb(self, which: str = "VmRSS") -> float:
        told = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(which + r":\s+(\d+)", told)[1]) / 1024  # type: ignore[index]

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rounds(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [each for each in lines if each["event"] == "committed"]

    def aborts(self) -> list[str]:
        lines = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [str(each["reason"])[:200] for each in lines if each["event"] == "aborted"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Worker:
    """A process of shams."""

    def __init__(self, url: JoinUrl, count: int, owners: int, stages: int) -> None:
        self.count = count
        words = [str(RIG / "shams.py"), str(url), str(count), str(owners)]
        if stages > 1:
            words = [str(RIG / "staged_shams.py"), *words[1:], str(stages)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: pin(1),
        )
        self._hear()

    def say(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()

    def ask(self) -> dict[str, Any]:
        self.say("tell")
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def milliseconds(values: Sequence[float]) -> str:
    p50, p99, most = (1000 * quantile(values, share) for share in (0.5, 0.99, 1.0))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, most {most:.0f} ms"


def met(values: Sequence[float], share: float, goal_s: float) -> str:
    return "yes" if values and quantile(values, share) < goal_s else "**no**"


class Bench:
    def __init__(self, options: argparse.Namespace, coordinator: Process) -> None:
        self.options, self.coordinator = options, coordinator
        self.workers: list[Worker] = []
        self.rows: list[Row] = []
        self._idle_costs = (
            0.0,
            0.0,
        )  # without rounds: of a second, the coordinator's CPU and the bytes it sends

    def row(self, what: str, figure: str, goal: str = "", was_met: str = "") -> None:
        self.rows.append(Row(what, figure, goal, was_met))
        print(f"{what}: {figure}{f'; goal {goal}: {was_met}' if goal else ''}", flush=True)

    def join(self, count: int, owners: int) -> None:
        before = self.coordinator.mb()
        there = sum(worker.count for worker in self.workers)
        worker = Worker(self.coordinator.url, count, owners, self.options.stages)
        for other in self.workers:
            other.say("mark")
        pids = [self.coordinator.process.pid, self.coordinator.door_pid(), worker.process.pid]
        begun = time.monotonic()
        cpu = [cpu_s(pid) for pid in pids]
        worker.say("begin")
        while True:
            time.sleep(0.5)
            told = worker.ask()
            if len(told["first_tick_s"]) >= count or time.monotonic() - begun > PATIENCE_S:
                break
        cpu = [cpu_s(pid) - before_s for pid, before_s in zip(pids, cpu, strict=True)]
        beside = [s for other in self.workers for s in other.ask()["beat_s"]]
        self.workers.append(worker)
        what = f"{count} join at once" + (f" beside {there} members" if there else "")
        self.row(
            f"{what}: to the welcome",
            milliseconds(told["welcome_s"]),
            "p99 < 2 s",
            met(told["welcome_s"], 0.99, 2.0),
        )
        self.row(f"{what}: to the first answered beat", milliseconds(told["first_tick_s"]))
        if beside:
            self.row("the same: beats of the members meanwhile", milliseconds(beside))
        self.row(
            "the same: coordinator",
            f"{1000 * cpu[0] / count:.1f} ms of CPU a member, and {1000 * cpu[1] / count:.1f} at the door "
            f"(the shams {1000 * cpu[2] / count:.1f}); "
            f"{1024 * (self.coordinator.mb() - before) / count:.0f} KB a member",
        )
        if set(told["counts"]) - {"rosters"} or told["inside"] < count:
            self.row("the same: not as wanted", f"{told['inside']} inside, {told['counts']}")

    def beats(self, what: str, rounds: bool) -> list[float]:
        for worker in self.workers:
            worker.say("rounds", "on" if rounds else "off")
        time.sleep(3.0)
        done = len(self.coordinator.rounds())
        for worker in self.workers:
            worker.say("mark")
        cpu, begun = self.coordinator.cpu_s(), time.monotonic()
        time.sleep(self.options.seconds)
        cpu, took = self.coordinator.cpu_s() - cpu, time.monotonic() - begun
        told = [worker.ask() for worker in self.workers]
        beats = [s for each in told for s in each["beat_s"]]
        counts = {k: v for each in told for k, v in each["counts"].items()}
        self.row(f"{what}: from beat to tick", milliseconds(beats), "p99 < 200 ms", met(beats, 0.99, 0.2))
        late = max(each["late_s"] for each in told)
        there = [s for each in told for s in each["there_s"]]
        sent = sum(each["received"] for each in told) / took / 1e6
        self.row("the same: until the coordinator took it up", milliseconds(there))
        self.row(
            "the same: coordinator",
            f"{100 * cpu / took:.0f} % of a core, {len(beats) / took:.0f} beats/s "
            f"answered, {sent:.1f} MB/s sent, {self.coordinator.mb():.0f} MB; shams late by {1000 * late:.0f} ms"
            + (f"; {counts}" if counts else ""),
        )
        if rounds:
            print(*self.coordinator.aborts()[-2:], sep="\n")
            made = self.coordinator.rounds()[done:]
            seconds = [each["seconds"] for each in made]
            sizes = [len(each["members"]) for each in made]
            self.row(
                "the same: rounds",
                f"{len(made)} in {took:.0f} s, of {max(sizes, default=0)} members, "
                f"{quantile(seconds, 0.5):.2f} s each (median)",
            )
            taken = max(1, sum(sizes))
            more_s, more_bytes = cpu - self._idle_costs[0] * took, (sent - self._idle_costs[1]) * took * 1e6
            self.row(
                "the same: a member of a round costs the coordinator, over what it costs without rounds",
                f"{1000 * more_s / taken:.2f} ms of CPU, {more_bytes / taken / 1024:.1f} KB sent",
            )
        self._idle_costs = cpu / took, sent
        return beats

    def seats(self) -> None:
        """Of a model in stages: until as many as can are seated."""
        until = time.monotonic() + PATIENCE_S
        while True:
            told = [worker.ask() for worker in self.workers]
            seats = [sum(of_stage) for of_stage in zip(*(each["seats"] for each in told), strict=True)]
            if sum(seats) >= self.options.members or time.monotonic() > until:
                break
            time.sleep(1.0)
        ever = sum(each["seated"] for each in told)
        self.row(
            f"seats in {self.options.stages} stages",
            f"{sum(seats)} of {self.options.members}, {min(seats)} to {max(seats)} a stage; {ever} ever",
            "all",
            "yes" if sum(seats) == self.options.members else "**no**",
        )

    def tables(self) -> None:
        told = [worker.ask() for worker in self.workers]
        most = max(each["batch_bytes_most"] for each in told)
        self.row(
            "what a tick says of the batch, with the table of seats",
            f"at most {most / 1024:.1f} KB; {sum(each['tables'] for each in told)} tables in all",
            f"< {TABLE_BYTES_MOST // 1024} KB",
            "yes" if most < TABLE_BYTES_MOST else "**no**",
        )

    def idle(self) -> None:
        """Connections that never say a word, at the door.  Their own cost on this machine must not pass for harm."""
        os.nice(10)
        wanted, port = self.options.idle, self.coordinator.url.port
        before = self.coordinator.mb()
        for worker in self.workers:
            worker.say("mark")
        opened, most_files, begun = 0, 0, time.monotonic()
        with selectors.DefaultSelector() as closing:
            for number in range(wanted):
                one = socket.socket()
                one.settimeout(10)
                try:
                    one.connect(("127.0.0.1", port))
                except OSError as error:
                    print(f"connection {number}: {error}")
                    one.close()
                    break
                opened += 1
                one.setblocking(False)
                closing.register(one, selectors.EVENT_READ)
                if number % 500 == 0:
                    most_files = max(most_files, self.coordinator.files())
            most_files = max(most_files, self.coordinator.files())
            took, peak = time.monotonic() - begun, self.coordinator.mb()
            closed = self._closed(closing)
            ended = time.monotonic() - begun
        beats = [s for worker in self.workers for s in worker.ask()["beat_s"]]
        self.row(
            f"{wanted} connections that say nothing",
            f"{opened} opened in {took:.1f} s, {closed} closed by the "
            f"coordinator within {ended:.1f} s; at most {most_files} files open, {peak - before:+.0f} MB",
        )
        self.row(
            "the same: from beat to tick meanwhile",
            milliseconds(beats),
            "p99 < 200 ms",
            met(beats, 0.99, 0.2),
        )

    @staticmethod
    def _closed(closing: selectors.BaseSelector) -> int:
        closed, until = 0, time.monotonic() + 20.0
        while closing.get_map() and time.monotonic() < until:
            for key, _ in closing.select(0.5):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    over = not one.recv(4096)
                except OSError:
                    over = True
                if over:
                    closing.unregister(one)
                    one.close()
                    closed += 1
        for key in list(closing.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        return closed


def table(rows: Sequence[Row], command: str) -> str:
    head = f"`{command}`; two cores, {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files a process.\n\n"
    lines = ["| what | measured | goal | met |", "|---|---|---|---|"]
    lines += [f"| {row.what} | {row.figure} | {row.goal} | {row.met} |" for row in rows]
    return head + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of beats, in each of the two parts")
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--stages", type=int, default=1, help="without rounds and idle connections then")
    parser.add_argument("--heartbeat", type=float, default=1.0)
    parser.add_argument(
        "--profile", type=Path, help="run the coordinator under cProfile; figures are worth little"
    )
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Process(Path(folder), options.heartbeat, options.profile, options.stages)
        bench = Bench(options, coordinator)
        try:
            # In a stage where nobody can be dialled newcomers get no state.
            bench.join(options.members // 2, OWNERS if options.stages == 1 else options.members // 2)
            bench.join(options.members - options.members // 2, 0)
            everybody = f"{options.members} members, a beat every {options.heartbeat:g} s"
            if options.stages > 1:
                bench.seats()
                bench.beats(f"{everybody}, in {options.stages} stages", rounds=False)
                bench.tables()
            else:
                bench.beats(f"{everybody}, no rounds", rounds=False)
                bench.beats(f"{everybody}, rounds", rounds=True)
                if options.idle:
                    bench.idle()
        finally:
            for worker in bench.workers:
                worker.end()
            coordinator.end()
            told = coordinator.log.read_text().splitlines()
            print(*[line for line in told if "error" in line.lower() or "Traceback" in line][:5], sep="\n")
    if options.write:
        command = " ".join(["python benchmarks/coordinator.py", *[a for a in sys.argv[1:] if a != "--write"]])
        what = "coordinator" if options.stages == 1 else "coordinator of stages"
        write_between(PAGE, what, table(bench.rows, command))


if __name__ == "__main__":
    main()
