"""The newest version of a run's state on a peer's own disk: a base now and then, and the results since.

Used by the agent (peer/state/keeping_state.py), so that the last copy of a model outlives the process that held it.
Of each fragment a base is its whole state at one version; the results of each later version lie in a file of their
own, appended as they are applied.  A base is written aside, fsynced and renamed, and only then what it replaces goes;
so there is one way to the newest version at every moment, whoever is killed when.  A version counts from the moment on
when its digest stands behind its results.  Results without one are offered to whoever knows the commit, no more.

It is this peer's own word only: whoever reads it back still has to end at the run's digest (P4).  Bytes that are not as
they were written are never returned.  Pure files: must not know rounds, peers or threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from farflung.checkpoints.result_log import outgrown
from farflung.protocol.digests import HASH_BYTES, hash_bytes, root_of
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Payload
from farflung.protocol.model_schema import Fragment
from farflung.protocol.process import failpoints, own_files

Key = tuple[int, int, int]  # era, fragment, version
_NAME = re.compile(r"e(\d+)-f(\d+)-v(\d+)\.(base|results)")
# Chunk, length, by what a result is multiplied, hash of the payload.  Of a whole version: length 0, its digest.
_RECORD = struct.Struct(f"<QQd{HASH_BYTES}s")
_MOST_PAYLOAD = 1 << 32


@dataclass
class VersionResults:
    """Of one version, as far as they lie there."""

    places: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)  # chunk -> where, length, hash
    end: int = 0  # of the file
    digest: bytes = b""  # of the state that they lead to; empty: it was not calculated yet
    factor: float = 1.0


@dataclass(frozen=True)
class BasePath:
    """How a fragment comes to a version: its base, and the results of each version since."""

    era: int
    fragment: int
    base: int
    version: int
    digest: bytes


class KeptState:
    """`what` names the run and the model; files of anything else are removed.  Every call may raise StoreError."""

    def __init__(self, folder: Path, what: bytes, fragments: Iterable[Fragment], chunk_bytes: int) -> None:
        self.folder, self._head, self._chunk_bytes = folder, hash_bytes(what), chunk_bytes
        self._fragments = {each.number: each for each in fragments}
        self._bases: dict[Key, bytes] = {}  # their digests
        self._results: dict[Key, VersionResults] = {}
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(folder, self._scan)

    # ---- what is there -----------------------------------------------------------------------------------

    def ways(self, fragment: int) -> list[BasePath]:
        """To every version that can be had of it, the newest of the newest era first."""
        found = []
        for (era, number, base), digest in self._bases.items():
            if number == fragment:
                found.append(BasePath(era, number, base, base, digest))
                version = base
                while (made := self._made(era, number, version + 1)) is not None:
                    version += 1
                    found.append(BasePath(era, number, base, version, made.digest))
        # Of two ways to one version the one with less to apply.
        return sorted(found, key=lambda way: (way.era, way.version, way.base), reverse=True)

    def reach(self, era: int, fragment: int) -> tuple[int, int]:
        """(base, version): the newest that can be had of this era; (-1, -1): none."""
        way = next((way for way in self.ways(fragment) if way.era == era), None)
        return (way.base, way.version) if way is not None else (-1, -1)

    def _made(self, era: int, fragment: int, version: int) -> VersionResults | None:
        found = self._results.get((era, fragment, version))
        whole = found is not None and len(found.places) == self._fragments[fragment].count
        return found if found is not None and whole and found.digest else None

    def after(self, era: int, fragment: int, version: int) -> set[int]:
        """Chunks whose results of this version lie there, though it was not made from them before the end came."""
        found = self._results.get((era, fragment, version))
        return set(found.places) if found is not None else set()

    @property
    def size_bytes(self) -> int:
        bases = sum(self._base_bytes(number) for _, number, _ in self._bases)
        return bases + sum(each.end for each in self._results.values())

    def _base_bytes(self, fragment: int) -> int:
        count = self._fragments[fragment].count
        return HASH_BYTES * (1 + count) + count * self._chunk_bytes

    def base_chunks(self, way: BasePath) -> Iterator[tuple[int, bytes]]:
        """The base of this way, chunk by chunk; StoreError at the first that is not as it was written."""
        path, chunks = (
            self._path(way.era, way.fragment, way.base, "base"),
            self._fragments[way.fragment].chunks,
        )
        with _told(path), path.open("rb") as file:
            hashes = _split(file.read(HASH_BYTES * (1 + len(chunks)))[HASH_BYTES:])
            if root_of(hashes) != self._bases[way.era, way.fragment, way.base]:
                raise StoreError(f"{path}: damaged")
            for chunk, expected in zip(chunks, hashes, strict=True):
                body = file.read(self._chunk_bytes)
                if hash_bytes(body) != expected:
                    raise StoreError(f"{path}: chunk {chunk} is damaged")
                yield chunk, body

    def result(self, era: int, fragment: int, version: int, chunk: int) -> tuple[bytes, float] | None:
        """The payload, and by what it is multiplied; None if it is not there, or not as it was written."""
        found = self._results.get((era, fragment, version))
        at, length, written = found.places.get(chunk, (0, 0, b"")) if found is not None else (0, 0, b"")
        if found is None or not length:
            return None
        try:
            with self._path(era, fragment, version, "results").open("rb") as file:
                file.seek(at)
                payload = file.read(length)
        except OSError:
            return None
        return (payload, found.factor) if hash_bytes(payload) == written else None

    # ---- changing ----------------------------------------------------------------------------------------

    def put(self, era: int, fragment: int, version: int, payloads: Mapping[int, Payload]) -> None:
        """Results of a version, by chunk.  What lies there of another round, as of one that was aborted, gives way."""
        key = (era, fragment, version)
        hashes = {chunk: hash_bytes(payload) for chunk, payload in payloads.items()}
        found = self._results.get(key, VersionResults())
        there = {chunk: found.places[chunk][2] for chunk in hashes if chunk in found.places}
        if found.digest or any(hashes[chunk] != written for chunk, written in there.items()):
            if there == hashes:
                return  # it was all there
            found = VersionResults()
        lacking = [chunk for chunk in hashes if chunk not in found.places]
        if not lacking:
            return
        path, places = self._path(*key, "results"), dict(found.places)
        with _told(path), _opened(path, found.end) as file:
            at = found.end or file.write(self._head)
            for chunk in lacking:
                record = _RECORD.pack(chunk, len(payloads[chunk]), 1.0, hashes[chunk])
                file.write(record)
                file.write(failpoints.passing("keep.mid_result", bytes(payloads[chunk])))
                places[chunk] = (at + len(record), len(payloads[chunk]), hashes[chunk])
                at += len(record) + len(payloads[chunk])
        self._results[key] = VersionResults(places, at)

    def sync(self, era: int, fragment: int, version: int) -> None:
        """What was put of this version is on the disk when this returns."""
        path = self._path(era, fragment, version, "results")
        with _told(path), path.open("rb") as file:
            failpoints.hit("keep.before_sync")
            os.fsync(file.fileno())
        with _told(self.folder):
            os.fsync(self._lock)

    def made(self, era: int, fragment: int, version: int, digest: bytes, factor: float) -> bool:
        """These results, multiplied by this, led to a state of this digest.  False: some of them are not here."""
        found = self._results.get((era, fragment, version))
        if found is None or len(found.places) < self._fragments[fragment].count:
            return False
        if found.digest == digest:
            return True
        path = self._path(era, fragment, version, "results")
        with _told(path), _opened(path, found.end) as file:
            failpoints.hit("keep.before_digest")
            file.write(_RECORD.pack(0, 0, factor, digest))
            file.flush()
            os.fsync(file.fileno())
        found.digest, found.factor, found.end = digest, factor, found.end + _RECORD.size
        return True

    def begin(self, era: int, fragment: int, version: int, digest: bytes, hashes: list[bytes]) -> BaseDraft:
        """A new base; `hashes`: of its chunks, in order."""
        return BaseDraft(self._path(era, fragment, version, "base"), self._head, digest, hashes)

    def publish(self, draft: BaseDraft, era: int, fragment: int, version: int) -> None:
        """It is whole: it counts from now on, and what it makes superfluous goes."""
        draft.publish()
        with _told(self.folder):
            os.fsync(self._lock)
        self._bases[era, fragment, version] = draft.digest
        failpoints.hit("keep.before_remove")
        for key in [key for key in self._bases if key[1] == fragment and key != (era, fragment, version)]:
            self._remove(key, "base")
            del self._bases[key]
        for key in list(self._results):
            if key[1] == fragment and (key[0] != era or key[2] <= version):
                self._remove(key, "results")
                del self._results[key]

    def drop_after(self, era: int, fragment: int, version: int) -> None:
        """Results of later versions were not used: they are made again, maybe of others."""
        for key in [key for key in self._results if key[:2] == (era, fragment) and key[2] > version]:
            self._remove(key, "results")
            del self._results[key]

    def _remove(self, key: Key, ending: str) -> None:
        with _told(self.folder):
            self._path(*key, ending).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    # ---- a former life -----------------------------------------------------------------------------------

    def _scan(self) -> None:
        for path in sorted(self.folder.iterdir()):
            named = _NAME.fullmatch(path.name)
            key = (int(named[1]), int(named[2]), int(named[3])) if named is not None else (0, -1, 0)
            read = key[1] in self._fragments and (self._read_base if path.suffix == ".base" else self._read)
            if not read or not read(key, path):
                path.unlink()

    def _read_base(self, key: Key, path: Path) -> bool:
        with path.open("rb") as file:
            count = self._fragments[key[1]].count
            head = file.read(HASH_BYTES * (1 + count))
        whole = len(head) == HASH_BYTES * (1 + count) and path.stat().st_size == self._base_bytes(key[1])
        if not whole or head[:HASH_BYTES] != self._head:
            return False
        self._bases[key] = root_of(_split(head[HASH_BYTES:]))
        return True

    def _read(self, key: Key, path: Path) -> bool:
        """By its records alone; what was torn at the end is cut off, so that more can be appended."""
        chunks, size, found = (
            self._fragments[key[1]].chunks,
            path.stat().st_size,
            VersionResults(end=HASH_BYTES),
        )
        with path.open("r+b") as file:
            if file.read(HASH_BYTES) != self._head:
                return False
            while len(raw := file.read(_RECORD.size)) == _RECORD.size:
                chunk, length, factor, written = _RECORD.unpack(raw)
                at = found.end + _RECORD.size
                if not length:
                    if not math.isfinite(factor) or written == bytes(HASH_BYTES):
                        break  # zeros: the machine lost its power while this was written
                    found.digest, found.factor, found.end = written, factor, at
                    continue
                if chunk not in chunks or length > _MOST_PAYLOAD or at + length > size:
                    break
                found.places[chunk] = (at, length, written)
                found.end = file.seek(at + length)
            file.truncate(found.end)
        self._results[key] = found
        return bool(found.places)

    def _path(self, era: int, fragment: int, version: int, ending: str) -> Path:
        return self.folder / f"e{era}-f{fragment}-v{version}.{ending}"


class BaseDraft:
    """A base that is being written.  It does not exist until `KeptState.publish`."""

    def __init__(self, path: Path, head: bytes, digest: bytes, hashes: list[bytes]) -> None:
        self.digest = digest
        self._path, self._aside, self._hashes = path, path.with_name(f"{path.name}.new"), hashes
        if root_of(hashes) != digest:
            raise StoreError(f"{path}: these hashes are not of the state that was confirmed")
        self._at = 0
        with _told(self._aside):
            self._file = os.fdopen(os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
            self._file.write(head + b"".join(hashes))

    def add(self, body: bytes) -> None:
        """The next chunk; its hash is checked, for what is copied beside the training might be another version."""
        if hash_bytes(body) != self._hashes[self._at]:
            raise StoreError(f"{self._aside}: the copy is not of the state that was confirmed")
        self._at += 1
        with _told(self._aside):
            self._file.write(failpoints.passing("keep.mid_base", body))

    def publish(self) -> None:
        with _told(self._aside):
            failpoints.hit("keep.before_fsync")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            failpoints.hit("keep.before_rename")
            os.replace(self._aside, self._path)
        failpoints.hit("keep.after_rename")

    def give_up(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is not flushed either
            self._file.close()
        self._aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path, end: int) -> Iterator[BinaryIO]:
    """To append at `end`: what lies behind it was torn by an error, and counts as nothing."""
    flags = os.O_WRONLY | os.O_CREAT
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.truncate(end)
        file.seek(end)
        yield file


def _split(raw: bytes) -> list[bytes]:
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]


def _locked(folder: Path, scan: Callable[[], None]) -> int:
    """The folder, open, and no other process's as long as it is; `scan` looks at what a former life left there."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        scan()
    except OSError:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from None


