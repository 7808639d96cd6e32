"""Checkpoints in S3, as moto plays it on loopback: what test_store.py asks of every kind of store it asks of S3 too;
here is what is S3's own.  A run that is restored from there: tests/real/test_resume.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest

from farflung.checkpoints.files import SMALL_BYTES, Folder
from farflung.protocol.errors import StoreError
from rig.buckets import bucket_of

MORE_THAN_IS_SENT_AT_ONCE = SMALL_BYTES + 1000
MORE_THAN_ONE_PART = 60 << 20  # s3fs sends the first part of a file at 50 MB


def broken(size_bytes: int) -> Iterator[bytes]:
    yield bytes(size_bytes)
    raise OSError("the disk that it is read from broke")


@pytest.fixture
def place(buckets: Any) -> str:
    return str(buckets.new()) + "/run"


# ---- whole or not at all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1000, MORE_THAN_IS_SENT_AT_ONCE, MORE_THAN_ONE_PART])
def test_a_write_that_fails_half_way_leaves_nothing(buckets: Any, place: str, size_bytes: int) -> None:
    folder = Folder(place)
    with pytest.raises(StoreError, match=f"{place}/one/file.bin: the disk"):
        folder.write("one", "file.bin", broken(size_bytes))
    assert folder.files("one") == {} and buckets.sizes(place) == {}
    assert buckets.begun(place) == [], "parts of it lie there, and cost money"
    folder.write("one", "file.bin", [b"12", b"345"])
    assert folder.files("one") == {"file.bin": 5} and buckets.sizes(place) == {"run/one/file.bin": 5}


def test_a_write_that_fails_leaves_what_was_there(buckets: Any, place: str) -> None:
    folder = Folder(place)
    folder.write("one", "file.bin", [b"old"])
    with pytest.raises(StoreError):
        folder.write("one", "file.bin", broken(MORE_THAN_IS_SENT_AT_ONCE))
    assert folder.read("one", "file.bin", 100) == b"old"


def test_a_large_file_is_sent_in_parts_and_read_in_pieces(place: str) -> None:
    folder, first = Folder(place), bytes(MORE_THAN_ONE_PART)
    folder.write("one", "file.bin", [first, b"the end"])
    assert folder.files("one") == {"file.bin": len(first) + 7}
    pieces = list(folder.pieces("one", "file.bin", [len(first), 4, 4]))
    assert pieces == [first, b"the ", b"end"]


@pytest.mark.parametrize("size_bytes", [0, 1000, MORE_THAN_IS_SENT_AT_ONCE])
def test_a_place_in_memory_is_no_other(size_bytes: int) -> None:
    folder = Folder("memory://whole-or-not-at-all")
    with pytest.raises(StoreError):
        folder.write("one", "file.bin", broken(size_bytes))
    assert folder.files("one") == {}


def test_what_others_of_this_process_write_is_not_taken_back(place: str) -> None:
    """fsspec shares one object among all who ask for the same place; what fails here is this folder's alone."""
    shared, root = fsspec.core.url_to_fs(place)

    def while_another_one_writes() -> Iterator[bytes]:
        shared.pipe_file(f"{root}/theirs/file.bin", b"theirs")
        with shared.open(f"{root}/theirs/second.bin", "wb") as file:
            file.write(b"as well")
        yield from broken(10)

    folder = Folder(place)
    with pytest.raises(StoreError):
        folder.write("one", "file.bin", while_another_one_writes())
    assert folder.files("theirs") == {"file.bin": 6, "second.bin": 7}


# ---- in words --------------------------------------------------------------------------------------------------


def test_the_command_line_reads_s3(
    say: Callable[..., tuple[int, str, str]], buckets: Any, tmp_path: Any
) -> None:
    place = f"{buckets.new()}/run"
    code, _, err = say("checkpoint", "ls", place)
    assert code == 2 and place in err and err.count("\n") == 1
    Folder(place).write("0badc0de-e0000-v00000001", "manifest.json", [b"{}"])
    code, _, err = say("checkpoint", "ls", "--verify", place)
    assert code == 2 and "manifest.json: damaged" in err and "Traceback" not in err
    assert bucket_of(place) in err
