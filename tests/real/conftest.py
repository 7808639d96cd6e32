"""Real processes, real sockets: a coordinator and peers as people start them, watched from outside.

Small runs take less time than one look at them.  So what a test waits for is a state that lasts (of a run that goes on
until the test ends it, or that is over) or a trace that stays: a log, an event journal, an exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farflung.console.screen.status_client import StatusClient
from farflung.protocol.errors import Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.journal import Event, read_events
from rig.nursery import Child, Nursery
from rig.ports import free_ports
from rig.waiting import LONG_S, eventually

FOR_EVER = 1_000_000  # rounds: such a run goes on until its test ends it
# No process is left out for being slow, or taken for dead because this machine stood still: what is killed shows by
# its connections.
SMALL_RUN = """
[run]
name = "small"
rounds = {rounds}
min_peers = {min_peers}
[model]
layers = 1
width = 32
heads = 2
context = 32
[data]
batch = 4
[inner]
lr = 3e-3
[outer]
momentum = 0.5
[round]
sync_every = {sync_every}
chunk_kb = 16
fragments = {fragments}
deadline_s = 300.0
scatter_grace_s = 300.0
[net]
heartbeat_s = 0.5
dead_after_s = {dead_after_s}
[checkpoint]
every_rounds = {every_rounds}
keep = 2
go_back_after_s = {patience_s}
"""


class Stage:
    """One run on this machine.  Everything that it starts is ended at the end of the test, by process id."""

    def __init__(self, folder: Path, nursery: Nursery | None = None) -> None:
        """`nursery`: where all processes are forked; else each is an interpreter of its own."""
        self.folder = folder
        self.url = ""
        self.port = 0
        self.processes: dict[str, subprocess.Popen[str] | Child] = {}
        self._nursery = nursery
        self.environ: dict[str, str] = {}  # for what is started from now on
        self._client: StatusClient | None = None

    # ---- starting ------------------------------------------------------------------------------------------

    def write_run(self, text: str = SMALL_RUN, **values: object) -> None:
        shown = {
            "rounds": FOR_EVER,
            "min_peers": 2,
            "sync_every": 10,
            "fragments": 1,
            "every_rounds": 0,
            "patience_s": 2.0,
            "dead_after_s": 300.0,
        } | values
        (self.folder / "run.toml").write_text(text.format(**shown))

    def coordinate(self, *more: str) -> subprocess.Popen[str] | Child:
        """Start (or restart) the coordinator; the second start takes the port of the first."""
        for port in [self.port] if self.port else free_ports():
            words = ["coordinate", str(self.folder / "run.toml"), "--listen", f"127.0.0.1:{port}", "--json"]
            process = self.start("coordinator", [*words, *more], stdout=subprocess.PIPE)
            assert process.stdout is not None
            if line := process.stdout.readline():
                self.url, self.port = json.loads(line)["url"], port
                return process
            process.wait()
            process.stdout.close()
            assert not self.port and "cannot listen" in self.log("coordinator"), self.log("coordinator")
        raise AssertionError("no free port")

    def join(self, name: str, *more: str) -> subprocess.Popen[str] | Child:
        out = ["--out", str(self.model(name))] if "--script" not in more else []
        words = ["join", "--identity", str(self.folder / f"{name}.pem"), *out, *more, self.url]
        return self.start(name, words)

    def assist(self, name: str, *more: str) -> subprocess.Popen[str] | Child:
        words = ["assist", "--identity", str(self.folder / f"{name}.pem"), *more, self.url]
        return self.start(name, words)

    def start(self, name: str, words: list[str], stdout: int | None = None) -> subprocess.Popen[str] | Child:
        if self._nursery is None:
            return self.run_python(name, ["-m", "farflung", *words], stdout)
        with (self.folder / f"{name}.log").open("a") as log:
            out = stdout if stdout is not None else log
            self.processes[name] = self._nursery.popen(words, self.environ, out, log)
        return self.processes[name]

    def run_python(self, name: str, words: list[str], stdout: int | None = None) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else log,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environ,
            )
        self.processes[name] = process
        return process

    def call(self, *words: str, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        if self._nursery is not None:
            return self._nursery.call(words, self.environ, timeout_s)
        command = [sys.executable, "-m", "farflung", *words]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # it ends what it has started
                out, err = process.communicate()
                pytest.fail(f"{words[0]} did not end within {timeout_s:g} s:\n{out[-1000:]}\n{err[-2000:]}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    # ---- looking -------------------------------------------------------------------------------------------

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def events(self, name: str) -> list[Event]:
        """What its journal holds so far."""
        journal = self.folder / ("run.data/events.jsonl" if name == "coordinator" else f"{name}.events.jsonl")
        return read_events(journal) if journal.exists() else []

    def model(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def status(self) -> dict[str, Any]:
        if self._client is None:
            self._client = StatusClient(JoinUrl.parse(self.url)).__enter__()
        return self._client.fetch(3.0)

    def until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Look at the status until it is as wanted; the message at the end says what was seen instead."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            try:
                seen.clear()
                seen.update(self.status())
            except Unreachable:
                return False
            return wanted(seen)

        self.eventually(look, what, lambda: f"; last seen: {json.dumps(seen)[:1500]}")
        return seen

    def until_log(self, name: str, text: str) -> None:
        self.eventually(lambda: text in self.log(name), f"{name} says {text!r}")

    def eventually(self, probe: Callable[[], bool], what: str, more: Callable[[], str] = lambda: "") -> None:
        """With the last words of all processes, if it does not come to that."""
        try:
            eventually(probe, what, LONG_S)
        except pytest.fail.Exception as late:
            logs = "\n".join(f"--- {name}\n{self.log(name)[-1500:]}" for name in self.processes)
            pytest.fail(f"{late}{more()}\n{logs}")

    def wait(self, name: str) -> int:
        self.eventually(lambda: self.processes[name].poll() is not None, f"{name} ends")
        return int(self.processes[name].wait())

    def trainer_of(self, name: str) -> int:
        """Process id of the trainer that attached last, whether it still runs or not."""
        told = [each["trainer_pid"] for each in self.events(name) if "trainer_pid" in each]
        assert told, f"{name} has no trainer: {self.log(name)}"
        return int(told[-1])

    # ---- ending --------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
        running = [p for p in self.processes.values() if p.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self.processes.values():
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """All start as people start them; marked `forked_peers`, they don't spend seconds on importing torch, each."""
    forked = request.node.get_closest_marker("forked_peers") is not None
    with contextlib.closing(Stage(tmp_path, request.getfixturevalue("nursery") if forked else None)) as made:
        yield made
