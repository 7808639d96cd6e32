"""The event journals of one run, read and put together: what became durable, era by era, and what each peer did.

Used by the audit.  Knows the format (docs/events.md) and no promise; judging is left to the checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.coordinator.ledger.old_sentences import with_cause
from farflung.protocol.errors import UserError
from farflung.protocol.process.journal import Event, read_events

PATTERN = "*events.jsonl"
Key = tuple[int, int]  # (fragment, version)


@dataclass
class Era:
    """What the run is, until it goes back."""

    commits: dict[Key, Event] = field(default_factory=dict)
    digests: dict[Key, str] = field(default_factory=dict)

    def back_to(self, versions: list[int]) -> Era:
        """What is newer is made again, as something else."""
        newer = {key for key in {**self.commits, **self.digests} if key[1] > versions[key[0]]}
        commits = {key: commit for key, commit in self.commits.items() if key not in newer}
        return Era(commits, {key: digest for key, digest in self.digests.items() if key not in newer})


@dataclass
class Process:
    """One life of a coordinator or agent: its events from `start` on."""

    events: list[Event]

    @property
    def start(self) -> Event:
        return self.events[0]

    @property
    def ended(self) -> Event | None:
        return next((each for each in reversed(self.events) if each["event"] == "end"), None)

    def of(self, *kinds: str) -> Iterator[Event]:
        return (each for each in self.events if each["event"] in kinds)


@dataclass
class Journals:
    coordinators: list[Process]
    peers: dict[str, list[Process]]
    records: list[Event]  # what became durable, as it was written
    files: int = 0
    eras: list[Era] = field(default_factory=list)
    geneses: set[str] = field(default_factory=set)
    by_round: dict[int, list[Event]] = field(default_factory=dict)  # commits

    @property
    def lives(self) -> list[tuple[str, Process]]:
        """(peer, process) of all agents."""
        return [(peer, process) for peer, found in self.peers.items() for process in found]

    @property
    def rules(self) -> dict[str, Any]:
        return dict(self.coordinators[0].start["rules"])

    def era(self, number: int) -> Era:
        return self.eras[min(number, len(self.eras) - 1)]

    def fold(self) -> None:
        """Era by era; a version that is there twice in one era keeps its first commit and digest."""
        self.eras = [Era()]
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
                case "rolled_back":
                    self.eras.append(now.back_to(each["versions"]))


def read_folder(folder: Path) -> Journals:
    """All journals below it; UserError where there is no run to be found, or more than one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    files = sorted(folder.rglob(PATTERN))
    lives = [life for file in files for life in _lives(list(map(with_cause, read_events(file))))]
    coordinators = [life for life in lives if life.start.get("role") == "coordinator"]
    if not coordinators:
        raise UserError(f"{folder}: no journal of a coordinator below it (its data folder has events.jsonl)")
    runs = sorted({str(life.start["run_id"]) for life in coordinators})
    if len(runs) > 1:
        raise UserError(f"{folder}: journals of {len(runs)} runs; name the folder of one of them")
    peers: dict[str, list[Process]] = {}
    for life in lives:
        if life.start.get("role") == "peer" and life.start["run"] == coordinators[0].start["run"]:
            peers.setdefault(life.start["peer"], []).append(life)
    records = [each for life in coordinators for each in life.events if "pos" in each]
    found = Journals(coordinators, peers, records, len(files))
    found.fold()
    return found


def _lives(events: list[Event]) -> Iterator[Process]:
    """Two processes may write into one file: their lines are told apart by the process id."""
    open_lives: dict[int, Process] = {}
    for each in events:
        pid = each["pid"]
        if each["event"] == "start" and not each.get("again"):
            if pid in open_lives:
                yield open_lives[pid]
            open_lives[pid] = Process([each])
        elif pid in open_lives:
            open_lives[pid].events.append(each)
        elif each["event"] == "start":
            open_lives[pid] = Process([each])  # its beginning was in a file that is gone
    yield from open_lives.values()
