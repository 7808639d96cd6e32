"""Writes that fail, on a disk, in memory and in S3: nothing is there that looks finished and is not.

What is written is what farflung writes there: files of several sizes, whole checkpoints, versions of an archive.
Faults on a disk and in memory are calls that fail, before or after they did what they are for; those of S3 are its
requests (tests/rig/buckets.py).  That a killed process leaves nothing either: tests/chaos.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from fsspec.implementations import memory

from farflung.checkpoints import files
from farflung.checkpoints.archive import Archive, RoundHead
from farflung.checkpoints.files import AGAIN_AFTER_S, SMALL_BYTES, Folder
from farflung.checkpoints.store import Store
from farflung.console import checkpoint_commands
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.round_words import Commit
from rig.made_checkpoint import save

RUN_ID = bytes(range(16))
CHANGES = ("PUT", "POST", "DELETE")
FAULTS = ("busy", "cut", "unanswered", "broken", "denied")  # of rig/buckets.py


@dataclass
class Trip:
    """The n-th call of those that are watched fails, before or after it has done its work; or it and all after it."""

    at: int = -1
    after: bool = False
    lasts: bool = False
    calls: int = 0
    hit: bool = False

    def set(self, at: int, after: bool, lasts: bool) -> None:
        self.at, self.after, self.lasts, self.calls, self.hit = at, after, lasts, 0, False

    def is_due(self) -> bool:
        self.calls += 1
        due = self.calls == self.at or (self.lasts and self.hit)
        self.hit |= due
        return due

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            due = self.is_due()
            if due and not self.after:
                raise OSError("a fault")
            found = function(*words, **named)
            if due:
                raise OSError("a fault")
            return found

        return call


@dataclass
class Place:
    url: str
    trip: Trip
    draw: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.folder, self.store, self.archive = Folder(self.url), Store(self.url), Archive(self.url)
        self.wrote: dict[str, bytes] = {}
        self.failed = 0

    # ---- one write of each kind ----------------------------------------------------------------------------

    def file(self, number: int) -> None:
        sizes = (0, 5000, SMALL_BYTES + 1000, 3 * SMALL_BYTES)
        raw = self.draw.randbytes(self.draw.choice(sizes))
        self.wrote[f"{number}.bin"] = raw
        middle = len(raw) // 2
        self.folder.write("files", f"{number}.bin", [raw[:middle], raw[middle:]])

    def checkpoint(self, number: int) -> None:
        save(self.store, number)

    def version(self, number: int) -> None:
        payloads = [self.draw.randbytes(self.draw.choice((100, SMALL_BYTES))) for _ in range(2)]
        hashes = [hash_bytes(each) for each in payloads]
        commit = Commit(
            round_no=number,
            version=number,
            members=("a" * 16,),
            weights=(1.0,),
            hashes=b"".join(hashes),
            codec="fp32",
        )
        head = RoundHead(
            run_id=RUN_ID,
            era=0,
            commit=commit,
            digest=root_of(hashes),  # of a state that is named like its results
            chunks=b"".join(hashes),
            sizes=tuple(map(len, payloads)),
        )
        self.archive.put(head, payloads)

    def write_with_a_fault(self, number: int) -> bool:
        """Whether the fault came."""
        kind = self.draw.choice((self.file, self.checkpoint, self.version))
        self.trip.set(
            self.draw.randint(1, 24 if kind == self.checkpoint else 4),
            self.draw.random() < 0.5,
            number % 2 == 0,
        )
        try:
            kind(number)
        except StoreError:
            self.failed += 1
        finally:
            hit = self.trip.hit
            self.trip.set(-1, False, False)
        return hit

    # ---- what is there -------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Of all that looks finished."""
        found = []
        for name, size_bytes in self.folder.files("files").items():
            raw = self.folder.read("files", name, 1 << 30)
            found += [] if raw == self.wrote[name] and size_bytes == len(raw) else [name]
        listing = self.store.list_saved()
        found += listing.problems
        found += [problem for saved in listing.complete for problem in self.store.problems_of(saved)]
        run = RUN_ID.hex()[:8]
        for key in self.archive.keys(run):
            for payload in self.archive.payloads(run, key):
                found += [] if payload else [str(key)]
        return found


@contextlib.contextmanager
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    trip = Trip()
    monkeypatch.setattr(files.os, "fsync", trip.over(files.os.fsync))
    monkeypatch.setattr(files.os, "replace", trip.over(files.os.replace))
    monkeypatch.setattr(files.failpoints, "passing", trip.over(files.failpoints.passing))  # each piece
    yield Place(str(tmp_path / "kept"), trip)


@contextlib.contextmanager
def in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    trip = Trip()
    for kind, name in (
        (memory.MemoryFileSystem, "pipe_file"),
        (memory.MemoryFileSystem, "makedirs"),
        (memory.MemoryFileSystem, "_open"),
        (memory.MemoryFile, "commit"),
    ):
        monkeypatch.setattr(kind, name, trip.over(getattr(kind, name)))
    place = Place(f"memory://{tmp_path.name}", trip)
    yield place
    memory.MemoryFileSystem().rm(f"/{tmp_path.name}", recursive=True)


@contextlib.contextmanager
def in_s3(monkeypatch: pytest.MonkeyPatch, buckets: Any) -> Iterator[Place]:
    # What its library tries by itself is not what is tested, and takes long.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    trip, draw = Trip(), random.Random(11)

    def plan(method: str, path: str) -> str:
        return draw.choice(FAULTS) if method in CHANGES and trip.is_due() else ""

    buckets.faults.plan = plan
    yield Place(f"{buckets.new()}/kept", trip)
    buckets.faults.plan = lambda method, path: ""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "AGAIN_AFTER_S", (0.0,) * len(AGAIN_AFTER_S))


