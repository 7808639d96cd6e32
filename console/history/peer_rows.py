"""One peer's own training as numbers, a row whenever it tells how far it is: what its owner's tracker wants.

Called by live_tracker.py with what the peer's event journal says.  Pure.  A journal may hold earlier lives of the peer,
and runs that it took part in before; each life of its process is told by itself, as trackers do with a training script
that is started again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farflung.console.history.round_rows import PlotRow
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.protocol.process.journal import Event


class PeerRows:
    """The fold over the events of one process, named by its pid; `name` and `run_id` are known once it has begun."""

    key = "peer/step"  # in every row

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.name = self.run_id = self.group = ""
        self.rules: dict[str, Any] = {}
        self.finished = False
        self._last: tuple[float, float] | None = None  # (wall, tokens)
        self._rounds = 0
        self._version: float | None = None

    def take(self, events: Iterable[Event]) -> list[PlotRow]:
        return [
            row
            for event in events
            if event.get("pid") == self._pid and (row := self._tell(event)) is not None
        ]

    def _tell(self, event: Event) -> PlotRow | None:
        match event.get("event"):
            case "start" if not event.get("again"):
                self._begin(event)
            case "committed":
                self._rounds += 1
                if int(event.get("fragment") or 0) == BOOKS_FRAGMENT:
                    self._version = float(event.get("version") or 0)
            case "trained":
                return self._row(event)
            case "end":
                self.finished = True
        return None

    def _begin(self, event: Event) -> None:
        """A process may have had the same number in an earlier life: what counts is the newest one."""
        peer, process = str(event.get("peer") or ""), str(event.get("process") or "")
        self.group = str(event.get("run") or "")
        self.name = f"{event.get('name') or peer}-{process[:6]}"
        self.run_id = f"{self.group}-{peer}-{process[:12]}"
        self.rules = {"run": self.group, "peer": peer, "software": event.get("software")}
        self.finished, self._last, self._rounds, self._version = False, None, 0, None

    def _row(self, event: Event) -> PlotRow:
        step, wall, tokens = (float(event.get(key) or 0.0) for key in ("step", "wall", "tokens"))
        values = {self.key: step, "peer/tokens": tokens, "peer/rounds": float(self._rounds)}
        values |= {
            f"peer/{key}": float(event[key]) for key in ("loss", "grad_norm") if event.get(key) is not None
        }
        if self._version is not None:
            values["run/version"] = self._version
        if self._last is not None and wall > self._last[0] and tokens >= self._last[1]:
            values["peer/tokens_per_s"] = (tokens - self._last[1]) / (wall - self._last[0])
        self._last = (wall, tokens)
        return PlotRow(int(step), wall, values)
