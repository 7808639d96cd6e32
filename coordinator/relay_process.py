"""The relay as the run machine knows it: is there one just now, what did it pass, and is the month's share used up?

Owned by the server, around the relay's process (relay/relay.py); what a member offers is kept in the same way
(console/offered_relay.py).  A relay that dies is back within a second, and on the same port: the machine hears of it
only if that lasts, so that no round is given up for a hiccup.  Must not know who is joined.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farflung.coordinator.reach.relays import RelayNow
from farflung.coordinator.reach.routes import Usage
from farflung.coordinator.relay.relay_words import (
    FROM_RELAY,
    FromRelay,
    PairsCounted,
    RelaySettings,
    Wanted,
)
from farflung.coordinator.run.effects import Effect
from farflung.coordinator.run.machine import RunMachine
from farflung.protocol.process import own_files
from farflung.protocol.process.child import KeptChild, Spawn, started

FILE_NAME = "relay.json"
BACK_WITHIN_S = 15.0
SAVED_EVERY_S = 60.0
TRIES_AGAIN_S = 30.0  # where it could not listen

log = logging.getLogger("farflung.coordinator")


class RelayProcess(KeptChild[RelaySettings, FromRelay]):
    """A run needs no relay to go on: whoever has another way is not touched by its death, and those that it joined come
    again.  So nobody waits for it, and it is no error if it can't listen."""

    name = "relay"
    module = "farflung.coordinator.relay.relay"
    memory_bytes = 256 << 20
    heard = FROM_RELAY

    def __init__(self, begin: RelaySettings, note: Callable[[str], None], spawn: Spawn = started) -> None:
        super().__init__(begin, note, spawn)
        self._wanted = Wanted(pairs=())
        self._told: Wanted | None = None  # what this one knows of them

    @property
    def bytes_per_s(self) -> float:
        return self.begin.bytes_per_s

    def want(self, pairs: tuple[bytes, ...], clock_ahead_s: float = 0.0) -> None:
        """Who may meet there from now on.  `clock_ahead_s`: where tickets end by the clock of another machine."""
        self._wanted = Wanted(pairs=pairs, clock_ahead_s=clock_ahead_s)
        self._say_wanted()

    def close(self, why: str = "") -> None:
        self._told = None
        super().close(why)

    def receive(self, now: float) -> Iterator[PairsCounted]:
        for word in super().receive(now):
            if isinstance(word, PairsCounted):
                yield word
        if self._told != self._wanted:
            self._say_wanted()

    def on_cannot_listen(self, reason: str, now: float) -> None:
        self._note(f"relay: {reason}; peers that nobody can dial reach only those who can be dialled")
        self.close(reason)
        self._again_at = now + TRIES_AGAIN_S

    def _say_wanted(self) -> None:
        if self.port is not None and self.send(self._wanted):
            self._told = self._wanted


@dataclass
class Month:
    """What was passed in a calendar month, by the machine's clock; kept in a file, for restarts."""

    path: Path
    limit_bytes: int
    name: str = ""
    used_bytes: int = 0

    @classmethod
    def load(cls, path: Path, limit_bytes: int) -> Month:
        found = cls(path, limit_bytes)
        try:
            said = json.loads(path.read_bytes())
            found.name, found.used_bytes = str(said["month"]), max(0, int(said["bytes"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: cannot be read (%s): the relay's month is counted from 0", path, error)
        return found

    def add(self, size: int, wall_s: float) -> None:
        name = time.strftime("%Y-%m", time.gmtime(wall_s))
        if name != self.name:
            self.name, self.used_bytes = name, 0
        self.used_bytes += size

    @property
    def is_over(self) -> bool:
        return self.used_bytes >= self.limit_bytes

    def save(self) -> None:
        told = json.dumps({"month": self.name, "bytes": self.used_bytes}) + "\n"
        try:
            own_files.replaced(self.path, told.encode("ascii"))
        except OSError as error:
            log.warning("%s: cannot be written: %s", self.path, error)


class KeptRelay:
    """A relay's process with what it may pass in a month: of a coordinator, or beside a member's agent."""

    def __init__(self, process: RelayProcess, month: Month, setting: str) -> None:
        """`setting`: by which people change the month's share."""
        self.process = process
        self._month = month
        self._setting = setting
        self.usage = Usage(month_limit_bytes=month.limit_bytes)
        self._last: RelayNow | None = None
        self._gone_at: float | None = None
        self._saved_at = float("-inf")

    def turn(self, now: float, wall_s: float) -> tuple[RelayNow | None, str]:
        """What it is just now, and where there is none, why."""
        usage, moved = self.usage, 0
        for said in self.process.receive(now):
            moved += said.moved_bytes
            usage.pairs, usage.waiting = said.pairs, said.waiting
            usage.refused += said.refused
        self._month.add(moved, wall_s)
        usage.moved_bytes += moved
        usage.month_bytes = self._month.used_bytes
        if now - self._saved_at >= SAVED_EVERY_S:
            self._saved_at = now
            self._month.save()
        return self._relay(now)

    def _relay(self, now: float) -> tuple[RelayNow | None, str]:
        process, month = self.process, self._month
        if month.is_over:
            return None, f"it passed its {month.limit_bytes / 1e9:g} GB of {month.name} ({self._setting})"
        if process.port is not None:
            self._last, self._gone_at = RelayNow(process.port, process.bytes_per_s), None
            return self._last, ""
        self._gone_at = now if self._gone_at is None else self._gone_at
        if now - self._gone_at >= BACK_WITHIN_S:
            self._last = None
        return self._last, "" if self._last is not None else process.why_not

    def close(self) -> None:
        self._month.save()
        self.process.close()


class Relaying:
    def __init__(self, process: RelayProcess, month: Month, machine: RunMachine) -> None:
        self.process = process
        self._kept = KeptRelay(process, month, "[net] relay")
        self._machine = machine

    def on_tick(self, now: float, wall_s: float) -> list[Effect]:
        relay, why_not = self._kept.turn(now, wall_s)
        return self._machine.on_relay(relay, why_not, self._kept.usage, now)

    def close(self) -> None:
        self._kept.close()
