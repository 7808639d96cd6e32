"""Files of a data set wherever they lie: on a disk, in an object store, on a web server.

Owns: finding them, reading pieces of them, and what is asked again when a line fails.  The one place here that knows
fsspec; whatever the library of a store raises comes out as a UserError or a StoreError of one line.
Called by: token_shards.py.  Must not know: what is in the files, leases, models.

A place that a run names (`[data] source`) was chosen by a stranger, and what is read there goes into gradients that
others see.  So it is read as nobody: see protocol/process/as_nobody.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farflung.protocol.errors import FarflungError, StoreError, UserError
from farflung.protocol.process import as_nobody, own_files

ENDINGS = (".bin", ".npy", ".parquet")
FILES_MOST = 65_536  # of one place
TRIES = 4  # of a request; between the first two FIRST_PAUSE_S, then twice as long each time
FIRST_PAUSE_S = 0.5
BLOCK_BYTES = 8 << 20  # of a request, where a file is read from its beginning to its end
# What tells a file from the one that lay there before: each store has its own names for it.
_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "Last-Modified",
    "LastModified",
    "mtime",
    "updated",
    "created",
)
_EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}

T = TypeVar("T")
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataFile:
    url: str  # for people, and to find its store again
    path: str  # as its store names it
    size_bytes: int
    mark: str  # another one when it is written again; empty where its store says nothing
    is_local: bool

    @property
    def ending(self) -> str:
        return ending_of(self.url)


def ending_of(place: str) -> str:
    """Of a file's name; what follows a question mark is no part of it on a web server."""
    name = place.partition("?")[0] if place.startswith(("http://", "https://")) else place
    return PurePosixPath(name).suffix.lower()


