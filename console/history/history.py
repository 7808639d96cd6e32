"""A run's history: the event journals below a folder, put together by run, process and era.

The audit, the replay, the pictures and the export are views of it: it reads, and knows the format (docs/events.md), and
nothing of what they make of it.  Journals may grow while it reads, and more of them may come.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import AbortCause, DepartureCause, NoteCause, UserError
from farflung.protocol.process.journal import OLD, Event, Follower

PATTERN = "*events.jsonl"
HOST_FILE = "events.jsonl"  # as coordinators name theirs; those of peers have a name before it
_OF_THE_WRITER = frozenset({"at", "wall", "pid", "late", "missing"})
Key = tuple[int, int]  # (fragment, version)
# Event -> its cause, where it names none that is known here.
_CAUSES: dict[str, StrEnum] = {
    "aborted": AbortCause.UNKNOWN,
    "departed": DepartureCause.UNKNOWN,
    "note": NoteCause.NEWS,
}


@dataclass
class Process:
    """One life of a coordinator or agent: its events from `start` on."""

    events: list[Event]

    @property
    def start(self) -> Event:
        return self.events[0]

    @property
    def is_host(self) -> bool:
        return bool(self.start.get("role") == "coordinator")

    @property
    def peer(self) -> str:
        return str(self.start.get("peer"))

    @property
    def run_id(self) -> str:
        return str(self.start.get("run_id") or self.start.get("run") or "")

    @property
    def ended(self) -> Event | None:
        return next((each for each in reversed(self.events) if each["event"] == "end"), None)

    def of(self, *kinds: str) -> Iterator[Event]:
        return (each for each in self.events if each["event"] in kinds)


Told = tuple[Process, Event]


@dataclass
class RunEra:
    """What the run is, until it goes back."""

    commits: dict[Key, Event] = field(default_factory=dict)
    digests: dict[Key, str] = field(default_factory=dict)

    def withdraw(self, fragment: int, version: int) -> None:
        """A digest was proven wrong; those settled after it are void as well."""
        for key in [key for key in self.digests if key[0] == fragment and key[1] >= version]:
            del self.digests[key]

    def back_to(self, versions: list[int]) -> RunEra:
        """What is newer is made again, as something else."""
        newer = {key for key in {**self.commits, **self.digests} if key[1] > versions[key[0]]}
        commits = {key: commit for key, commit in self.commits.items() if key not in newer}
        return RunEra(commits, {key: digest for key, digest in self.digests.items() if key not in newer})


class History:
    """The journals of one run below a folder.  What is there now, `read_folder` tells; `news` what is added to it."""

    def __init__(self, folder: Path, keep: bool = True) -> None:
        """`keep`: the events, for views of the whole; else they are only handed on."""
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        self.coordinators: list[Process] = []
        self.agents: list[Process] = []
        self.files: dict[Path, Follower] = {}
        self.records: list[Event] = []  # what became durable, as it was written
        self.eras: list[RunEra] = [RunEra()]
        self.geneses: set[str] = set()
        self.by_round: dict[int, list[Event]] = {}  # commits
        self._folder, self._keep = folder, keep
        self._open: dict[
            tuple[Path, object], Process
        ] = {}  # by the process id; and the newest, for lines without one

    @property
    def lives(self) -> list[tuple[str, Process]]:
        """(peer, process) of all agents of the run, peer by peer."""
        mine = [
            each for each in self.agents if each.start.get("run") == self.coordinators[0].start.get("run")
        ]
        order = {peer: place for place, peer in enumerate(dict.fromkeys(each.peer for each in mine))}
        return sorted(((each.peer, each) for each in mine), key=lambda life: order[life[0]])

    @property
    def told(self) -> tuple[list[Event], dict[str, list[Event]]]:
        """All events of the coordinators, and of each peer."""
        peers: dict[str, list[Event]] = {}
        for peer, life in self.lives:
            peers.setdefault(peer, []).extend(life.events)
        return [event for life in self.coordinators for event in life.events], peers

    @property
    def rules(self) -> dict[str, Any]:
        return dict(self.coordinators[0].start["rules"])

    @property
    def no_run(self) -> UserError:
        """To be raised where there are no coordinators."""
        told = "no event journals below it that tell a run's story: no journal of a coordinator"
        return UserError(f"{self._folder}: {told} (its data folder has {HOST_FILE})")

    def era(self, number: int) -> RunEra:
        return self.eras[min(number, len(self.eras) - 1)]

    def new_events(self) -> list[Told]:
        """What was written since the last call: agents' events first, then the coordinator's in their order.

        No clock is needed for that: what a peer tells of a round is told before its commit.
        """
        told = [each for path in self._paths() for each in self._read(path)]
        host = [(process, event) for process, event in told if process.is_host]
        agents = [(process, event) for process, event in told if not process.is_host]
        return agents + sorted(host, key=lambda each: float(each[1].get("wall") or 0.0))

    def catch_up_with_hosts(self) -> None:
        """What peers had heard of by the time their journals were read is then in the coordinator's too."""
        hosts = [path for (path, pid), life in self._open.items() if pid is None and life.is_host]
        for path in hosts:
            for _ in self._read(path):
                pass

    def _paths(self) -> list[Path]:
        """Coordinators' journals first: what peers told of a round is then there when its commit is read."""
        paths = (path for path in self._folder.rglob(PATTERN) if path.is_file())
        return sorted(paths, key=lambda path: (path.name != HOST_FILE, path))

    def _read(self, path: Path) -> Iterator[Told]:
        """Two processes may write into one file; what has no beginning, since that was in a file that is gone, is left
        out."""
        events: list[Event] = []
        if path not in self.files:
            self.files[path] = Follower(path)
            events += Follower(Path(f"{path}{OLD}")).new_events()
        for event in each_round(map(_with_cause, [*events, *self.files[path].new_events()])):
            process = self._open.get((path, event.get("pid")))
            if event.get("event") == "start" and (process is None or not event.get("again")):
                process = self._begin(path, event)
            elif process is None:
                continue
            elif self._keep:
                process.events.append(event)
            yield process, event

    def _begin(self, path: Path, start: Event) -> Process:
        process = Process([start])
        if process.is_host and any(each.run_id != process.run_id for each in self.coordinators):
            raise UserError("these are journals of more than one run; name the folder of one of them")
        (self.coordinators if process.is_host else self.agents).append(process)
        self._open[path, start.get("pid")] = self._open[path, None] = process
        return process

    def fold(self) -> None:
        """Era by era; a version that is there twice in one era keeps its first commit and digest."""
        if sum(path.name == HOST_FILE for path in self.files) > 1:
            self._tell_once()
        self.records = [each for life in self.coordinators for each in life.events if "pos" in each]
        for each in self.records:
            now = self.eras[-1]
            match each["event"]:
                case "genesis":
                    self.geneses |= set(each["digests"])
                    now.digests |= {(fragment, 0): digest for fragment, digest in enumerate(each["digests"])}
                case "committed":
                    now.commits.setdefault((each["fragment"], each["version"]), each)
                    self.by_round.setdefault(each["round"], []).append(each)
                case "digest":
                    now.digests.setdefault((each["fragment"], each["version"]), each["digest"])
                case "withdrawn":
                    now.withdraw(each["fragment"], each["version"])
                case "rolled_back":
                    self.eras.append(now.back_to(each["versions"]))

    def _tell_once(self) -> None:
        """Of several places from which a run was led: who takes over writes down what it finds, too."""
        self.coordinators.sort(key=_in_turn)
        durable = [each for life in self.coordinators for each in life.events if "pos" in each]
        told = {_facts(each) for each in durable if not each.get("late")}
        for life in self.coordinators:
            again = {id(each) for each in life.events if each.get("late") and _facts(each) in told}
            life.events = [each for each in life.events if id(each) not in again]
            told |= {_facts(each) for each in life.events if each.get("late")}


