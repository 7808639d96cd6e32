"""A run as numbers, a row for each committed round: what experiment trackers and spreadsheets want.

Called by `farflung export` and live_tracker.py with what the history's reader has found.  Pure.  Nothing here rests on
clocks: what a peer tells of a round is told before its commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from farflung.console.history.history import Told
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process.journal import Event

KEPT_ROUNDS = 256  # what peers told of rounds that were never committed is forgotten after so many


@dataclass(frozen=True)
class PlotRow:
    """One committed round; of a peer's own rows one look at it."""

    number: int  # of the round: only ever grows, also where a run has fragments or goes back to an earlier version
    wall: float  # seconds since 1970
    values: dict[str, float]  # by a name with one slash, such as "run/loss"


@dataclass
class RunRows:
    """The fold over a run's events: peers' events of a round have to be there before the coordinator's."""

    key: ClassVar[str] = "run/version"  # in every row
    group: ClassVar[str] = ""  # a run stands for itself
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

    def take(self, told: Iterable[Told]) -> list[PlotRow]:
        """The rounds that were committed."""
        rows: list[PlotRow] = []
        for process, event in told:
            if not process.is_host:
                self._tell_peers(process.peer, event)
            elif (row := self._tell(event)) is not None:
                rows.append(row)
        return rows

    def _tell_peers(self, peer: str, event: Event) -> None:
        if event.get("event") == "frozen":
            self._frozen[peer, int(event.get("fragment") or 0)] = event
        elif event.get("event") == "sent" and "round" in event:
            frozen = self._frozen.get((peer, int(event.get("fragment") or 0)))
            if frozen is not None:
                self._sent[int(event["round"]), peer] = frozen

    def _tell(self, event: Event) -> PlotRow | None:
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
        self.run_id, self.name = (
            str(event.get("run_id") or event.get("run") or ""),
            str(event.get("run") or ""),
        )
        self.rules = dict(event.get("rules") or {})
        if not event.get("again"):
            self._alive.clear()  # whoever is still there is admitted anew

    def _row(self, event: Event) -> PlotRow:
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
        if event.get("norm") is not None:
            values["run/update_norm"] = float(event["norm"])
        # The others' rounds merge what the same tokens taught other parts of the model.
        if fragment == BOOKS_FRAGMENT:
            values |= self._learned(event, wall)
        for peer, share in shares.items():
            name = self._names.get(peer, peer)
            values[f"weight/{name}"] = share
            frozen = self._sent.get((round_no, peer), {})
            values |= {
                f"{key}/{name}": float(frozen[key]) for key in ("loss", "step") if frozen.get(key) is not None
            }
        self._sent = {key: told for key, told in self._sent.items() if round_no - KEPT_ROUNDS < key[0]}
        return PlotRow(round_no, wall, values)

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
