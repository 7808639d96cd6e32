"""One run of the real program in the lab, watched from outside: bytes on the wire, and every peer's event log.

Used by wan.py and by tests/lab/test_data_plane.py.  A coordinator and, for each host, a peer whose trainer has no model
(farflung.console.bench.trainer), as `farflung bench allreduce` starts them; here each stands in its own namespace.
It decides nothing about what the figures should be.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.console.bench.bench import Aim, BenchOptions, BenchParty, as_toml, check
from farflung.console.bench.figures import Killed, result_of
from farflung.protocol.errors import FarflungError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.journal import JOURNAL_VARIABLE, Event, read_events
from rig.lab.emulator import Effort, Host, HostSpec, Lab
from rig.nursery import Child, Nursery

SAMPLE_S = 0.05
LOOK_S, AIM_S = 0.05, 0.002
PORT = 29870
COORDINATOR = "coordinator"
CONGESTION_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"
# Written at once: what a file object still holds when it is dropped fails without a word.
SET_CONGESTION = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), sys.argv[2].encode())"


def allowed_congestion() -> list[str]:
    """What a host of the lab may use; the machine itself may have more."""
    return Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def use_congestion(host: Host, wanted: str) -> None:
    """Of TCP in this host; "": as it is."""
    script = [sys.executable, "-S", "-c", SET_CONGESTION, CONGESTION_FILE, wanted]
    if wanted and host.popen(script, stderr=subprocess.DEVNULL).wait(30):
        allowed = ", ".join(allowed_congestion())
        raise FarflungError(f"this kernel does not let a host use {wanted}, but: {allowed}")


@dataclass(frozen=True)
class Setting:
    """What runs where.  The coordinator has a host of its own, `coordinator`, or else stands beside the first peer."""

    options: BenchOptions
    hosts: list[HostSpec]  # one for each peer, in order
    coordinator: HostSpec | None = None
    environ: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # host -> what its peer finds set
    congestion: str = ""  # of TCP in every host; "": this machine's default
    tcp_buffer_bytes: int | None = 64 << 20
    seed: int = 1
    timeout_s: float = 300.0
    foresees: bool = True  # results may leave before the decision
    audits: bool = True  # False: the end waits for nobody who is to merge sums again, and can't

    @property
    def manifest(self) -> Manifest:
        manifest = check(self.options)
        if self.audits:
            return manifest
        merge = manifest.merge.model_copy(update={"audit": 0.0})
        return manifest.model_copy(update={"merge": merge})


@dataclass
class Found:
    result: dict[str, Any]  # as `farflung bench allreduce --json` tells it
    events: dict[str, list[Event]]  # host -> what its agent wrote
    wire: Wire
    effort: Effort
    peers: dict[str, str]  # host -> the id of its peer
    log: str  # the coordinator's
    told: dict[str, dict[str, Any]]  # host -> what its trainer says at the end

    def phases(self, host: str) -> Iterator[tuple[float, float, float, float, float]]:
        """For each round after the first: when it was planned, encoded, all held, decided, all results were here."""
        plans = [e["round"] for e in self.events[host] if e["event"] == "plan"]
        for number in plans[1:]:
            at = {e["event"]: e["at"] for e in self.events[host] if e.get("round") == number}
            if {"encoded", "held", "decided", "results"} <= at.keys():
                yield at["plan"], at["encoded"], at["held"], at["decided"], at["results"]

    def transfers(self, host: str) -> Iterator[tuple[float, float]]:
        """The same rounds: from the first bytes that may leave to the last ones that are due.  Results leave while
        contributions still come, so there are no two spans with a pause between them."""
        for _, encoded, held, _, results in self.phases(host):
            yield encoded, max(held, results)


class Wire:
    """What passed each host's line, sampled while it ran; bytes with all headers."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._counts: list[dict[str, tuple[int, int]]] = []  # host -> (up, down)

    def sample(self, lab: Lab) -> None:
        counts = {
            name: (up.delivered_bytes, down.delivered_bytes) for name, (up, down) in lab.counters().items()
        }
        self._at.append(time.monotonic())
        self._counts.append(counts)

    def rate_mbit(self, host: str, way: int, from_s: float, to_s: float) -> float:
        """`way`: 0 up, 1 down.  Between the samples nearest to the two moments."""
        first, last = self._near(from_s), self._near(to_s)
        moved = self._counts[last][host][way] - self._counts[first][host][way]
        return 8e-6 * moved / max(SAMPLE_S, self._at[last] - self._at[first])

    def _near(self, at: float) -> int:
        after = bisect.bisect_left(self._at, at)
        around = [index for index in (after - 1, after) if 0 <= index < len(self._at)]
        return min(around, key=lambda index: abs(self._at[index] - at))


