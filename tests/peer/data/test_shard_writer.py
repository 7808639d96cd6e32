"""Text to token shards: whole documents, held out by their content, and the same bytes however often it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from farflung.peer.data import shard_writer
from farflung.peer.data.shard_writer import (
    BATCH_CHARS,
    HELD_OUT,
    LONG_BYTES,
    PIECE_CHARS,
    ShardRecipe,
    ShardWriter,
    Written,
    batches,
    documents,
    known_again,
)
from farflung.peer.data.token_shards import TokenShards
from farflung.protocol.errors import UserError

END = 256


def of_bytes(texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def recipe(*paths: Path, held_out: float = 0.2, vocab: int = 257) -> ShardRecipe:
    return ShardRecipe(tuple(map(known_again, paths)), "ab" * 32, vocab, END, held_out)


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Forty documents of a line in two files."""
    found = []
    for part in range(2):
        path = tmp_path / f"{part}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"document {20 * part + n:02}"}) + "\n" for n in range(20))
        )
        found.append(path)
    return found


def silent(written: Written) -> None:
    pass


def said(folder: Path) -> list[str]:
    """Documents of all files, as text."""
    raw = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.bin")))
    ids = np.frombuffer(raw, dtype="<u2").tolist()
    return [bytes(each).decode() for each in _split(ids)]


