"""One run of real processes on this machine that is there to be broken: started, killed, stopped, watched, judged.

Used by tests/chaos/, by storm.py and by reliability.py.  What it waits for it reads from the event journals, as the
audit does; it asks no process anything.  Everything it starts is ended by process id.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farflung.console.history.audit import AuditReport, audit
from farflung.console.history.history import read_folder
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.failpoints import VARIABLE
from farflung.protocol.process.journal import Event, Follower
from rig.nursery import Child, Nursery
from rig.ports import free_ports

LIGHT_TRAINER = Path(__file__).resolve().parent / "light_trainer.py"
STOP_S = 3.0
EVENTS_SHOWN = 8  # of each party, when what was waited for did not come
PATIENCE_S = 300.0  # for what takes seconds on a quiet machine
CHUNK_KB = 16
RUN = """
[run]
name = "arena"
rounds = 1000000
min_peers = {min_peers}
max_peers = {max_peers}
[model]
kind = ""
[data]
source = ""
batch = 4
[round]
sync_every = {sync_every}
chunk_kb = {chunk_kb}
fragments = {fragments}
deadline_s = {deadline_s}
scatter_grace_s = {scatter_grace_s}
[net]
heartbeat_s = {heartbeat_s}
dead_after_s = {dead_after_s}
[checkpoint]
every_rounds = 5
keep = 1
go_back_after_s = {go_back_after_s}
[admission]
joins_at_once = {joins_at_once}
"""

# Short, so that hundreds of deaths are found in minutes.
QUICK = {
    "deadline_s": 5.0,
    "scatter_grace_s": 3.0,
    "heartbeat_s": 0.4,
    "dead_after_s": 1.5,
}
# As people have them who write none into their run.toml.
DEFAULT = {
    name: getattr(section, name)
    for section in (Manifest().round, Manifest().net)
    for name in QUICK
    if hasattr(section, name)
}


class Party:
    """A process and its journal, which goes on when the process is started again."""

    def __init__(self, name: str, journal: Path, log: Path) -> None:
        self.name, self.journal, self.log = name, journal, log
        self.process: Child | None = None
        self.follower = Follower(journal)
        self.events: list[Event] = []
        self.started_at = 0.0

    def look(self) -> list[Event]:
        self.events += self.follower.new_events()
        return self.events

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def id(self) -> str:
        return next((str(e["peer"]) for e in self.look() if e["event"] == "start" and "peer" in e), "")

    @property
    def is_stopped(self) -> bool:
        assert self.process is not None
        return is_stopped(self.process.pid)

    def signal(self, number: int) -> None:
        if self.alive:
            assert self.process is not None
            self.process.send_signal(number)

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-1500:] if self.log.exists() else ""

    def last_events(self) -> str:
        return "\n".join(str(each)[:400] for each in self.look()[-EVENTS_SHOWN:])


class Arena:
    def __init__(self, folder: Path, nursery: Nursery, **rules: object) -> None:
        self.folder, self._nursery = folder, nursery
        self.parties: dict[str, Party] = {}
        self.url = ""
        usual: dict[str, object] = {**QUICK, "min_peers": 2, "sync_every": 10, "fragments": 1}
        usual |= {"chunk_kb": CHUNK_KB, "joins_at_once": 16, "max_peers": 64, "go_back_after_s": 1.0}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(RUN.format(**(usual | rules)))
        self._port = next(free_ports())
        self.step_s = 0.01
        self.saves = True  # each peer has a place for checkpoints
        self.keep = "off"  # who comes back fetches the run's state from others, and so do their failpoints
        self.address = "127.0.0.1"  # where the coordinator listens

    # ---- starting --------------------------------------------------------------------------------------------

    def coordinate(self, failpoints: str = "", restored: bool = False, **environ: str) -> Party:
        """Start it, or start it again on the same port; with failpoints it may be gone before it listens."""
        party = self._party("coordinator", self.folder / "run.data" / "events.jsonl")
        party.look()
        words = ["coordinate", str(self.folder / "run.toml"), "--listen", f"{self.address}:{self._port}"]
        words += ["--restored"] if restored else []
        party.process = self._start(party, words, failpoints, environ)
        if not self.url:
            self.until(lambda: "farflung://" in party.told(), "the coordinator tells the URL")
            found = re.search(r"farflung://[^\s\"]+", party.told())
            assert found is not None
            self.url = found[0]
        return party

    def join(self, name: str, failpoints: str = "", identity: str = "", **environ: str) -> Party:
        key = self.folder / f"{identity or name}.pem"
        party = self._party(name, key.with_suffix(".events.jsonl"))
        party.look()
        words = ["join", "--identity", str(key)]
        words += ["--checkpoints", str(self.folder / "checkpoints" / name)] if self.saves else []
        words += ["--script", str(LIGHT_TRAINER), self.url]
        party.process = self._start(party, words, failpoints, environ)
        return party

    def begin(self, *names: str) -> None:
        """A run with these peers, all of whom take part."""
        self.coordinate()
        for name in names:
            self.join(name)
        self.takes_part(*names)

    def _party(self, name: str, journal: Path) -> Party:
        return self.parties.setdefault(name, Party(name, journal, self.folder / f"{name}.log"))

    def _start(self, party: Party, words: list[str], failpoints: str, environ: Mapping[str, str]) -> Child:
        assert not party.alive, f"{party.name} runs already"
        party.started_at = time.monotonic()
        light = {"FARFLUNG_STEP_S": str(self.step_s), VARIABLE: failpoints, "FARFLUNG_KEEP": self.keep}
        return self.nursery_of(party.name).start(words, light | dict(environ), party.log)

    def nursery_of(self, name: str) -> Nursery:
        """Where this party's processes are started."""
        return self._nursery

    def call(self, name: str, *words: str) -> tuple[int, str]:
        """A command that ends by itself: its exit code and what it said."""
        log = self.folder / f"{name}.log"
        child = self._nursery.start(words, {}, log)
        return child.wait(PATIENCE_S), log.read_text()

    # ---- waiting ---------------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> Party:
        return self.parties["coordinator"]

    def until(self, wanted: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
        """What it is in the end."""
        end = time.monotonic() + patience_s
        while not (found := wanted()):
            if time.monotonic() > end:
                logs = "\n".join(
                    f"--- {p.name}\n{p.told()}\n{p.last_events()}" for p in self._the_newest_first()
                )
                raise AssertionError(f"not within {patience_s:g} s: {what}\n{logs}")
            time.sleep(0.02)
        return found

    def _the_newest_first(self) -> list[Party]:
        """Whoever was started last is what a test waits for; of a long text some see the beginning alone."""
        return sorted(self.parties.values(), key=lambda party: party.started_at, reverse=True)

    def event(self, party: Party, wanted: Callable[[Event], object], what: str, since: float) -> Event:
        """The first such event after a moment; the machine's clock is everybody's."""
        seen = 0  # a journal of many tests is long, and each look at all of it would cost the run a part of a core

        def look() -> Event | None:
            nonlocal seen
            new = party.look()[seen:]
            seen += len(new)
            return next((each for each in new if each["at"] >= since and wanted(each)), None)

        return self.until(look, what)

    def commit(self, since: float, what: str = "the next commit", of: str = "") -> Event:
        """The next commit; `of`: that this peer's work is in."""

        def wanted(each: Event) -> bool:
            return each["event"] == "committed" and (not of or of in included(each))

        return self.event(self.coordinator, wanted, what, since)

    def takes_part(self, *names: str, since: float | None = None) -> None:
        start = time.monotonic() if since is None else since
        for name in names:
            party = self.parties[name]
            self.until(lambda party=party: party.id, f"{name} has written its first line")  # type: ignore[misc]
            self.commit(start, f"{name} takes part", party.id)

    # ---- breaking --------------------------------------------------------------------------------------------

    def kill(self, name: str) -> float:
        at = time.monotonic()
        self.parties[name].signal(signal.SIGKILL)
        self.reap(name)
        return at

    def reap(self, name: str) -> None:
        """Of a process that is dead or is just dying."""
        process = self.parties[name].process
        if process is not None:
            process.wait(PATIENCE_S)

    def broken(self, name: str, point: str, since: float) -> Event:
        """Wait until a failpoint broke it."""

        def wanted(each: Event) -> bool:
            return each["event"] == "failpoint" and each["point"] == point

        return self.event(self.parties[name], wanted, f"{name} passes {point}", since)

    def trainer_of(self, name: str) -> int:
        """Process id of the trainer that attached last."""
        told = [each for each in self.parties[name].look() if each["event"] == "trainer"]
        return int(next(each["trainer_pid"] for each in reversed(told) if "trainer_pid" in each))

    def stopped(self) -> list[int]:
        """What the nursery started and a signal stopped: also trainers that have not said who they are."""
        return [pid for pid in self._nursery.children() if is_stopped(pid)]

    def processes(self) -> dict[str, list[int]]:
        """All that run now by what they are; the coordinator's front door is a child of its own."""
        mine = {party.process.pid: name for name, party in self.parties.items() if party.process is not None}
        agents = [pid for pid, name in mine.items() if name != "coordinator"]
        everything = self._nursery.children()
        broker = [pid for pid in everything if mine.get(pid) == "coordinator"]
        return {
            "agent": [pid for pid in everything if pid in agents],
            "trainer": [pid for pid in everything if pid not in mine],
            "coordinator": broker,
            "front door": [child for pid in broker for child in children_of(pid)],
        }

    # ---- the end ---------------------------------------------------------------------------------------------

    def audit(self) -> AuditReport:
        return audit(read_folder(self.folder))

    def close(self) -> None:
        for party in self.parties.values():
            party.signal(signal.SIGCONT)
            if party.name != "coordinator":
                party.signal(signal.SIGTERM)
        for name in [name for name in self.parties if name != "coordinator"] + ["coordinator"]:
            self._end(name)

    def _end(self, name: str) -> None:
        process = self.parties[name].process if name in self.parties else None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        self.reap(name)


def is_kept(arena: Arena) -> None:
    """Fails with what the audit says if a promise is broken."""
    report = arena.audit()
    assert report.kept, "\n".join(report.lines())


def children_of(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it ended just now
        return []


def included(commit: Event) -> set[str]:
    return {m for m, weight in zip(commit["members"], commit["weights"], strict=True) if weight > 0.0}


def is_stopped(pid: int) -> bool:
    """The process exists and was stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False
