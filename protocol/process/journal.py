"""The event journal: what a process went through and when, one JSON object a line.

Written by the coordinator and by every agent, each into a file of its own; read by `farflung audit` and by
`farflung bench`.  The format is told in docs/events.md.  Must not know what the events mean.

Lines are only ever appended, each by one write, so a reader may follow the file while it grows, and a process that
is killed leaves whole lines and at most one torn one.  The file is bounded: a full one gets the ending `.1`, and a new
one begins.  A journal is an aid and never a reason to stop: lines that the disk does not take are counted, and the
next line that it takes says how many are missing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farflung.protocol.errors import UserError
from farflung.protocol.process import own_files

JOURNAL_VARIABLE = "FARFLUNG_JOURNAL"
FILE_BYTES_MOST = 16 * 1024 * 1024
FRAMES_EVERY_S = 10.0  # how often counts of frames are written
OLD = ".1"  # the ending of the file before this one

Event = dict[str, Any]


def journal_path(
    named: Path | None, key: Path, environ: Mapping[str, str] = os.environ
) -> tuple[Path | None, bool]:
    """Where a peer's is, if anywhere, and whether that was asked for: by `named` or the environment.  Else it is beside
    the peer's key."""
    if named is None and environ.get(JOURNAL_VARIABLE):
        named = Path(environ[JOURNAL_VARIABLE])
    if named is not None:
        return (None if str(named) == "off" else named), True
    return key.with_suffix(".events.jsonl"), False


class EventLog:
    """`write` may be called from any thread; without a file it does nothing."""

    def __init__(self, path: Path | None, detailed: bool = True, most_bytes: int = FILE_BYTES_MOST) -> None:
        """`detailed`: whoever writes may write what only a benchmark wants to know."""
        self.detailed = detailed and path is not None
        self.missing = 0  # lines that the disk did not take since the last one that it took
        self._path, self._most_bytes = path, most_bytes
        self._file: int | None = None
        self._size = 0
        self._head: Event | None = None
        self._lock = threading.Lock()
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                mend = f"{JOURNAL_VARIABLE}=off goes without"
                raise UserError(
                    f"{path}: cannot write the event journal: {error.strerror}; {mend}"
                ) from error

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def write_start(self, **fields: object) -> None:
        """The event `start`; said again at the head of each further file."""
        self._head = {"event": "start", "boot": _boot(), **fields}
        self.write(**self._head)

    def write(self, event: str, **fields: object) -> None:
        if self._file is None:
            return
        with self._lock:
            if self._size >= self._most_bytes:
                self._turn_over()
            self._put({"event": event, **fields})

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _open(self, path: Path) -> None:
        self._file = own_files.opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            os.write(self._file, b"\n")  # whoever wrote here before was killed in the middle of a line

    def _turn_over(self) -> None:
        assert self._file is not None and self._path is not None
        os.close(self._file)
        self._file = None
        try:
            os.replace(self._path, f"{self._path}{OLD}")
            self._open(self._path)
        except OSError:
            self.missing += 1  # no file, no journal: `is_on` says so
            return
        if self._head is not None:
            self._put({**self._head, "again": True})

    def _put(self, body: Event) -> None:
        if self._file is None:
            return
        stamp: Event = {"at": round(time.monotonic(), 6), "wall": round(time.time(), 3), "pid": os.getpid()}
        if self.missing:
            stamp["missing"] = self.missing
        line = json.dumps(stamp | body, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError:
            self.missing += 1
            return
        self._size += written
        self.missing = 0 if written == len(line) else self.missing + 1


def _boot() -> str:
    """Names this machine until it is started again: only within it can monotonic clocks be compared."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    except OSError:
        return ""


class Follower:
    """Reads a journal while it grows: each call yields what was added since the last one."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """`offset`: what stands before it in the file is left out."""
        self._path = path
        self._offset = offset
        self._inode = 0
        self.torn = 0  # lines that are no JSON object: a kill in the middle of a write

    def new_events(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._inode and inode != self._inode:
                    yield from self._rest_of_old()
                self._inode = inode
                # A file that is shorter than what was read of it is another one.
                self._offset = self._offset if self._offset <= os.fstat(file.fileno()).st_size else 0
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return  # its process has not started yet
        whole, newline, _ = added.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from self._parse(whole)

    def _rest_of_old(self) -> Iterator[Event]:
        """The file was turned over since the last call."""
        old = Path(f"{self._path}{OLD}")
        if old.exists() and old.stat().st_ino == self._inode:
            with old.open("rb") as file:
                file.seek(self._offset)
                yield from self._parse(file.read())
        self._offset = 0

    def _parse(self, lines: bytes) -> Iterator[Event]:
        for line in lines.splitlines():
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # the latter: lists in lists without end
                event = None
            if isinstance(event, dict):
                yield event
            else:
                self.torn += 1


def read_events(path: Path) -> list[Event]:
    """All that is still there, the older file first; torn lines are left out."""
    old = Path(f"{path}{OLD}")
    found = list(Follower(old).new_events()) if old.exists() else []
    return [*found, *Follower(path).new_events()]
