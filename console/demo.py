"""`farflung demo`: a whole run on one machine, with a death in the middle, told as a table at the end.

It uses the program as people do: real processes, the real command line, encrypted loopback, the status from
outside.  It checks what it shows and fails (exit 1) when a promise does not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from farflung.console.screen.live import Screen, Status
from farflung.console.screen.status_client import StatusClient
from farflung.protocol.caps import si
from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest
from farflung.protocol.states import RunPhase

PEERS = 3
PATIENCE_S = 110.0  # without a new version
RUN_TOML = """
[run]
name = "demo"
rounds = 40
min_peers = 2
[model]
layers = 2
width = 64
heads = 4
context = 64
[data]
batch = 8
lease_samples = 512
[eval]
source = "python-stdlib"
windows = 32
every_rounds = 4
[inner]
lr = 3e-3
warmup_steps = 20
[outer]
lr = 0.7
momentum = 0.7  # 0.9 is too slow for so few rounds
[round]
sync_every = 40
chunk_kb = 64
deadline_s = 15.0
[net]
heartbeat_s = 0.5
dead_after_s = 3.0
"""


@dataclass
class DemoProcess:
    """A process of the demo and what it wrote."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    model: Path | None = None

    def said(self) -> str:
        """The last thing that it told, as people read it."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1].removeprefix("farflung: ") if lines else "python starts"


@dataclass
class Demo:
    folder: Path
    url: JoinUrl | None = None
    peers: list[DemoProcess] = field(default_factory=list)
    victim: DemoProcess | None = None
    last: dict[str, Any] = field(default_factory=dict)
    killed_at_version: int = -1
    began_at: float = field(default_factory=time.monotonic)

    # ---- the processes -----------------------------------------------------------------------------------

    def start_coordinator(self, run_toml: str = RUN_TOML) -> DemoProcess:
        (self.folder / "run.toml").write_text(run_toml, encoding="utf-8")
        words = [
            "coordinate",
            str(self.folder / "run.toml"),
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--exit-when-done",
        ]
        party = self._start("coordinator", words, stdout=subprocess.PIPE)
        assert party.process.stdout is not None
        line = party.process.stdout.readline()
        if not line:
            raise UserError(f"the demo's coordinator did not start:\n{party.log.read_text()}")
        self.url = JoinUrl.parse(json.loads(line)["url"])
        return party

    def start_peer(self, more: Sequence[str] = ()) -> DemoProcess:
        number = len(self.peers) + 1
        model = self.folder / f"peer-{number}.safetensors"
        identity = self.folder / f"peer-{number}.pem"
        party = self._start(
            f"peer {number}", ["join", "--identity", str(identity), "--out", str(model), *more, str(self.url)]
        )
        party.model = model
        self.peers.append(party)
        return party

    def _start(self, name: str, words: list[str], stdout: int | None = None) -> DemoProcess:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "farflung", *words],
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=file,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return DemoProcess(name, process, log)

    def stop_everybody(self, coordinator: DemoProcess) -> None:
        for party in [*self.peers, coordinator]:
            if party.process.poll() is None:
                party.process.terminate()
        for party in [*self.peers, coordinator]:
            try:
                party.process.wait(10)
            except subprocess.TimeoutExpired:
                party.process.kill()
                party.process.wait()

    # ---- the story -----------------------------------------------------------------------------------------

    def follow(self, client: StatusClient, screen: Screen, coordinator: DemoProcess) -> None:
        """Watch the run to its end; half-way one peer dies and a fresh one comes."""
        moved_at, moved_to = time.monotonic(), -1
        while time.monotonic() < moved_at + PATIENCE_S:
            try:
                status = client.fetch(2.0)
            except Unreachable:
                if self.last.get("phase") == RunPhase.FINISHED:
                    return  # it has ended after everybody left
                if coordinator.process.poll() is not None:
                    raise
                continue  # it only waits for its turn on a busy machine
            if status["version"] != moved_to:  # a busy machine is slow, and no reason to give up
                moved_at, moved_to = time.monotonic(), status["version"]
            self.last = self._richer(status)
            screen.show(status | self.starting(status, time.monotonic()))
            if status["phase"] == RunPhase.FINISHED and not any(m["alive"] for m in status["members"]):
                return
            if self.victim is None and status["version"] >= status["target"] // 2:
                self._kill_one(status)
            time.sleep(0.4)
        raise UserError(
            f"the demo has stood at version {moved_to} for {PATIENCE_S:g} s; demo --keep FOLDER keeps its logs"
        )

    def starting(self, status: Status, now: float) -> Status:
        """For the screen, as long as nobody is in the run: the coordinator knows nothing of those that still load
        torch, which takes a busy machine long."""
        alive = [peer for peer in self.peers if peer.process.poll() is None]
        if any(member["alive"] for member in status["members"]) or not alive:
            return {}
        said = "; ".join(f"{peer.name}: {peer.said()}" for peer in alive)
        began = f"{len(alive)} peers have been starting on this machine for {now - self.began_at:.0f} s"
        return {"starting": f"{began}; {said}"}

    def _richer(self, status: dict[str, Any]) -> dict[str, Any]:
        """Keep what members said last: those that finish leave, and their figures belong in the table."""
        said = {m["id"]: m for m in self.last.get("members", [])}
        said.update({m["id"]: m for m in status["members"] if m["alive"] or m["id"] not in said})
        return status | {"everybody": list(said.values()), "members": status["members"]} | {"said": said}

    def _kill_one(self, status: dict[str, Any]) -> None:
        self.victim = self.peers[0]
        self.killed_at_version = status["version"]
        self.victim.process.send_signal(signal.SIGKILL)
        self.victim.process.wait()
        self.start_peer()


def run_demo(keep: Path | None) -> int:
    """Returns the exit code: 0 if the run was completed and every promise that is shown held."""
    started = time.monotonic()
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it, as by Ctrl-C
    with _folder(keep) as folder:
        demo = Demo(folder)
        console.print(
            f"a coordinator and {PEERS} peers start on this machine; logs in {folder}", highlight=False
        )
        coordinator = demo.start_coordinator()
        try:
            for _ in range(PEERS):
                demo.start_peer()
            console.print(f"the coordinator is there, {PEERS} peers load torch", highlight=False)
            assert demo.url is not None
            with StatusClient(demo.url) as client, Screen() as screen:
                demo.follow(client, screen, coordinator)
            for party in demo.peers:
                party.process.wait(30)
        finally:
            demo.stop_everybody(coordinator)
        console.print("the run is over; what it has learned is measured", highlight=False)
        return _tell(console, demo, time.monotonic() - started)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UserError(f"--keep {keep}: the folder is not empty")
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="farflung-demo-") as name:
        yield Path(name)


# ---- the table at the end ------------------------------------------------------------------------------------


def _tell(console: Console, demo: Demo, seconds: float) -> int:
    from farflung.console.demo_figures import figures

    status, manifest = demo.last, Manifest.from_toml(RUN_TOML, "demo")
    survivors = [p for p in demo.peers if p is not demo.victim]
    found = figures(manifest, status, [p.model for p in survivors if p.model is not None])
    newest = status["rounds"][-1]["included"] if status.get("rounds") else []
    checks = {
        "every round was committed": status["version"] == status["target"],
        "the survivors and the fresh peer ended well": all(p.process.returncode == 0 for p in survivors),
        "all of them hold the same model, bit for bit": found.models_equal,
        "the peers' digests of the last version are one": len(found.digests) == 1,
        "the killed peer was replaced, and the fresh one took part": len(newest) == PEERS,
        "the model learned": found.loss_after < found.loss_before,
    }
    table = Table(title="what happened", show_header=False, title_justify="left")
    for row in (
        ("held-out loss (nats per byte)", f"{found.loss_before:.3f} before, {found.loss_after:.3f} after"),
        ("rounds committed", f"{status['version']} of {status['target']}"),
        ("killed with -9", f"after version {demo.killed_at_version}; a fresh peer took its place"),
        ("digests at the end", f"{', '.join(sorted(found.digests))} ({len(survivors)} peers)"),
        ("tokens learned from", si(status["tokens"])),
        ("bytes sent by all peers", f"{si(found.bytes_sent, 'B')}, state for joiners included"),
        (
            "data-parallel training would have sent",
            f"{si(found.bytes_data_parallel, 'B')} ({found.ratio:.0f} x)",
        ),
        ("time", f"{seconds:.0f} s"),
    ):
        table.add_row(*row)
    console.print(table)
    for text, holds in checks.items():
        console.print(f"{'ok    ' if holds else 'FAILED'} {text}", highlight=False)
    if not all(checks.values()):
        for party in demo.peers:
            console.print(f"--- {party.name}\n{party.log.read_text()[-2000:]}", highlight=False, markup=False)
    return 0 if all(checks.values()) else 1
