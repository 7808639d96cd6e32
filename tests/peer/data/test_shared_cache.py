"""The cache of shards: whole or not there, written once by whoever comes first, never more than so much."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from farflung.peer.data.data_files import PART, NoRoom, SharedCache
from farflung.protocol.errors import StoreError
from rig.waiting import eventually

ONE, TWO, THREE = (f"{number:032x}-{number}.bin" for number in (1, 2, 3))


def bytes_of(content: bytes, asked: list[bytes] | None = None) -> Callable[[], Iterable[bytes]]:
    def pieces() -> Iterator[bytes]:
        if asked is not None:
            asked.append(content)
        for at in range(0, len(content), 3):
            yield content[at : at + 3]

    return pieces


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()} - {"room"}


@pytest.fixture
def cache(tmp_path: Path) -> SharedCache:
    return SharedCache(tmp_path / "shards", 20)


def test_what_is_there_is_not_fetched_again(cache: SharedCache) -> None:
    asked: list[bytes] = []
    for _ in range(3):
        with cache.open(ONE, 8, bytes_of(b"12345678", asked)) as file:
            assert file.read() == b"12345678"
    assert len(asked) == 1 and names(cache.folder) == {ONE}
    assert cache.folder.stat().st_mode & 0o077 == 0


def broken() -> Iterator[bytes]:
    yield b"1234"
    raise StoreError("the line broke")


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (broken, "the line broke"),
        (lambda: [b"1234"], "4 bytes came, 8 were to come"),
        (lambda: [b"12345678", b"9"], "9 bytes came, 8 were to come"),
    ],
)
def test_a_fetch_that_fails_half_way_leaves_nothing(
    cache: SharedCache, pieces: Callable[[], Iterable[bytes]], told: str
) -> None:
    with pytest.raises(StoreError, match=told):
        cache.open(ONE, 8, pieces)
    assert names(cache.folder) == set()
    with cache.open(ONE, 8, bytes_of(b"abcdefgh")) as file:
        assert file.read() == b"abcdefgh"


def test_while_it_is_fetched_it_has_another_name_and_its_whole_length(cache: SharedCache) -> None:
    seen = []

    def pieces() -> Iterator[bytes]:
        seen.append({each.name: each.stat().st_size for each in cache.folder.iterdir()})
        yield b"12345678"

    cache.open(ONE, 8, pieces).close()
    assert seen == [{"room": 0, ONE + PART: 8}]


def test_two_that_fetch_one_file_at_once_fetch_it_once(cache: SharedCache) -> None:
    begun, go_on, asked = threading.Event(), threading.Event(), []

    def slow() -> Iterator[bytes]:
        asked.append("first")
        begun.set()
        assert go_on.wait(20)
        yield b"12345678"

    def second() -> None:
        with cache.open(ONE, 8, bytes_of(b"another!")) as file:
            asked.append(file.read().decode())

    one = threading.Thread(target=lambda: cache.open(ONE, 8, slow).close())
    other = threading.Thread(target=second)
    one.start()
    assert begun.wait(20)
    other.start()
    time.sleep(0.05)  # the other one may be anywhere on its way: what follows holds for every place
    go_on.set()
    one.join(20)
    other.join(20)
    assert asked == ["first", "12345678"]


def test_who_waits_for_one_that_fails_or_is_killed_fetches_it_himself(cache: SharedCache) -> None:
    cache.folder.mkdir()
    child = os.fork()
    if child == 0:

        def stands_still() -> Iterator[bytes]:
            yield b"1234"
            (cache.folder / "half").touch()
            time.sleep(60)

        cache.open(ONE, 8, stands_still)
        os._exit(1)
    eventually((cache.folder / "half").exists, "the other process is half-way")
    read: list[bytes] = []
    waits = threading.Thread(target=lambda: read.append(cache.open(ONE, 8, bytes_of(b"abcdefgh")).read()))
    waits.start()
    time.sleep(0.05)
    assert not read, "nobody reads half a file"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    waits.join(20)
    assert read == [b"abcdefgh"] and names(cache.folder) == {ONE, "half"}


def test_what_was_wanted_the_longest_ago_makes_room_and_nothing_else_in_the_folder(
    cache: SharedCache,
) -> None:
    cache.folder.mkdir()
    mine = cache.folder / "thesis.tex"
    mine.write_bytes(bytes(500))
    for number, name in enumerate((ONE, TWO)):
        cache.open(name, 8, bytes_of(bytes(8))).close()
        os.utime(cache.folder / name, (1000 + number, 1000 + number))
    cache.open(ONE, 8, bytes_of(b"")).close()  # so that it is the newest
    cache.open(THREE, 8, bytes_of(bytes(8))).close()
    assert names(cache.folder) == {ONE, THREE, "thesis.tex"}
    with pytest.raises(NoRoom, match="do not fit beside"):
        cache.open(TWO, 21, bytes_of(bytes(21)))
    assert TWO not in names(cache.folder)


def test_what_somebody_uses_stays_and_the_limit_holds(cache: SharedCache) -> None:
    asked: list[bytes] = []
    with cache.open(ONE, 8, bytes_of(bytes(8))), cache.open(TWO, 8, bytes_of(bytes(8))):
        with pytest.raises(NoRoom, match=r"cache_limit"):
            cache.open(THREE, 8, bytes_of(bytes(8), asked))
        assert names(cache.folder) == {ONE, TWO} and not asked, "it is known before anything is fetched"
    cache.open(THREE, 8, bytes_of(bytes(8))).close()


def test_what_nobody_finishes_any_more_is_removed_when_room_is_made(cache: SharedCache) -> None:
    cache.folder.mkdir()
    (cache.folder / (ONE + PART)).write_bytes(bytes(8))
    cache.open(TWO, 8, bytes_of(bytes(8))).close()
    assert names(cache.folder) == {TWO}


def test_an_entry_of_another_length_is_named_and_not_used(cache: SharedCache) -> None:
    cache.open(ONE, 8, bytes_of(bytes(8))).close()
    os.truncate(cache.folder / ONE, 3)
    with pytest.raises(StoreError, match="damaged, 3 bytes where 8 were written; remove it"):
        cache.open(ONE, 8, bytes_of(bytes(8)))


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="XDG_CACHE_HOME names another folder"):
        SharedCache(tmp_path / "file" / "shards", 20).open(ONE, 8, bytes_of(bytes(8)))
