"""Files of a data set at any URL: found, read in pieces, asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from farflung.peer.data import data_files
from farflung.peer.data.data_files import TRIES, DataFiles
from farflung.protocol.errors import StoreError, UserError
from rig.web import Web


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def urls(place: str, options: dict[str, Any] | None = None) -> list[tuple[str, int]]:
    return [(each.url, each.size_bytes) for each in DataFiles(options or {}).find(place)]


def test_a_folder_gives_its_shards_by_name_and_stars_what_matches(tmp_path: Path, memory: Any) -> None:
    for name in ("b.bin", "a.npy", "c.parquet", "notes.txt"):
        (tmp_path / name).write_bytes(bytes(3))
        memory.pipe(f"/shards/{name}", bytes(3))
    (tmp_path / "z.bin").symlink_to(tmp_path / "b.bin")  # as the caches of others have it
    (tmp_path / "below").mkdir()
    shards = ["a.npy", "b.bin", "c.parquet"]
    assert urls(str(tmp_path)) == [(str(tmp_path / name), 3) for name in [*shards, "z.bin"]]
    assert urls("memory://shards") == [(f"memory:///shards/{name}", 3) for name in shards]
    assert urls("memory://shards/*.b*") == [("memory:///shards/b.bin", 3)]
    assert urls(str(tmp_path / "notes.txt")) == [(str(tmp_path / "notes.txt"), 3)]


def test_a_place_without_shards_is_told_with_what_is_there(tmp_path: Path, memory: Any) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        UserError, match=r"no shard there that ends in \.bin, .*; there are 1 other files, such as"
    ):
        urls(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere: no such file or folder"):
        urls("memory://nowhere")
    with pytest.raises(UserError, match="this place can't be read: Protocol not known: nix"):
        urls("nix://a/b.bin")


def test_a_package_that_is_missing_is_named_as_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(data_files.fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"pip install 'farflung\[s3\]'"):
        urls("s3://bucket/a.bin")
    with pytest.raises(UserError, match="Install s3fs"):
        urls("other://bucket/a.bin")


def test_pieces_are_asked_for_alone_and_what_fails_is_asked_for_again(web: Web) -> None:
    web.files["/a.bin"] = bytes(range(200))
    pauses: list[float] = []
    files = DataFiles({}, pauses.append)
    (file,) = files.find(web.url("/a.bin?signed=1".partition("?")[0]))
    assert file.size_bytes == 200 and file.mark.startswith("ETag") and not file.is_local
    web.asked.clear()
    assert files.read([(file, 190, 200), (file, 3, 5)]) == [bytes(range(190, 200)), bytes([3, 4])]
    assert sorted(web.asked) == ["GET /a.bin bytes=190-199", "GET /a.bin bytes=3-4"]
    web.failures = 2
    assert files.read([(file, 0, 4)]) == [bytes(range(4))] and pauses == [0.5, 1.0]
    assert b"".join(files.pieces(file)) == bytes(range(200))
    pauses.clear()
    web.failures = 100
    with pytest.raises(StoreError, match=r"a\.bin: 503"):
        files.read([(file, 0, 4)])
    assert len(pauses) == TRIES - 1


def test_a_short_answer_is_no_row(web: Web) -> None:
    web.files["/a.bin"] = bytes(200)
    files = DataFiles({}, lambda pause: None)
    (file,) = files.find(web.url("/a.bin"))
    web.cut_bytes = 1
    with pytest.raises(StoreError, match="asked for 10 bytes, got 9: has it changed"):
        files.read([(file, 0, 10)])


def test_a_server_that_says_no_length_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/a.bin"] = bytes(10)
    files = DataFiles({})
    fs, _ = files._store(web.url("/a.bin"))
    monkeypatch.setattr(fs, "info", lambda path: {"type": "file", "size": None})
    with pytest.raises(UserError, match="does not say how long it is"):
        files.find(web.url("/a.bin"))


def test_s3_is_found_by_stars_and_read_in_pieces(buckets: Any) -> None:
    bucket = buckets.publish({f"run/{name}.bin": bytes(range(100)) for name in "ab"})
    for options in ({}, None):  # with somebody's keys, and as nobody
        files = DataFiles(options)
        found = files.find(f"{bucket}/run/*.bin")
        assert [each.url for each in found] == [f"{bucket}/run/a.bin", f"{bucket}/run/b.bin"]
        assert files.read([(found[1], 5, 7)]) == [bytes([5, 6])]