class DataFiles:
    """`options`: for the file systems of fsspec; None: the places are a stranger's, and read as nobody."""

    def __init__(self, options: Options | None, pause: Callable[[float], None] = time.sleep) -> None:
        self._options, self._pause = options, pause

    # ---- finding

    def find(self, place: str) -> list[DataFile]:
        """The file at a place, or those of a folder, or all that match its stars; sorted by name."""
        fs, path = self._store(place)
        try:
            fs.invalidate_cache()
            if "*" in path:
                entries = list(fs.glob(path, detail=True).values())
            else:
                here = fs.info(path)
                if here["type"] != "directory":
                    return [self._made(place, path, here, fs)]
                entries = fs.ls(path, detail=True)
            # A link, which counts as what it leads to.
            entries = [fs.info(each["name"]) if each["type"] == "other" else each for each in entries]
        except Exception as error:  # each store's library has its own errors: this is its outermost call
            raise UserError(f"{place}: {_why(error)}") from None
        named = sorted(
            ((str(each["name"]), each) for each in entries if each["type"] == "file"),
            key=lambda pair: pair[0],
        )
        shards = [(name, each) for name, each in named if ending_of(name) in ENDINGS]
        if not shards:
            there = f"; there are {len(named)} other files, such as {named[0][0]}" if named else ""
            raise UserError(f"{place}: no shard there that ends in {', '.join(ENDINGS)}{there}")
        if len(shards) > FILES_MOST:
            raise UserError(
                f"{place}: {len(shards)} shards, at most {FILES_MOST} are taken; make larger ones"
            )
        return [self._made(fs.unstrip_protocol(name), name, each, fs) for name, each in shards]

    def _made(self, url: str, path: str, entry: Mapping[str, Any], fs: Any) -> DataFile:
        size, local = entry.get("size"), isinstance(fs, LocalFileSystem)
        if not isinstance(size, int):
            raise UserError(
                f"{url}: its server does not say how long it is, so that no row of it can be found"
            )
        mark = next((f"{name} {entry[name]}" for name in _MARKS if entry.get(name)), "")
        return DataFile(path if local else url, path, size, mark, local)

    def _store(self, url: str) -> tuple[Any, str]:
        kind = url.partition("://")[0] if "://" in url else ""
        try:
            if self._options is None:
                return as_nobody.opened(url)
            # Instances are kept by fsspec, for each process its own: a worker has its own connections.
            fs, path = fsspec.core.url_to_fs(url, **self._options)
        except UserError:
            raise
        except ImportError as error:
            extra = _EXTRAS.get(kind)
            way = f"pip install 'farflung[{extra}]'" if extra else str(error)
            raise UserError(f"{url}: a package for {kind}:// is missing: {way}") from None
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"{url}: this place can't be read: {_why(error)}") from None
        return fs, str(path)

    # ---- reading

    def read(self, wanted: Sequence[tuple[DataFile, int, int]]) -> list[bytes]:
        """Bytes [start, stop) of files, in the order in which they are named; those of one store at the same time."""
        found: list[bytes] = [b""] * len(wanted)
        stores: dict[int, tuple[Any, list[int]]] = {}
        for number, (file, _, _) in enumerate(wanted):
            fs, _ = self._store(file.url)
            stores.setdefault(id(fs), (fs, []))[1].append(number)
        for fs, numbers in stores.values():
            for number, got in zip(numbers, self._ranges(fs, [wanted[n] for n in numbers]), strict=True):
                found[number] = got
        return found

    def _ranges(self, fs: Any, wanted: Sequence[tuple[DataFile, int, int]]) -> list[bytes]:
        paths, starts, stops = ([*part] for part in zip(*((f.path, a, b) for f, a, b in wanted), strict=True))
        asked = [stop - start for start, stop in zip(starts, stops, strict=True)]

        def ask() -> list[bytes]:
            got: list[bytes] = fs.cat_ranges(paths, starts, stops, on_error="raise")
            for (file, _, _), due, piece in zip(wanted, asked, got, strict=True):
                if len(piece) != due:
                    raise StoreError(f"{file.url}: asked for {due} bytes, got {len(piece)}: has it changed?")
            return got

        return self._patiently(wanted[0][0].url, ask)

    def pieces(self, file: DataFile) -> Iterator[bytes]:
        """The whole file, from its beginning to its end."""
        for at in range(0, file.size_bytes, BLOCK_BYTES):
            yield self.read([(file, at, min(at + BLOCK_BYTES, file.size_bytes))])[0]

    def open(self, file: DataFile) -> IO[bytes]:
        """To seek in it; what is read at a time is asked for at once."""
        fs, path = self._store(file.url)
        opened: IO[bytes] = self._patiently(file.url, lambda: fs.open(path, "rb", block_size=1 << 20))
        return opened

    def _patiently(self, url: str, ask: Callable[[], T]) -> T:
        """A line that fails for a moment costs that moment; StoreError after TRIES of them."""
        for pause in (*(FIRST_PAUSE_S * 2**number for number in range(TRIES - 1)), None):
            try:
                return ask()
            except FarflungError:
                raise
            except Exception as error:  # each store's library has its own errors: this is its outermost call
                if pause is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise StoreError(f"{url}: {_why(error)}") from None
            self._pause(pause)
        raise StoreError(f"{url}: cannot be read")


def _why(error: BaseException) -> str:
    """In one line.  A web server's answer lies behind the FileNotFoundError that is made of it."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        return _why(error.__cause__)
    told = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return f"{told or type(error).__name__}"


# ---- shared cache ------------------------------------------------------------------------------------------
# Files that all trainers of a machine keep together: made once, whole or not there, never more than so much.
#
# Owns: a folder of entries and the locks on them. Called by: token_shards.py. Must not know: where an entry's
# bytes come from, what they mean.
#
#     FOLDER/NAME         finished, its name begins with 32 hex digits; its users hold a shared lock on it (flock), so
#                         that it is not removed
#     FOLDER/NAME.part    being written, as long as it will be from the start, under an exclusive lock
#     FOLDER/room         locked while somebody counts what is there and makes room
#
# A lock lasts as long as a process, or a mapping of the file, does: nothing has to be cleaned up after a
# crash. Who wants an entry that another process writes waits for it, and writes it himself if the other one
# fails.

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
