"""Pieces of state that have arrived, on this machine's own disk until the state is whole.

Used by the agent (peer/state/arrived_pieces.py), so that a joiner that is killed fetches only what it did not have.
One file, a head and then a place for each chunk: its record and its bytes.  The record is written after the bytes
and carries their hash, so what was torn is found when it is read.  The file is locked: two processes of one peer do
not share it. It is this peer's own word only: whoever reads it back still has to end at the run's digest (P4).
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from farflung.protocol.digests import HASH_BYTES, hash_bytes
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Payload
from farflung.protocol.process import own_files

_HEAD_BYTES = 4096
# Version + 1, era, hash of the bytes, digest or zeros.
_RECORD = struct.Struct(f"<qq{HASH_BYTES}s{HASH_BYTES}s")
_NO_DIGEST = bytes(HASH_BYTES)


@dataclass(frozen=True)
class Arrived:
    version: int
    era: int
    digest: bytes  # of the fragment at that version, as the coordinator told it; empty if it had not yet


class ChunkArrivals:
    def __init__(self, path: Path, what: bytes, chunks: int, chunk_bytes: int) -> None:
        """`what`: names the run and the model, at most 4 KiB; a file of anything else is begun anew.  StoreError."""
        self._path, self._chunks = path, chunks
        self._place = _RECORD.size + chunk_bytes
        head = hash_bytes(what).ljust(_HEAD_BYTES, b"\0")
        try:
            own_files.made_folder(path.parent)
            self._file = own_files.opened(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(self._file, _HEAD_BYTES, 0) != head:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, head, 0)
        except OSError as error:
            os.close(self._file)
            raise StoreError(f"{path}: {error.strerror}") from None

    def known(self) -> dict[int, Arrived]:
        """What is there, by its records alone."""
        found = {}
        for chunk in range(self._chunks):
            raw = os.pread(self._file, _RECORD.size, self._at(chunk))
            if len(raw) == _RECORD.size:
                version, era, _, digest = _RECORD.unpack(raw)
                if version > 0:
                    found[chunk] = Arrived(version - 1, era, b"" if digest == _NO_DIGEST else digest)
        return found

    def get(self, chunk: int) -> bytes | None:
        """None if it is not there, or not as it was written."""
        raw = os.pread(self._file, self._place, self._at(chunk))
        if len(raw) < self._place:
            return None
        version, _, written, _ = _RECORD.unpack_from(raw)
        body = raw[_RECORD.size :]
        return body if version > 0 and hash_bytes(body) == written else None

    def put(self, chunk: int, arrived: Arrived, body: Payload, body_hash: bytes = b"") -> None:
        """StoreError if the disk takes no more."""
        at, written = self._at(chunk), body_hash or hash_bytes(body)
        record = _RECORD.pack(arrived.version + 1, arrived.era, written, arrived.digest or _NO_DIGEST)
        try:
            done = os.pwrite(self._file, body, at + _RECORD.size)
            done += os.pwrite(self._file, record, at)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from None
        if done < self._place:
            raise StoreError(f"{self._path}: no room left")

    def forget(self, chunk: int) -> None:
        os.pwrite(self._file, bytes(_RECORD.size), self._at(chunk))

    def remove(self) -> None:
        """It is not needed any more."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def _at(self, chunk: int) -> int:
        return _HEAD_BYTES + chunk * self._place
