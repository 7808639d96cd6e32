"""The text that the built-in model reads by default, and how it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farflung.peer.builtin.corpus import ByteWindows, corpus_digest, load_corpus
from farflung.protocol.errors import UserError


def test_the_standard_library_is_there_capped_and_cached() -> None:
    corpus = load_corpus(max_bytes=400_000)
    assert corpus.train.dtype == corpus.held_out.dtype == torch.uint8
    assert corpus.train.numel() + corpus.held_out.numel() == 400_000
    assert corpus.held_out.numel() > 1000
    assert load_corpus(max_bytes=400_000) is corpus
    assert len(corpus_digest(corpus)) == 64
    assert corpus_digest(load_corpus(max_bytes=399_999)) != corpus_digest(corpus)


def test_files_are_read_in_order_and_one_in_twenty_is_held_out(tmp_path: Path) -> None:
    for number in range(1, 41):
        (tmp_path / f"m{number:02}.py").write_bytes(f"{number:02}\r\n".encode())
    for skipped in ("__pycache__/x.py", "site-packages/x.py", "test/x.py", "_sysconfigdata_x.py", "note.txt"):
        (tmp_path / skipped).parent.mkdir(exist_ok=True)
        (tmp_path / skipped).write_text("no")
    corpus = load_corpus(folder=str(tmp_path))
    assert bytes(corpus.held_out.tolist()) == b"01\n21\n"
    assert bytes(corpus.train.tolist()).startswith(b"02\n03\n04\n")
    assert corpus.train.numel() == 38 * 3


def test_a_python_without_sources_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few Python sources"):
        load_corpus(folder=str(tmp_path))


def test_windows_cover_the_text_and_predict_each_byte_once() -> None:
    data = torch.arange(24).to(torch.uint8)
    windows = ByteWindows(data, context=5)
    assert len(windows) == 4
    assert windows[0].dtype == torch.int64
    assert [windows[i].tolist() for i in range(2)] == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    targets = [byte for i in range(len(windows)) for byte in windows[i][1:].tolist()]
    assert targets == list(range(1, 21))
    assert len(ByteWindows(data[:21], context=5)) == 4
    assert len(ByteWindows(data[:20], context=5)) == 3
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            windows[outside]
    with pytest.raises(UserError, match="too few for one window"):
        ByteWindows(data[:5], context=5)
