"""Files at a URL: the one place of checkpoints that knows fsspec.  Local path, s3://, gs://, memory:// and others.

Called by the store only.  A file appears whole or not at all: on a local disk it is written aside, fsynced and
renamed, so it is also durable when `write` returns; elsewhere it is sent at once, or in a transaction of the store's
library, which takes back what was begun.  What a store refuses is asked again a few times: its library may try for long
by itself, so none is begun late.  Whatever that library raises in the end comes out as a StoreError.
Must not know what is in the files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from farflung.protocol.errors import FarflungError, StoreError, UserError
from farflung.protocol.process import failpoints, own_files
from farflung.protocol.process.as_nobody import opened

ASIDE = ".aside"  # the ending of a file that is not finished
AGAIN_AFTER_S = (0.5, 2.0)  # a store that failed is asked again after these times
AGAIN_WITHIN_S = 60.0  # but not when its library has tried for so long
# Asking again helps against none of these.
_HOPELESS = (FarflungError, FileNotFoundError, PermissionError, NotImplementedError)
# Files up to this size are sent at once: an object store wants three requests for any other.
SMALL_BYTES = 1 << 20


Found = TypeVar("Found")


class Folder:
    """The folder at a URL, with one level of folders in it.  One file is written at a time.

    `as_nobody`: not this machine's owner has named it, but a run: see protocol/process/as_nobody.py."""

    def __init__(self, url: str, as_nobody: bool = False) -> None:
        self._fs: Any
        self._root: str
        try:
            # An object of its own: what is under way in a transaction is nobody else's.
            self._fs, self._root = (
                opened(url) if as_nobody else fsspec.core.url_to_fs(url, skip_instance_cache=True)
            )
        except FarflungError:
            raise
        except (ValueError, ImportError, OSError) as error:
            raise UserError(f"{url}: this place for checkpoints can't be used: {error}") from None
        self.url = url
        self._local = isinstance(self._fs, LocalFileSystem)
        self._mark = secrets.token_hex(4)  # others may write a file of the same name

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *filter(None, names)))

    # ---- looking ---------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        return sorted(name for name, entry in self._list().items() if entry["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of what is finished there."""
        found = self._list(folder)
        return {
            name: int(e["size"] or 0)
            for name, e in found.items()
            if e["type"] == "file" and ASIDE not in name
        }

    def _list(self, *names: str) -> dict[str, dict[str, Any]]:
        with self._told(*names):
            self._fs.invalidate_cache()
            try:
                entries = self._asked(lambda: self._fs.ls(self._path(*names), detail=True))
            except FileNotFoundError:
                return {}
        return {entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry for entry in entries}

    def read(self, folder: str, name: str, most_bytes: int) -> bytes:
        """The beginning of a file; FileNotFoundError is a StoreError too: it names the file."""

        def beginning() -> bytes:
            with self._fs.open(self._path(folder, name), "rb") as file:
                return bytes(file.read(most_bytes))

        with self._told(folder, name):
            return self._asked(beginning)

    def pieces(self, folder: str, name: str, sizes: Iterable[int]) -> Iterator[bytes]:
        """The file in pieces of these sizes; what is missing at its end makes the last ones short or empty."""
        with self._told(folder, name):
            file = self._asked(lambda: self._fs.open(self._path(folder, name), "rb"))
        try:
            for size in sizes:
                with self._told(folder, name):
                    piece = bytes(file.read(size))
                yield piece
        finally:
            file.close()

    # ---- changing --------------------------------------------------------------------------------------

    def write(self, folder: str, name: str, pieces: Iterable[bytes]) -> None:
        """What is large and no sequence is there only once, and not sent again."""
        with self._told(folder, name):
            if self._local:
                self._write_locally(Path(self._path(folder)), name, pieces)
                return
            self._write_elsewhere(folder, name, pieces)

    def _write_elsewhere(self, folder: str, name: str, pieces: Iterable[bytes]) -> None:
        path, rest = self._path(folder, name), iter(pieces)
        self._asked(lambda: self._fs.makedirs(self._path(folder), exist_ok=True))
        begun = _beginning(rest)
        if len(begun) <= SMALL_BYTES:
            self._asked(lambda: self._fs.pipe_file(path, begun))  # all of it in one request
            return
        if isinstance(pieces, Sequence):
            self._asked(lambda: self._send(path, pieces))
        else:
            self._send(path, itertools.chain((begun,), rest))

    def _send(self, path: str, pieces: Iterable[bytes]) -> None:
        # To close a file is to finish it, also on the way out of an error; only a transaction can take it back.
        with self._fs.transaction, self._fs.open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)

    def _asked(self, ask: Callable[[], Found]) -> Found:
        """What the store answers, if need be when it is asked again.  A local disk that failed fails again."""
        began = time.monotonic()
        for pause_s in () if self._local else AGAIN_AFTER_S:
            try:
                return ask()
            except _HOPELESS:
                raise
            except Exception:  # each store's library has its own errors: this is its outermost call
                if time.monotonic() - began >= AGAIN_WITHIN_S:
                    raise
            time.sleep(pause_s)
        return ask()

    def _write_locally(self, folder: Path, name: str, pieces: Iterable[bytes]) -> None:
        own_files.made_folder(folder)
        aside = folder / f"{name}.{self._mark}{ASIDE}"
        try:
            with open(aside, "wb", opener=own_files.opened) as file:
                for piece in pieces:
                    file.write(failpoints.passing("checkpoint.mid_write", piece))
                failpoints.hit("checkpoint.before_fsync")
                file.flush()
                os.fsync(file.fileno())
            failpoints.hit("checkpoint.before_rename")
            os.replace(aside, folder / name)
            failpoints.hit("checkpoint.after_rename")
        finally:
            aside.unlink(missing_ok=True)
        for place in (folder, folder.parent):
            _sync_folder(place)

    def remove(self, folder: str, first: str) -> None:
        """The folder with all files, `first` before the others.  Another peer may be removing it at this moment."""
        with self._told(folder), contextlib.suppress(FileNotFoundError):
            if first in self._list(folder):
                self._fs.rm_file(self._path(folder, first))
                if self._local:
                    _sync_folder(Path(self._path(folder)))
            if self._fs.exists(self._path(folder)):
                self._fs.rm(self._path(folder), recursive=True)

    def remove_files(self, folder: str, names: Iterable[str]) -> None:
        """What is gone already is no trouble; an empty folder goes too."""
        with self._told(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(folder, name))
            if not self._list(folder) and self._fs.exists(self._path(folder)):
                self._fs.rm(self._path(folder), recursive=True)

    @contextlib.contextmanager
    def _told(self, *names: str) -> Iterator[None]:
        """Errors with the place in front."""
        try:
            yield
        except FarflungError:
            raise
        except Exception as error:  # each store's library has its own errors: this is its outermost call
            what = getattr(error, "strerror", None) or str(error).splitlines()[0:1] or type(error).__name__
            told = what if isinstance(what, str) else what[0]
            raise StoreError(f"{'/'.join((self.url.rstrip('/'), *filter(None, names)))}: {told}") from error


def _beginning(pieces: Iterator[bytes]) -> bytes:
    """All, or as many pieces as are more than what is sent at once."""
    begun = bytearray()
    for piece in pieces:
        begun += piece
        if len(begun) > SMALL_BYTES:
            break
    return bytes(begun)


def _sync_folder(folder: Path) -> None:
    """A new name is durable only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
