"""Token shards: the same rows wherever the files lie and however they are written, and mistakes in one line."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch import Tensor

from farflung.peer.builtin.corpus import TokenRows
from farflung.peer.data import token_shards
from farflung.peer.data.data_files import DataFiles
from farflung.peer.data.sample_source import source_of
from farflung.peer.data.token_shards import TokenShards
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from rig.web import Web

ROWS = [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, 105, 106, 107]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FARFLUNG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "farflung" / "shards"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """a.bin and b.npy, whose last tokens make no row."""
    folder = tmp_path / "shards"
    folder.mkdir()
    np.arange(10, dtype="<u2").tofile(folder / "a.bin")
    np.save(folder / "b.npy", np.arange(100, 109, dtype=np.int32))
    return folder


@pytest.fixture
def web(here: Path) -> Iterator[Web]:
    with Web() as made:
        made.files = {f"/{path.name}": path.read_bytes() for path in here.iterdir()}
        yield made


def entries(cache: Path) -> list[str]:
    return sorted(path.name[33:] for path in cache.glob("*-*"))


def rows_of(shards: Any) -> list[list[int]]:
    return [row.tolist() for row in shards.__getitems__(range(len(shards)))]


def parquet(path: Path, **columns: Any) -> Path:
    pa: Any = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_token_shards_are_rows_of_all_files_in_order(here: Path, cache: Path) -> None:
    shards = TokenShards([here / "a.bin", here / "b.npy"], length=4)
    assert len(shards) == 4 and [shards[row].tolist() for row in range(4)] == ROWS
    assert shards[0].dtype is torch.int64
    assert [row[0].item() for row in shards.__getitems__([3, 0])] == [104, 0]
    with pytest.raises(IndexError, match="row 4 is outside"):
        shards[4]
    assert rows_of(TokenShards(here, 4)) == rows_of(TokenShards(here / "*", 4)) == ROWS
    assert not cache.exists(), "what lies on a disk here is not copied"


def test_a_npy_of_rows_is_taken_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", np.array(ROWS, dtype=np.uint32))
    assert rows_of(TokenShards(tmp_path / "r.npy", 4)) == ROWS


def test_token_shards_go_to_workers_without_their_contents(tmp_path: Path) -> None:
    np.arange(5000, dtype="<u2").tofile(tmp_path / "a.bin")
    shards = TokenShards(tmp_path / "a.bin", length=100)
    assert torch.equal(shards[0], torch.arange(100))
    sent = pickle.dumps(shards)
    assert len(sent) < 1000 and torch.equal(pickle.loads(sent)[49], shards[49])  # noqa: S301


# ---- elsewhere ---------------------------------------------------------------------------------------------------


def test_files_elsewhere_are_fetched_once_for_all(web: Web, cache: Path) -> None:
    places = [web.url("/a.bin"), web.url("/b.npy")]
    assert rows_of(TokenShards(places, 4)) == ROWS
    fetched = len(web.asked)
    assert entries(cache) == ["a.bin", "b.npy"]
    assert rows_of(TokenShards(places, 4)) == ROWS
    assert [each for each in web.asked[fetched:] if "a.bin" in each] == [], "it is there"


def test_a_file_that_was_written_again_is_fetched_again(web: Web, cache: Path) -> None:
    assert rows_of(TokenShards(web.url("/a.bin"), 4)) == ROWS[:2]
    web.files["/a.bin"] = np.arange(50, 60, dtype="<u2").tobytes()
    fsspec.filesystem("http").invalidate_cache()
    assert rows_of(TokenShards(web.url("/a.bin"), 4)) == [[50, 51, 52, 53], [54, 55, 56, 57]]
    assert entries(cache) == ["a.bin", "a.bin"]


def test_what_does_not_fit_into_the_cache_is_read_row_by_row(
    web: Web, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE_LIMIT", "0.0001 MB")
    with caplog.at_level(logging.INFO):
        shards = TokenShards([web.url("/a.bin"), web.url("/b.npy")], 4)
    assert "more than the cache may have: row by row" in caplog.text
    web.asked.clear()
    assert [row.tolist() for row in shards.__getitems__([2, 1])] == [ROWS[2], ROWS[1]]
    assert sorted(web.asked) == ["GET /a.bin bytes=8-15", "GET /b.npy bytes=128-143"], (
        "these rows and no more"
    )
    assert rows_of(shards) == ROWS and entries(cache) == []


def test_what_others_use_stays_in_the_cache_and_the_rest_is_read_row_by_row(
    web: Web, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE_LIMIT", "0.0002 MB")
    mine = TokenShards(web.url("/b.npy"), 4)
    web.files["/c.npy"] = web.files["/b.npy"]
    others = TokenShards(web.url("/c.npy"), 4)
    assert rows_of(others) == rows_of(mine) == ROWS[2:] and entries(cache) == ["b.npy"]


def first_of(shards: TokenShards) -> list[list[int]]:
    return [row.tolist() for row in shards.__getitems__([0, 3])]


@pytest.mark.parametrize(("begin", "limit"), [("fork", "0 MB"), ("fork", "1 MB"), ("spawn", "1 MB")])
def test_workers_read_elsewhere_with_connections_of_their_own(
    web: Web, monkeypatch: pytest.MonkeyPatch, limit: str, begin: str
) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE_LIMIT", limit)
    shards = TokenShards([web.url("/a.bin"), web.url("/b.npy")], 4)
    assert first_of(shards) == [ROWS[0], ROWS[3]], "this process has its connections first"
    with ProcessPoolExecutor(1, get_context(begin)) as pool:
        assert pool.submit(first_of, shards).result(60) == [ROWS[0], ROWS[3]]


def test_no_more_files_are_open_than_a_process_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_shards, "MAPPED_MOST", 3)
    for number in range(9):
        np.full(4, number, dtype="<u2").tofile(tmp_path / f"{number}.bin")
    before = len(os.listdir("/proc/self/fd"))
    shards = TokenShards(tmp_path, 4)
    assert rows_of(shards) == [[number] * 4 for number in range(9)]
    assert len(os.listdir("/proc/self/fd")) - before <= 3


# ---- parquet -----------------------------------------------------------------------------------------------------


def test_a_column_of_parquet_is_rows_and_is_decoded_once(tmp_path: Path, cache: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    flat = [token for row in ROWS for token in row]
    kinds = {
        "lists": pa.array(ROWS, pa.list_(pa.int32())),
        "large": pa.array(ROWS, pa.large_list(pa.uint16())),
        "fixed": pa.array(ROWS, pa.list_(pa.int64(), 4)),
    }
    for name, column in kinds.items():
        shards = TokenShards(
            parquet(tmp_path / f"{name}.parquet", text=["a"] * 4, ids=column), 4, column="ids"
        )
        assert rows_of(shards) == ROWS and shards[0].dtype is torch.int64
    plain = parquet(tmp_path / "flat.parquet", input_ids=pa.array(flat, pa.uint16()))
    assert rows_of(TokenShards(plain, 4)) == ROWS
    assert entries(cache) == [f"{name}.parquet.tokens" for name in ("fixed", "flat", "large", "lists")]
    plain.write_bytes(plain.read_bytes())  # another time of change, the same size
    os.utime(plain, (1, 1))
    TokenShards(plain, 4)
    assert entries(cache).count("flat.parquet.tokens") == 2


def test_parquet_elsewhere_is_read_there(web: Web, tmp_path: Path, cache: Path) -> None:
    web.files["/r.parquet"] = parquet(tmp_path / "r.parquet", input_ids=ROWS).read_bytes()
    assert rows_of(TokenShards(web.url("/r.parquet"), 4)) == ROWS
    assert entries(cache) == ["r.parquet.tokens"]


@pytest.mark.parametrize(
    ("columns", "options", "told"),
    [
        ({"ids": [[1, 2]]}, {}, r"no column 'input_ids'; it has ids: say column="),
        ({"input_ids": [[1.0, 2.0]]}, {}, r"column 'input_ids' is list<.*double>; expected integers"),
        ({"input_ids": ["text"]}, {}, r"column 'input_ids' is string; expected integers"),
        ({"input_ids": [[1, 2], [3, 4], [5, 6, 7]]}, {}, r"row 2 of 'input_ids' has 3 tokens, expected 2"),
        ({"input_ids": [[1, 2], [3, 4], None]}, {}, r"row 2 of 'input_ids' is empty"),
        ({"input_ids": [[1, 2]]}, {"length": 3}, r"row 0 of 'input_ids' has 2 tokens, expected 3"),
    ],
)
def test_parquet_that_does_not_fit_is_told_in_one_line_and_nothing_of_it_is_kept(
    tmp_path: Path, cache: Path, columns: Any, options: Any, told: str
) -> None:
    path = parquet(tmp_path / "r.parquet", **columns)
    with pytest.raises(UserError, match=told) as caught:
        TokenShards(path, **{"length": 2, **options})
    assert "\n" not in str(caught.value) and not list(cache.glob("*-*"))


def test_parquet_that_the_cache_cannot_take_is_told_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "r.parquet", input_ids=ROWS)
    monkeypatch.setenv("FARFLUNG_CACHE_LIMIT", "0 MB")
    with pytest.raises(UserError, match=r"raise cache_limit"):
        TokenShards(path, 4)


def test_damaged_parquet_is_told_in_one_line(tmp_path: Path) -> None:
    path = parquet(tmp_path / "r.parquet", input_ids=ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"r\.parquet: cannot be read as parquet") as caught:
        TokenShards(path, 4)
    assert "\n" not in str(caught.value)


def test_without_pyarrow_parquet_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "r.parquet").write_bytes(bytes(9))
    with pytest.raises(UserError, match=r"parquet needs pyarrow: pip install 'farflung\[parquet\]'"):
        TokenShards(tmp_path / "r.parquet", 4)


# ---- identity ----------------------------------------------------------------------------------------------------


def test_equal_rows_are_equal_data_wherever_they_lie(
    here: Path, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(shards: TokenShards) -> bytes:
        found, why = source_of(shards, 5).fingerprint(b"run")
        assert not why
        return found

    elsewhere = [web.url("/a.bin"), web.url("/b.npy")]
    local, cached = identity(TokenShards(here, 4)), identity(TokenShards(elsewhere, 4))
    monkeypatch.setenv("FARFLUNG_CACHE_LIMIT", "0 MB")
    assert local == cached == identity(TokenShards(elsewhere, 4))
    monkeypatch.delenv("FARFLUNG_CACHE_LIMIT")
    assert local != identity(TokenShards(elsewhere[::-1], 4)), "in another order they are other data"
    assert local == identity(TokenShards(parquet(tmp_path / "r.parquet", input_ids=ROWS), 4))


# ---- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        (b"", {}, "a.bin: empty"),
        (bytes(10), {"length": 6}, "no row of 6 tokens"),
        (bytes(10), {"length": 0}, "length must be at least 1"),
        (bytes(10), {"dtype": "float32"}, "dtype must be one of"),
        (bytes(11), {}, "11 bytes are no whole number of uint16 tokens; say dtype="),
    ],
)
def test_shards_that_do_not_fit_are_refused(
    tmp_path: Path, content: bytes, options: dict[str, Any], text: str
) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=text):
        TokenShards(tmp_path / "a.bin", **{"length": 2, **options})


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((2, 2)), r"expected integers in one row, or in rows of 4, found float64 of shape \[2, 2\]"),
        (np.zeros((2, 3), dtype=np.uint16), "its rows have 3 tokens, expected 4"),
        (np.array(["a", None], dtype=object), "expected integers in one row"),
    ],
)
def test_npy_files_that_do_not_fit_are_refused(tmp_path: Path, array: Any, text: str) -> None:
    np.save(tmp_path / "b.npy", array)
    with pytest.raises(UserError, match=text):
        TokenShards(tmp_path / "b.npy", 4)


def test_npy_files_that_are_none_or_end_early_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(100, dtype=np.uint16))
    whole = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(whole[:-1])
    with pytest.raises(UserError, match="damaged: 327 bytes do not hold 100 tokens of uint16"):
        TokenShards(tmp_path / "b.npy", 4)
    (tmp_path / "b.npy").write_bytes(b"no such thing")
    with pytest.raises(UserError, match=r"cannot read as \.npy"):
        TokenShards(tmp_path / "b.npy", 4)


def test_shards_given_as_a_text_file_are_told_apart(here: Path) -> None:
    with pytest.raises(UserError, match=r"shards of tokens are no text: farflung\.TokenShards\(.*length="):
        source_of(here / "a.bin", 0)


# ---- the run's ---------------------------------------------------------------------------------------------------


def run_with(data: str) -> Manifest:
    return Manifest.from_toml(f"[data]\n{data}\n[model]\ncontext = 3\n", "run.toml")


def test_a_run_names_its_shards_and_a_peer_may_have_them_elsewhere(here: Path, buckets: Any) -> None:
    bucket = buckets.publish({path.name: path.read_bytes() for path in here.iterdir()})
    listed = run_with(f'source = ["{bucket}/a.bin", "{bucket}/b.npy"]')
    assert rows_of(TokenShards.of_run(listed)) == ROWS
    stars = run_with(f'source = "{bucket}/*"\nlength = 2\ndtype = "uint8"\ncolumn = "ids"')
    found = TokenShards.of_run(stars)
    assert (found.length, found.dtype, found.column) == (2, "uint8", "ids")
    assert rows_of(TokenShards.of_run(run_with('source = "https://a.invalid/a.bin"'), str(here))) == ROWS


def test_rows_that_can_not_fit_are_refused_before_a_file_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DataFiles, "find", lambda *_: pytest.fail("it was looked for"))
    large = 'kind = ""\n[data]\nsource = "https://a.invalid/a.bin"\nlength = 16777216\nbatch = 65536\n'
    manifest = Manifest.from_toml(f"[model]\n{large}lease_samples = 65536", "run.toml")
    with pytest.raises(UserError, match="65536 rows of 16777216 tokens, which it takes at once"):
        TokenShards.of_run(manifest)


def test_a_run_that_names_none_says_so() -> None:
    for source in ('source = ""', ""):
        with pytest.raises(
            UserError, match="run 'my-run' names no token shards: give run.batches a data set"
        ):
            TokenShards.of_run(run_with(source))


def test_the_built_in_model_takes_the_tokens_that_it_has_and_says_which_one_it_has_not(
    here: Path, tmp_path: Path
) -> None:
    windows = TokenRows(TokenShards(here, 4), 256)
    assert len(windows) == 4 and windows[3][1:].tolist() == [105, 106, 107]
    np.array([1, 2, 3, 256], dtype="<u2").tofile(tmp_path / "c.bin")
    with pytest.raises(UserError, match="row 0 has token 256, and .model. vocab is 256"):
        TokenRows(TokenShards(tmp_path / "c.bin", 4), 256)[0]


def test_rows_of_one_batch_are_tensors_of_their_own_rows(here: Path) -> None:
    rows: list[Tensor] = TokenShards(here, 4).__getitems__([0, 1])
    rows[0].zero_()
    assert rows[1].tolist() == ROWS[1] and TokenShards(here, 4)[0].tolist() == ROWS[0]
