"""Files that all trainers of a machine keep together: made once, whole or not there, never more than so much.

Owns: a folder of entries and the locks on them.  Called by: token_shards.py.
Must not know: where an entry's bytes come from, what they mean.

    FOLDER/NAME         finished, its name begins with 32 hex digits; whoever uses it holds a shared lock on it (flock),
                        so that nobody removes it
    FOLDER/NAME.part    being written, as long as it will be from the start, under an exclusive lock
    FOLDER/room         locked while somebody counts what is there and makes room

A lock lasts as long as a process, or a mapping of the file, does: nothing has to be cleaned up after a crash.
Who wants an entry that another process writes waits for it, and writes it himself if the other one fails.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from farflung.protocol.errors import StoreError
from farflung.protocol.process import own_files

log = logging.getLogger(__name__)

PART = ".part"
ROOM = "room"
_NAME = re.compile("[0-9a-f]{32}-")  # nothing else in the folder is counted, or removed


class NoRoom(Exception):
    """It does not fit into the cache, or not beside what others use at this moment."""


class SharedCache:
    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def open(self, name: str, size_bytes: int, pieces: Callable[[], Iterable[bytes]]) -> BinaryIO:
        """The finished entry, which stays as long as this file or a mapping of it is open.

        `pieces` gives its bytes, if it is not there.  NoRoom, before any of them is asked for.
        """
        with _told(self.folder):
            own_files.made_folder(self.folder)
            while True:
                found = self._finished(name, size_bytes) or self._written(name, size_bytes, pieces)
                if found is not None:
                    return found

    def _finished(self, name: str, size_bytes: int) -> BinaryIO | None:
        path = self.folder / name
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if not _is_at(file, path):  # removed at this moment
            file.close()
            return None
        if (found := os.fstat(file.fileno()).st_size) != size_bytes:
            file.close()
            raise StoreError(f"{path}: damaged, {found} bytes where {size_bytes} were written; remove it")
        os.utime(file.fileno())  # the one that was wanted last goes last
        return file

    def _written(self, name: str, size_bytes: int, pieces: Callable[[], Iterable[bytes]]) -> BinaryIO | None:
        """None: somebody else was about to write it; look again."""
        path, part = self.folder / name, self.folder / f"{name}{PART}"
        with open(own_files.opened(part, os.O_RDWR | os.O_CREAT), "r+b") as file:
            _wait_for(file, name)
            if not _is_at(file, part) or path.exists():
                if _is_at(file, part):
                    part.unlink()
                return None
            try:
                self._reserve(file, name, size_bytes)
                written = 0
                for piece in pieces():
                    written += file.write(piece)
                    if written > size_bytes:
                        break
                if written != size_bytes:
                    raise StoreError(
                        f"{name}: {written} bytes came, {size_bytes} were to come; nothing is kept"
                    )
                file.flush()
                os.fsync(file.fileno())
                os.replace(part, path)
            finally:  # finished or not, the name of what is under way goes
                part.unlink(missing_ok=True)
        return None  # the next look finds it, and locks it as everybody does

    # ---- room

    def _reserve(self, file: BinaryIO, name: str, size_bytes: int) -> None:
        """As long as it will be: whoever counts now counts it."""
        with self._counting():
            self._make_room(size_bytes, but=f"{name}{PART}")
            os.truncate(file.fileno(), size_bytes)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with open(self.folder / ROOM, "w", opener=own_files.opened) as room:
            fcntl.flock(room, fcntl.LOCK_EX)
            yield

    def _make_room(self, size_bytes: int, but: str) -> None:
        named = [path for path in self.folder.iterdir() if _NAME.match(path.name) and path.name != but]
        there = {path: found for path in named if (found := _stat(path)) is not None}
        used = sum(each.st_size for each in there.values())
        # What nobody finishes any more goes first, then what was wanted the longest ago.
        for path in sorted(there, key=lambda path: (path.suffix != PART, there[path].st_mtime)):
            if used + size_bytes <= self.limit_bytes and path.suffix != PART:
                break
            if _removed(path):
                used -= there[path].st_size
        if used + size_bytes > self.limit_bytes:
            raise NoRoom(
                f"{size_bytes / 1e6:.1f} MB do not fit beside the {used / 1e6:.1f} MB that are in use; "
                f"{self.folder} may hold {self.limit_bytes / 1e6:.1f} MB (cache_limit)"
            )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # renamed or removed at this moment
        return None


def _removed(path: Path) -> bool:
    """Not what somebody uses or writes."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def _wait_for(file: BinaryIO, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another process of this machine fetches %s: waits for it", name)
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_at(file: BinaryIO, path: Path) -> bool:
    """What was opened still has that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Errors of the disk with the place in front."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder}: {error.strerror or error}; XDG_CACHE_HOME names another folder for shards"
        ) from error
