"""Files of a data set wherever they lie: on a disk, in an object store, on a web server.

Owns: finding them, reading pieces of them, and what is asked again when a line fails.  The one place here that knows
fsspec; whatever the library of a store raises comes out as a UserError or a StoreError of one line.
Called by: token_shards.py.  Must not know: what is in the files, leases, models.

A place that a run names (`[data] source`) was chosen by a stranger, and what is read there goes into gradients that
others see.  So it is read as nobody: see protocol/process/as_nobody.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farflung.protocol.errors import FarflungError, StoreError, UserError
from farflung.protocol.process import as_nobody

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