@pytest.mark.parametrize(
    ("where", "writes"),
    [("disk", 200), ("memory", 200), pytest.param("s3", 50, marks=pytest.mark.hard)],
)
def test_nothing_looks_finished_that_is_not(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, writes: int
) -> None:
    """Each of the writes has a fault in it."""
    if where == "s3":
        made = in_s3(monkeypatch, request.getfixturevalue("buckets"))
    else:
        made = (on_disk if where == "disk" else in_memory)(monkeypatch, tmp_path)
    with made as place:
        hits = number = 0
        while hits < writes:
            number += 1
            assert number < 10 * writes, "the faults do not come"
            hits += place.write_with_a_fault(number)
        assert place.failed > writes / 4, "most faults were none"
        assert place.problems() == []
        place.checkpoint(number + 1)  # and the place is as good as before
        place.version(number + 1)
        newest = place.store.list_saved().complete[0]
        assert newest.manifest.version == number + 1 and place.problems() == []


# ---- asked again, within bounds


def failing(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, times: int, error: Exception) -> list[int]:
    """The first calls fail; grows with each call."""
    calls: list[int] = []
    whole = getattr(kind, name)

    def call(*words: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return whole(*words, **named)

    monkeypatch.setattr(kind, name, call)
    return calls


SMALL, LARGE = [b"12", b"345"], [bytes(SMALL_BYTES), b"the end"]


@pytest.mark.parametrize(("pieces", "kind"), [(SMALL, "pipe_file"), (LARGE, "_open"), (SMALL, "makedirs")])
def test_a_store_that_fails_is_asked_three_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pieces: list[bytes], kind: str
) -> None:
    most = len(AGAIN_AFTER_S)
    folder = Folder(f"memory://{tmp_path.name}")
    calls = failing(monkeypatch, memory.MemoryFileSystem, kind, most, OSError("busy"))
    folder.write("one", "file.bin", pieces)
    assert len(calls) == most + 1 and folder.files("one") == {"file.bin": sum(map(len, pieces))}
    calls = failing(monkeypatch, memory.MemoryFileSystem, kind, 99, OSError("busy"))
    with pytest.raises(StoreError, match="two/file.bin: busy"):
        folder.write("two", "file.bin", pieces)
    assert len(calls) == most + 1 and folder.files("two") == {}


def test_what_is_read_is_asked_for_again_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Folder(f"memory://{tmp_path.name}")
    folder.write("one", "file.bin", SMALL)
    failing(monkeypatch, memory.MemoryFileSystem, "ls", 2, OSError("busy"))
    assert folder.files("one") == {"file.bin": 5}
    failing(monkeypatch, memory.MemoryFileSystem, "_open", 1, OSError("busy"))
    assert folder.read("one", "file.bin", 3) == b"123"
    failing(monkeypatch, memory.MemoryFileSystem, "_open", 1, OSError("busy"))
    assert list(folder.pieces("one", "file.bin", [2, 3])) == SMALL


def test_nobody_asks_again_for_what_cannot_be_or_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Folder(f"memory://{tmp_path.name}")
    for error in (PermissionError("not yours"), FileNotFoundError("no such bucket")):
        calls = failing(monkeypatch, memory.MemoryFileSystem, "pipe_file", 99, error)
        with pytest.raises(StoreError):
            folder.write("one", "file.bin", SMALL)
        assert len(calls) == 1
    monkeypatch.setattr(files, "AGAIN_WITHIN_S", 0.0)
    calls = failing(monkeypatch, memory.MemoryFileSystem, "pipe_file", 99, OSError("it took a minute"))
    with pytest.raises(StoreError):
        folder.write("one", "file.bin", SMALL)
    assert len(calls) == 1


def test_what_is_there_only_once_is_not_sent_again_half(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Folder(f"memory://{tmp_path.name}")
    failing(monkeypatch, memory.MemoryFile, "commit", 1, OSError("busy"))
    with pytest.raises(StoreError):
        folder.write("one", "file.bin", iter(LARGE))
    assert folder.files("one") == {}


def test_s3_that_is_busy_once_loses_nothing(monkeypatch: pytest.MonkeyPatch, buckets: Any) -> None:
    for fault in ("busy", "cut", "unanswered", "broken"):
        with in_s3(monkeypatch, buckets) as place:
            for pieces in (SMALL, LARGE):
                place.trip.set(1, False, False)
                buckets.faults.plan = lambda method, path, fault=fault, trip=place.trip: (
                    fault if method in CHANGES and trip.is_due() else ""
                )
                place.folder.write("one", fault, pieces)
                assert place.trip.hit
                assert place.folder.read("one", fault, 1 << 30) == b"".join(pieces)


# ---- what goes to a disk by other ways


def test_an_export_that_fails_half_way_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def half(tensors: object, path: Path, head: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError("No space left on device")

    out = tmp_path / "model.safetensors"
    checkpoint_commands._save({"w": torch.ones(3)}, out, {})
    before = out.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr("safetensors.torch.save_file", half)
        with pytest.raises(UserError, match="cannot write: No space left"):
            checkpoint_commands._save({"w": torch.zeros(3)}, out, {})
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]
    other = tmp_path / "other.safetensors"
    with pytest.raises(UserError, match=r"other.safetensors: cannot write"), monkeypatch.context() as broken:
        broken.setattr(checkpoint_commands.os, "fsync", Trip(at=1).over(lambda _: None))
        checkpoint_commands._save({"w": torch.zeros(3)}, other, {})
    assert list(tmp_path.iterdir()) == [out]