def _split(ids: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for each in ids:
        if each == END:
            found.append([])
        else:
            found[-1].append(each)
    assert found.pop() == [], "the last document is ended, too"
    return found


def test_each_document_is_whole_in_one_file_and_ended(texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    writer = ShardWriter(out, recipe(*texts), shard_tokens=60)
    written = writer.run(texts, of_bytes, silent)
    assert sorted(said(out)) == [f"document {n:02}" for n in range(40)]
    sizes = {path.name: path.stat().st_size // 2 for path in out.rglob("*.bin")}
    assert sizes.pop("held_out.bin") == written.held_out > 0
    assert [sizes[name] for name in sorted(sizes)] == written.shards
    assert written.done and written.text_bytes == 40 * len("document 00")
    assert not [path for path in out.rglob("*") if path.name.endswith(".part")]
    assert {path.name for path in out.glob("*.bin")} == set(sizes), (
        "nobody who names them all trains on what is held out"
    )
    rows = TokenShards(out / "train-00000.bin", 12)
    assert bytes(rows[0][:11].tolist()).startswith(b"document ")


def test_what_is_held_out_follows_from_the_text_alone(texts: list[Path], tmp_path: Path) -> None:
    found = []
    for name, order in (("one", texts), ("other", texts[::-1])):
        ShardWriter(tmp_path / name, recipe(*order)).run(order, of_bytes, silent)
        ids = np.frombuffer((tmp_path / name / HELD_OUT).read_bytes(), dtype="<u2").tolist()
        found.append(sorted(bytes(each).decode() for each in _split(ids)))
    assert found[0] == found[1] and 0 < len(found[0]) < 20


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Stopped(Exception):
    pass


def stops_after(count: int) -> Callable[[Written], None]:
    left = [count]

    def tell(written: Written) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped

    return tell


@pytest.mark.parametrize("batch", [1, 3])
def test_stopped_anywhere_it_goes_on_and_writes_the_same_bytes(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("farflung.peer.data.shard_writer.BATCH_CHARS", batch * len("document 00"))
    ShardWriter(tmp_path / "once", recipe(*texts), shard_tokens=50).run(texts, of_bytes, silent)
    due = content(tmp_path / "once")
    for after in range(0, 40, 3):
        out = tmp_path / f"after {after}"
        for calls in (after, 5):
            try:
                ShardWriter(out, recipe(*texts), shard_tokens=50).run(texts, of_bytes, stops_after(calls))
            except Stopped:
                pass
        ShardWriter(out, recipe(*texts), shard_tokens=50).run(texts, of_bytes, silent)
        assert content(out) == due, after


def test_killed_between_any_two_things_that_it_does_with_files_it_goes_on(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ShardWriter(tmp_path / "once", recipe(*texts), shard_tokens=150).run(texts, of_bytes, silent)
    due, replace = content(tmp_path / "once"), Path.replace
    for kills_at in range(1, 12):
        for after in (False, True):
            left, out = [kills_at], tmp_path / f"{kills_at} {after}"

            def killed(path: Path, target: Path, left: list[int] = left, after: bool = after) -> Path:
                left[0] -= 1
                if left[0] == 0 and not after:
                    raise Stopped
                found = replace(path, target)
                if left[0] == 0:
                    raise Stopped
                return found

            monkeypatch.setattr(Path, "replace", killed)
            try:
                ShardWriter(out, recipe(*texts), shard_tokens=150).run(texts, of_bytes, silent)
            except Stopped:
                pass
            monkeypatch.setattr(Path, "replace", replace)
            ShardWriter(out, recipe(*texts), shard_tokens=150).run(texts, of_bytes, silent)
            assert content(out) == due, (kills_at, after)


def test_no_power_cut_takes_a_name_that_a_later_word_speaks_of(
    texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename is only on the disk once its folder is: before the next file is named, as that one may tell of it."""
    steps: list[tuple[str, Path]] = []
    rename, sync = Path.replace, shard_writer.sync_folder

    def renamed(path: Path, to: Path) -> Path:
        steps.append(("named", to.parent))
        return rename(path, to)

    def synced(folder: Path) -> None:
        steps.append(("synced", folder))
        sync(folder)

    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(shard_writer, "sync_folder", synced)
    ShardWriter(tmp_path / "out", recipe(*texts), shard_tokens=60).run(texts, of_bytes, silent)
    assert len(steps) > 10
    for named, after in zip(steps[::2], steps[1::2], strict=True):
        assert named[0] == "named" and after == ("synced", named[1])


def test_what_was_taken_away_meanwhile_is_not_made_up(texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        ShardWriter(out, recipe(*texts), shard_tokens=20).run(texts, of_bytes, stops_after(1))
    (out / "held_out" / ".held_out.bin.part").write_bytes(b"")
    with pytest.raises(UserError, match=r"0 bytes of at least \d+ that were written; name a new folder"):
        ShardWriter(out, recipe(*texts), shard_tokens=20).run(texts, of_bytes, silent)


def test_two_at_once_do_not_write_into_one_folder(texts: list[Path], tmp_path: Path) -> None:
    out, told = tmp_path / "out", []

    def meanwhile(written: Written) -> None:
        with pytest.raises(UserError, match="another data prepare writes there"):
            ShardWriter(out, recipe(*texts)).run(texts, of_bytes, silent)
        told.append(written.document)

    ShardWriter(out, recipe(*texts)).run(texts, of_bytes, meanwhile)
    assert told and sorted(said(out)) == [f"document {n:02}" for n in range(40)]


def test_a_file_that_changed_is_another_one(texts: list[Path], tmp_path: Path) -> None:
    ShardWriter(tmp_path / "out", recipe(*texts)).run(texts, of_bytes, silent)
    texts[0].write_text(texts[0].read_text().replace("document 03", "document 99"))
    with pytest.raises(UserError, match="made from other files"):
        ShardWriter(tmp_path / "out", recipe(*texts))


def test_a_folder_of_something_else_is_left_alone(texts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ShardWriter(out, recipe(*texts)).run(texts, of_bytes, silent)
    assert ShardWriter(out, recipe(*texts)).written.done
    with pytest.raises(UserError, match="made from other files"):
        ShardWriter(out, recipe(texts[0]))
    (out / "prepared.json").write_text("{}")
    with pytest.raises(UserError, match="not readable"):
        ShardWriter(out, recipe(*texts))
    (out / "prepared.json").unlink()
    with pytest.raises(UserError, match="not empty; name a new folder"):
        ShardWriter(out, recipe(*texts))
    with pytest.raises(UserError, match="expected a folder after the texts, found a file"):
        ShardWriter(texts[1], recipe(texts[0]))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write: Not a directory"):
        ShardWriter(tmp_path / "file" / "out", recipe(*texts)).run(texts, of_bytes, silent)


def test_too_little_text_and_ids_that_no_model_has_are_told(texts: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too little text: .* tokens to train on and 0 held out"):
        ShardWriter(tmp_path / "a", recipe(*texts, held_out=1e-9)).run(texts, of_bytes, silent)
    with pytest.raises(UserError, match="gave id 256, and its vocabulary is 256"):
        ShardWriter(tmp_path / "b", recipe(*texts, vocab=256)).run(texts, of_bytes, silent)


# ---- documents ---------------------------------------------------------------------------------------------


def test_a_short_text_is_one_document_and_a_long_one_is_cut_at_ends_of_lines(tmp_path: Path) -> None:
    short, long, empty = tmp_path / "s.txt", tmp_path / "l.txt", tmp_path / "e.txt"
    short.write_text("one\n\ntwo\n")
    text = "".join(f"line {number}\n" for number in range(LONG_BYTES // 8))
    long.write_text(text + "x" * (3 * PIECE_CHARS))
    empty.write_text(" \n" * LONG_BYTES)
    assert [*documents(short)] == ["one\n\ntwo\n"] and [*documents(empty)] == []
    found = [*documents(long)]
    assert "".join(found) == text + "x" * (3 * PIECE_CHARS)
    assert all(PIECE_CHARS <= len(each) <= 2 * PIECE_CHARS for each in found[:-1])
    assert found[0].endswith("\n")


def test_rows_of_parquet_and_lines_of_json_are_documents_and_what_is_none_is_told(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "", "two"], "n": [1, 2, 3, 4]}), rows)
    assert [*documents(rows)] == ["one", "two"]
    parquet.write_table(pyarrow.table({"n": [1]}), rows)
    with pytest.raises(UserError, match='expected a column "text", found n'):
        [*documents(rows)]
    rows.write_bytes(b"no parquet")
    with pytest.raises(UserError, match="no parquet file"):
        [*documents(rows)]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n["text"]\n')
    with pytest.raises(UserError, match='line 2: expected an object with a "text"'):
        [*documents(lines)]
    lines.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b \\ud800"}\n{"text": 3}\n')
    assert [*documents(lines)] == ["a", "b ?"], "a mark of the byte order, a blank line, half a character"
    lines.write_text('{"text": ' + "[" * 100_000)
    with pytest.raises(UserError, match="line 1: expected an object"):
        [*documents(lines)]
    lines.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        [*documents(lines)]
    with pytest.raises(UserError, match=r"b.txt: cannot read: No such file"):
        [*documents(tmp_path / "b.txt")]


def test_batches_are_bounded_and_begin_where_it_was() -> None:
    texts = ["x" * (BATCH_CHARS // 2)] * 5
    assert [len(each) for each in batches(iter(texts), 0)] == [2, 2, 1]
    assert [len(each) for each in batches(iter(texts), 4)] == [1]