def _in_turn(life: Process) -> tuple[int, bool]:
    """One that ended before its first record gave its incarnation to the next one, which may be elsewhere."""
    incarnation = int(life.start.get("incarnation", 0))
    began = any(each["incarnation"] == incarnation for each in life.of("started") if not each.get("late"))
    return incarnation, began


def _facts(event: Event) -> bytes:
    """The same, whoever wrote it and when."""
    facts = {name: value for name, value in event.items() if name not in _OF_THE_WRITER}
    return hash_bytes(json.dumps(facts, sort_keys=True).encode())


def _with_cause(event: Event) -> Event:
    """A cause that is not known here is none."""
    if event.get("event") not in _CAUSES:
        return event
    otherwise = _CAUSES[event["event"]]
    return {
        **event,
        "cause": next((each for each in type(otherwise) if each == event.get("cause")), otherwise),
    }


def each_round(events: Iterable[Event]) -> Iterator[Event]:
    """A commit of all stages of a model at once is told as one commit of each; `of_batch`: of how many."""
    for event in events:
        if event.get("event") == "committed_batch":
            shared = {name: value for name, value in event.items() if name != "rounds"}
            for each in event["rounds"]:
                yield {**shared, **each, "event": "committed", "of_batch": len(event["rounds"])}
        else:
            yield event


def read_folder(folder: Path) -> History:
    """All of it; UserError where there is no run to be found, or more than one."""
    history = History(folder)
    history.new_events()
    if not history.coordinators:
        raise history.no_run
    history.catch_up_with_hosts()
    history.fold()
    return history


# ---- finding -----------------------------------------------------------------------------------------------
# What the audit found of one promise: how much was looked at, and what broke it.
#
# Filled by the checks in audit.py. Data and its words, no judgement.

SHOWN = 5


@dataclass
class Finding:
    promise: str
    title: str
    of_what: str  # what `checked` counts
    checked: int = 0
    broken: list[str] = field(default_factory=list)
    more: str = ""

    def expect(self, holds: bool, told: str) -> None:
        self.checked += 1
        if not holds:
            self.broken.append(told)

    def lines(self) -> list[str]:
        """One line; a broken promise has more."""
        verdict = "BROKEN" if self.broken else "kept" if self.checked else "not seen"
        more = f" ({self.more})" if self.more else ""
        line = f"{self.promise:<4}{verdict:<9}{self.title}: {self.checked} {self.of_what} checked{more}"
        hidden = len(self.broken) - SHOWN
        told = [f"    {text}" for text in self.broken[:SHOWN]]
        return [line, *told, *([f"    and {hidden} more"] if hidden > 0 else [])]
