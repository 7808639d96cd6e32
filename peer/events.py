"""The event log: what a process went through and when, as JSON lines.  Off unless a file is named.

Opened by the agent (`--journal FILE`, or FARFLUNG_JOURNAL in its environment); read by `farflung bench`.  Must
not know what the events mean.  Each line is one object: `at` (this machine's monotonic clock, in seconds),
`event`, and the event's own fields.  Lines are only ever appended, each by one write, so a reader may follow the
file while it grows, and a process that is killed leaves whole lines and at most one torn one, the last.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farflung.collectives.errors import UserError

JOURNAL_VARIABLE = "FARFLUNG_JOURNAL"

Event = dict[str, Any]


class EventLog:
    """`write` may be called from any thread; without a file it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            except OSError as error:
                raise UserError(f"--journal {path}: cannot write: {error.strerror}") from error

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def write(self, event: str, **fields: object) -> None:
        if self._file is not None:
            line = json.dumps({"at": time.monotonic(), "event": event, **fields}, separators=(",", ":"))
            os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Follower:
    """Reads a log while it grows: each call yields what was added since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def news(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return  # its process has not started yet
        whole, newline, _ = added.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            yield json.loads(line)


def read_events(path: Path) -> list[Event]:
    return list(Follower(path).news())
