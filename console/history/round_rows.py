"""A run as numbers, a row for each committed round: what experiment trackers and spreadsheets want.

Called by `farflung export`.  `RunRows` is pure: it is told events and gives rows.  `Journals` reads the files below a
folder while they grow.  Nothing here rests on clocks: what a peer tells of a round is told before its commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.console.history.journals import PATTERN
from farflung.protocol.errors import UserError
from farflung.protocol.fragments import BOOKS_FRAGMENT
from farflung.protocol.process.journal import OLD, Event, Follower

HOST_FILE = "events.jsonl"  # as coordinators name theirs; those of peers have a name before it
KEPT_ROUNDS = 256  # what peers told of rounds that were never committed is forgotten after so many


@dataclass(frozen=True)
class Row:
    """One committed round."""

    round_no: int  # only ever grows, also where a run has fragments or goes back to an earlier version
    wall: float  # seconds since 1970
    values: dict[str, float]  # by a name with one slash, such as "run/loss"


@dataclass
class RunRows:
    """The fold over a run's events: peers' events of a round have to be told before the coordinator's."""

    name: str = ""
    run_id: str = ""
    rules: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    _names: dict[str, str] = field(default_factory=dict)
    _alive: set[str] = field(default_factory=set)
    _versions: dict[int, int] = field(default_factory=dict)  # of each fragment
    _frozen: dict[tuple[str, int], Event] = field(default_factory=dict)  # (peer, fragment)
    _sent: dict[tuple[int, str], Event] = field(default_factory=dict)  # (round, peer) -> what it had frozen
    _last_wall: float | None = None

    @property
    def finished(self) -> bool:
        rounds, fragments = int(self.rules.get("rounds") or 0), int(self.rules.get("fragments") or 1)
        done = sum(version >= rounds for version in self._versions.values())
        return rounds > 0 and done >= fragments

    def tell_peers(self, peer: str, event: Event) -> None:
        if event.get("event") == "frozen":
            self._frozen[peer, int(event.get("fragment") or 0)] = event
        elif event.get("event") == "sent" and "round" in event:
            frozen = self._frozen.get((peer, int(event.get("fragment") or 0)))
            if frozen is not None:
                self._sent[int(event["round"]), peer] = frozen

    def tell(self, event: Event) -> Row | None:
        """An event of the coordinator's journal; a row if it is a commit."""
        match event.get("event"):
            case "start":
                self._begin(event)
            case "admitted":
                self._names[str(event["peer"])] = str(event.get("name") or event["peer"])
                self._alive.add(str(event["peer"]))
            case "departed":
                self._alive.discard(str(event["peer"]))
            case "committed":
                return self._row(event)
        return None

    def _begin(self, event: Event) -> None:
        found = str(event.get("run_id") or event.get("run") or "")
        if self.run_id and found != self.run_id:
            raise UserError("these are journals of more than one run; name the folder of one of them")
        self.run_id, self.name = found, str(event.get("run") or "")
        self.rules = dict(event.get("rules") or {})
        if not event.get("again"):
            self._alive.clear()  # whoever is still there is admitted anew

    def _row(self, event: Event) -> Row:
        round_no, wall, fragment = int(event["round"]), float(event["wall"]), int(event.get("fragment") or 0)
        self._versions[fragment] = int(event["version"])
        shares = dict(
            zip(map(str, event.get("members") or []), map(float, event.get("weights") or []), strict=False)
        )
        values = {
            "run/version": float(event["version"]),
            "run/alive": float(len(self._alive)),
            "round/took_part": float(sum(share > 0 for share in shares.values())),
            "round/left_out": float(len(event.get("excluded") or {})),
            "round/seconds": float(event.get("seconds") or 0.0),
            "round/sent_bytes": float(event.get("tx_bytes") or 0.0),
        }
        if (
            fragment == BOOKS_FRAGMENT
        ):  # the others' rounds merge what the same tokens taught other parts of the model
            values |= self._learned(event, wall)
        for peer, share in shares.items():
            name = self._names.get(peer, peer)
            values[f"weight/{name}"] = share
            frozen = self._sent.get((round_no, peer), {})
            values |= {
                f"{key}/{name}": float(frozen[key]) for key in ("loss", "step") if frozen.get(key) is not None
            }
        self._sent = {key: told for key, told in self._sent.items() if round_no - KEPT_ROUNDS < key[0]}
        return Row(round_no, wall, values)

    def _learned(self, event: Event, wall: float) -> dict[str, float]:
        tokens = int(event.get("tokens") or 0)
        self.tokens += tokens
        found = {"run/tokens": float(self.tokens)}
        if event.get("loss") is not None:
            found["run/loss"] = float(event["loss"])
        if self._last_wall is not None and wall > self._last_wall:
            found["run/tokens_per_s"] = tokens / (wall - self._last_wall)
        self._last_wall = wall
        return found


class Journals:
    """The files below a folder, which grow and become more."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder")
        self._folder = folder
        self._files: dict[Path, Follower] = {}
        self._writers: dict[Path, Event] = {}  # each file's first `start`
        self.run = RunRows()

    def news(self) -> list[Row]:
        """The rounds that were committed since the last call."""
        found = {path: self._events(path) for path in self._found()}
        host = [path for path, writer in self._writers.items() if writer.get("role") == "coordinator"]
        for path, events in found.items():
            if path not in host:
                for event in events:
                    self.run.tell_peers(str(self._writers.get(path, {}).get("peer")), event)
        told = sorted((e for path in host for e in found.get(path, [])), key=lambda e: float(e["wall"]))
        return [row for event in told if (row := self.run.tell(event)) is not None]

    def _found(self) -> list[Path]:
        """Coordinators' journals first: what peers told of a round is then there when its commit is read."""
        paths = (path for path in self._folder.rglob(PATTERN) if path.is_file())
        return sorted(paths, key=lambda path: (path.name != HOST_FILE, path))

    def _events(self, path: Path) -> list[Event]:
        events: list[Event] = []
        if path not in self._files:
            self._files[path] = Follower(path)
            events += Follower(Path(f"{path}{OLD}")).news()
        events += self._files[path].news()
        if path not in self._writers:
            start = next((event for event in events if event.get("event") == "start"), None)
            if start is not None:
                self._writers[path] = start
        return events
