"""The real program in homes behind routers (routers.py): a coordinator with a public address, and peers at home.

Used by tests/lab/test_routers.py and benchmarks/routers.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.protocol.errors import NoteCause
from farflung.protocol.process.journal import Event, Follower
from rig.routers import HOST, Homes
from rig.waiting import LONG_S, eventually

RUN = """
[run]
name = "homes"
rounds = {rounds}
min_peers = {peers}
[round]
sync_every = 10
deadline_s = 5.0
[net]
relay = "{relay}"
{more}
"""
PORTS = "29800:29801:29802"
FARFLUNG = [sys.executable, "-m", "farflung"]


@dataclass
class HomeRun:
    homes: Homes
    folder: Path
    rounds: int = 8
    relay: str = "50 Mbit/s"
    min_peers: int = 0  # 0: all of them
    more: str = ""  # in run.toml
    url: str = ""
    events: list[Event] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)

    def coordinate(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        toml = self.folder / "run.toml"
        peers = self.min_peers or len(self.homes.names)
        toml.write_text(RUN.format(rounds=self.rounds, peers=peers, relay=self.relay, more=self.more))
        words = ["coordinate", "--json", "--exit-when-done", "--listen", f"0.0.0.0:{PORTS}"]
        words += ["--public", self.homes.host_address, toml]
        out, log = self.folder / "coordinator.out", self.folder / "coordinator.log"
        with out.open("w") as told, log.open("w") as said:
            self.running[HOST] = self.homes.popen(HOST, [*FARFLUNG, *words], stdout=told, stderr=said)
        line = eventually(lambda: out.read_text().partition("\n")[0], "the coordinator tells the URL", LONG_S)
        self.url = str(json.loads(line)["url"])
        self._follower = Follower(self.folder / "run.data" / "events.jsonl")

    def join(self, name: str, *options: str) -> None:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        words = [
            "join",
            *options,
            "--identity",
            home / "id.pem",
            "--out",
            home / "model.safetensors",
            self.url,
        ]
        with (self.folder / f"{name}.log").open("w") as log:
            self.running[name] = self.homes.popen(name, [*FARFLUNG, *words], stdout=log, stderr=log)

    def assist(self) -> None:
        """A peer without a trainer, at the host."""
        words = [*FARFLUNG, "assist", "--identity", self.folder / "helper.pem", self.url]
        with (self.folder / "helper.log").open("w") as log:
            self.running["helper"] = self.homes.popen(HOST, words, stdout=log, stderr=log)

    def look(self) -> list[Event]:
        self.events += self._follower.new_events()
        return self.events

    def of(self, kind: str) -> list[Event]:
        return [each for each in self.look() if each["event"] == kind]

    def told(self) -> str:
        logs: Sequence[Path] = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def finish(self) -> None:
        for name, process in self.running.items():
            try:
                code = process.wait(LONG_S)
            except Exception as error:
                raise AssertionError(f"{name} did not end\n{self.told()}") from error
            assert code == 0, f"{name} ended with {code}\n{self.told()}"

    @property
    def commits(self) -> list[Event]:
        return self.of("committed")

    @property
    def punched_at(self) -> list[float]:
        """When two of them met past their routers."""
        return [float(each["at"]) for each in self.of("note") if each["cause"] == NoteCause.PUNCHED]

    @property
    def second_hello_at(self) -> float:
        """When the last of those who are needed was let in, by the machine's clock."""
        return float(self.of("admitted")[len(self.homes.names) - 1]["at"])

    @property
    def relay_pid(self) -> int:
        """Of the coordinator's child that is the relay."""
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if b"farflung.coordinator.relay.relay" in words and parent == self.running[HOST].pid:
                return int(entry.name)
        return 0

    def kill_relay(self) -> None:
        os.kill(eventually(lambda: self.relay_pid, "the relay runs"), signal.SIGKILL)