class LabRun:
    """Use as a context manager; everything that it started ends with it, by process id."""

    def __init__(self, setting: Setting, nursery: Nursery | None = None) -> None:
        """`nursery`: where all processes are forked; else each is an interpreter of its own."""
        self.setting = setting
        self._nursery = nursery
        hosts = [*setting.hosts, *([setting.coordinator] if setting.coordinator is not None else [])]
        self.lab = Lab(hosts, setting.seed, setting.tcp_buffer_bytes)
        self.parties: dict[str, BenchParty] = {}
        self.aim: Aim | None = None
        self._coordinator: subprocess.Popen[str] | Child | None = None

    def __enter__(self) -> LabRun:
        self._temporary = tempfile.TemporaryDirectory(prefix="farflung-lab-")
        self.folder = Path(self._temporary.name)
        self.lab.__enter__()
        try:
            for host in self.lab.hosts.values():
                use_congestion(host, self.setting.congestion)
            url = self._coordinate()
            for number, spec in enumerate(self.setting.hosts):
                self.parties[spec.name] = self._join(spec.name, url, number)
        except BaseException:
            self.close()
            raise
        kill_at = self.setting.options.kill_at
        if kill_at is not None:
            victim = self.parties[self.setting.hosts[-1].name]
            self.aim = Aim(victim, kill_at, self.setting.manifest.run.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in (self._coordinator, *(party.process for party in self.parties.values())):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (self._coordinator, *(party.process for party in self.parties.values())):
            if process is not None:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        self.lab.close()
        self._temporary.cleanup()

    # ---- starting --------------------------------------------------------------------------------------------

    def _start(
        self, host: Host, name: str, words: list[str], more: Mapping[str, str]
    ) -> subprocess.Popen[str] | Child:
        with (self.folder / f"{name}.log").open("w") as log:
            piped = subprocess.PIPE if name == COORDINATOR else log
            if self._nursery is not None:
                return self._nursery.popen(["-m", *words], more, piped, log, host.namespaces)
            environ = os.environ | {"OMP_NUM_THREADS": "1"} | more
            return host.popen(
                [sys.executable, "-m", *words], stdout=piped, stderr=log, text=True, env=environ
            )

    def _coordinate(self) -> str:
        data = self.folder / COORDINATOR
        data.mkdir()
        run_toml = self.folder / "run.toml"
        run_toml.write_text(as_toml(self.setting.manifest), encoding="utf-8")
        home = self.setting.coordinator or self.setting.hosts[0]
        host = self.lab.hosts[home.name]
        program = "farflung" if self.setting.foresees else "rig.unforeseen"
        words = [program, "coordinate", str(run_toml), "--listen", f"{host.address}:{PORT}"]
        more = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self._coordinator = self._start(
            host, COORDINATOR, [*words, "--data", str(data), "--json", "--exit-when-done"], more
        )
        assert self._coordinator.stdout is not None
        line = self._coordinator.stdout.readline()
        if not line:
            raise FarflungError(f"the coordinator did not start: {self.log(COORDINATOR)}")
        url: str = json.loads(line)["url"]
        return url

    def _join(self, name: str, url: str, number: int) -> BenchParty:
        words = [
            "farflung.console.bench.trainer",
            "--url",
            url,
            "--identity",
            str(self.folder / f"{name}.pem"),
        ]
        words += ["--figures", str(self.folder / f"{name}.json"), *(["--check"] if number == 0 else [])]
        words += ["--pause", str(self.setting.options.pause_s)]
        more = {JOURNAL_VARIABLE: str(self.folder / f"{name}.events"), **self.setting.environ.get(name, {})}
        return BenchParty(name, self._start(self.lab.hosts[name], name, words, more), self.folder)

    # ---- watching --------------------------------------------------------------------------------------------

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def events(self, name: str) -> list[Event]:
        return read_events(self.parties[name].journal)

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.setting.timeout_s
        while not holds():
            self._complain_of_the_dead()
            if time.monotonic() >= end:
                raise FarflungError(f"{what}: not within {self.setting.timeout_s:g} s")
            time.sleep(LOOK_S)

    def finish(self) -> Found:
        """Wait for the run's end, watching the wire all the time."""
        wire, over = Wire(), threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_S):
                wire.sample(self.lab)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self._wait_for_all()
        finally:
            over.set()
            watcher.join()
        victim = self.aim.victim.name if self.aim is not None and self.aim.done else None
        told = {name: party.report() for name, party in self.parties.items() if name != victim}
        killed: Killed | None = self.aim.killed if self.aim is not None else None
        events = {name: self.events(name) for name in self.parties}
        result, peers = (
            result_of(list(told.values()), killed),
            {name: one["peer"] for name, one in told.items()},
        )
        return Found(result, events, wire, self.lab.effort(), peers, self.log(COORDINATOR), told)

    def _wait_for_all(self) -> None:
        end = time.monotonic() + self.setting.timeout_s
        while any(party.process.poll() is None for party in self.parties.values()):
            self._complain_of_the_dead()
            aiming = self.aim is not None and not self.aim.done
            if self.aim is not None and aiming:
                self.aim.fire_if_due()
            if time.monotonic() >= end:
                raise FarflungError(
                    f"not done within {self.setting.timeout_s:g} s: {self.log(COORDINATOR)[-500:]}"
                )
            time.sleep(AIM_S if aiming else LOOK_S)

    def _complain_of_the_dead(self) -> None:
        victim = self.aim.victim if self.aim is not None and self.aim.done else None
        for name, party in self.parties.items():
            if party is not victim and party.process.poll():
                raise FarflungError(f"{name} ended: {party.last_words}")


def run(setting: Setting) -> Found:
    with LabRun(setting) as running:
        return running.finish()
