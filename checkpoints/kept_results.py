"""The results of past commits in files on this machine: bounded, checked when read, and there after a crash.

Used by the agent's thread for them (peer/state/results_on_disk.py).  One file for each fragment and version, to
which results are appended with their length and hash.  Whatever was torn does not match its hash and is not given to
anybody. The folder is locked: two processes of one peer do not share it.  Must not know who wants a result.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from pathlib import Path

from farflung.checkpoints.result_log import outgrown
from farflung.protocol.digests import HASH_BYTES, hash_bytes
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Payload
from farflung.protocol.process import own_files

Key = tuple[int, int, int]  # era, fragment, version
_RECORD = struct.Struct(f"<QQ{HASH_BYTES}s")  # chunk, length, hash of the payload
_NAME = re.compile(r"e(\d+)-f(\d+)-v(\d+)\.results")


class KeptResults:
    def __init__(
        self, folder: Path, what: bytes, keep_versions: int, limit_bytes: int, payload_bytes: int
    ) -> None:
        """`what` names the run and the model: files of anything else are removed.  StoreError."""
        self._folder, self._keep, self._limit = folder, keep_versions, limit_bytes
        self._head, self._payload_bytes = hash_bytes(what), payload_bytes
        self._places: dict[Key, dict[int, tuple[int, int, bytes]]] = {}  # chunk -> where, length, hash
        self._sizes: dict[Key, int] = {}
        try:
            own_files.made_folder(folder)
            self._lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._scan()
            except OSError:
                os.close(self._lock)
                raise
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}") from None

    # ---- what is there -----------------------------------------------------------------------------------

    def found(self) -> dict[int, set[int]]:
        """Version -> chunks, of the newest era that is there."""
        there: dict[int, set[int]] = {}
        newest = max((era for era, _, _ in self._places), default=0)
        for (era, _, version), places in self._places.items():
            if era == newest:
                there.setdefault(version, set()).update(places)
        return there

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes.values())

    def get(self, era: int, fragment: int, version: int, chunk: int) -> bytes | None:
        """None if it is not there, or not as it was written."""
        key = (era, fragment, version)
        at, length, written = self._places.get(key, {}).get(chunk, (0, 0, b""))
        if not length:
            return None
        try:
            with self._path(key).open("rb") as file:
                file.seek(at)
                payload = file.read(length)
        except OSError:
            return None
        return payload if hash_bytes(payload) == written else None

    # ---- changing ----------------------------------------------------------------------------------------

    def put(self, era: int, fragment: int, version: int, chunk: int, payload: Payload) -> None:
        """StoreError if the disk takes no more."""
        key = (era, fragment, version)
        for other in [other for other in self._places if other[0] != era]:
            self._remove(other)  # the run went back: those versions are made again
        if chunk in self._places.get(key, {}):
            return
        written = hash_bytes(payload)
        path = self._path(key)
        try:
            with open(path, "ab" if key in self._places else "wb", opener=own_files.opened) as file:
                if key not in self._places:
                    file.write(self._head)
                at = file.tell() + _RECORD.size
                file.write(_RECORD.pack(chunk, len(payload), written))
                file.write(payload)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from None
        self._places.setdefault(key, {})[chunk] = (at, len(payload), written)
        self._sizes[key] = at + len(payload)
        self._bound()

    def _bound(self) -> None:
        """The oldest go; the newest version of each fragment stays, however large it is."""
        for fragment, version in outgrown(self._ages(), self._keep):
            self._remove_age(fragment, version)
        while self.size_bytes > self._limit and (spare := outgrown(self._ages(), 1)):
            self._remove_age(*min(spare, key=lambda each: each[1]))

    def _ages(self) -> list[tuple[int, int]]:
        return sorted({(fragment, version) for _, fragment, version in self._places})

    def _remove_age(self, fragment: int, version: int) -> None:
        for key in [key for key in self._places if key[1:] == (fragment, version)]:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        self._path(key).unlink(missing_ok=True)
        del self._places[key], self._sizes[key]

    def remove(self) -> None:
        """It is not needed any more."""
        for key in list(self._places):
            self._remove(key)
        self._folder.rmdir()
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    # ---- a former life -----------------------------------------------------------------------------------

    def _scan(self) -> None:
        for path in sorted(self._folder.iterdir()):
            named = _NAME.fullmatch(path.name)
            places = self._read_places(path) if named else None
            if named is None or not places:
                path.unlink()
                continue
            key = (int(named[1]), int(named[2]), int(named[3]))
            self._places[key] = places
            self._sizes[key] = path.stat().st_size
        if self._places:
            self._bound()

    def _read_places(self, path: Path) -> dict[int, tuple[int, int, bytes]]:
        """By its records alone; what was torn at the end is cut off, so that more can be appended."""
        places: dict[int, tuple[int, int, bytes]] = {}
        size = path.stat().st_size
        with path.open("r+b") as file:
            if file.read(HASH_BYTES) != self._head:
                return {}
            good = HASH_BYTES
            while len(raw := file.read(_RECORD.size)) == _RECORD.size:
                chunk, length, written = _RECORD.unpack(raw)
                at = good + _RECORD.size
                if not 0 < length <= self._payload_bytes or at + length > size:
                    break
                places[chunk] = (at, length, written)
                good = file.seek(at + length)
            file.truncate(good)
        return places

    def _path(self, key: Key) -> Path:
        era, fragment, version = key
        return self._folder / f"e{era}-f{fragment}-v{version}.results"