# ---- arrivals ----------------------------------------------------------------------------------------------
# Pieces of state that have arrived, on this machine's own disk until the state is whole.
#
# Used by the agent (peer/state/keeping_state.py), so that a joiner that is killed fetches only what it did
# not have. One file, a head and then a place for each chunk: its record and its bytes. The record is written
# after the bytes and carries their hash, so what was torn is found when it is read. The file is locked: two
# processes of one peer do not share it. It is this peer's own word only: whoever reads it back still has to
# end at the run's digest (P4).

_HEAD_BYTES = 4096
# Version + 1, era, hash of the bytes, digest or zeros.
_ARRIVED = struct.Struct(f"<qq{HASH_BYTES}s{HASH_BYTES}s")
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
        self._place = _ARRIVED.size + chunk_bytes
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
            raw = os.pread(self._file, _ARRIVED.size, self._at(chunk))
            if len(raw) == _ARRIVED.size:
                version, era, _, digest = _ARRIVED.unpack(raw)
                if version > 0:
                    found[chunk] = Arrived(version - 1, era, b"" if digest == _NO_DIGEST else digest)
        return found

    def get(self, chunk: int) -> bytes | None:
        """None if it is not there, or not as it was written."""
        raw = os.pread(self._file, self._place, self._at(chunk))
        if len(raw) < self._place:
            return None
        version, _, written, _ = _ARRIVED.unpack_from(raw)
        body = raw[_ARRIVED.size :]
        return body if version > 0 and hash_bytes(body) == written else None

    def put(self, chunk: int, arrived: Arrived, body: Payload, body_hash: bytes = b"") -> None:
        """StoreError if the disk takes no more."""
        at, written = self._at(chunk), body_hash or hash_bytes(body)
        record = _ARRIVED.pack(arrived.version + 1, arrived.era, written, arrived.digest or _NO_DIGEST)
        try:
            done = os.pwrite(self._file, body, at + _ARRIVED.size)
            done += os.pwrite(self._file, record, at)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from None
        if done < self._place:
            raise StoreError(f"{self._path}: no room left")

    def forget(self, chunk: int) -> None:
        os.pwrite(self._file, bytes(_ARRIVED.size), self._at(chunk))

    def remove(self) -> None:
        """It is not needed any more."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def _at(self, chunk: int) -> int:
        return _HEAD_BYTES + chunk * self._place


# ---- kept results ------------------------------------------------------------------------------------------
# The results of past commits in files on this machine: bounded, checked when read, and there after a crash.
#
# Used by the agent's thread for them (peer/state/keeping_state.py). One file for each fragment and version,
# to which results are appended with their length and hash. Whatever was torn does not match its hash and is
# not given to anybody. The folder is locked: two processes of one peer do not share it. Must not know who
# wants a result.

_RESULT = struct.Struct(f"<QQ{HASH_BYTES}s")  # chunk, length, hash of the payload
_RESULTS_NAME = re.compile(r"e(\d+)-f(\d+)-v(\d+)\.results")


class KeptResults:
    def __init__(
        self, folder: Path, what: bytes, keep_versions: int, limit_bytes: int, payload_bytes: int
    ) -> None:
        """`what` names the run and the model: files of anything else are removed.  StoreError."""
        self._folder, self._keep, self._limit = folder, keep_versions, limit_bytes
        self._head, self._payload_bytes = hash_bytes(what), payload_bytes
        self._places: dict[Key, dict[int, tuple[int, int, bytes]]] = {}  # chunk -> where, length, hash
        self._sizes: dict[Key, int] = {}
        with _told(folder):
            own_files.made_folder(folder)
            self._lock = _locked(folder, self._scan)

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
        mode = "ab" if key in self._places else "wb"
        with _told(path), open(path, mode, opener=own_files.opened) as file:
            if key not in self._places:
                file.write(self._head)
            at = file.tell() + _RESULT.size
            file.write(_RESULT.pack(chunk, len(payload), written))
            file.write(payload)
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
            named = _RESULTS_NAME.fullmatch(path.name)
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
            while len(raw := file.read(_RESULT.size)) == _RESULT.size:
                chunk, length, written = _RESULT.unpack(raw)
                at = good + _RESULT.size
                if not 0 < length <= self._payload_bytes or at + length > size:
                    break
                places[chunk] = (at, length, written)
                good = file.seek(at + length)
            file.truncate(good)
        return places

    def _path(self, key: Key) -> Path:
        era, fragment, version = key
        return self._folder / f"e{era}-f{fragment}-v{version}.results"
