"""The built-in model and its text: reproducible, causal, and able to learn."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from farflung.peer.builtin.corpus import ByteWindows, corpus_digest, load_corpus
from farflung.peer.builtin.tiny_gpt import GPTConfig, build, evaluate
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError

SMALL = GPTConfig(layers=2, width=32, heads=2, context=16)


def flat_of(seed: int) -> Tensor:
    model = build(SMALL, seed)
    layout = ModelLayout.of(model, 256)
    flat = torch.zeros(layout.total_elements)
    layout.write_anchor(model, flat)
    return flat


# ---- the model


def test_first_values_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = flat_of(seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(flat_of(seed=7), first)
    assert not torch.equal(flat_of(seed=8), first)


def test_the_first_values_have_the_usual_spread() -> None:
    model = build(GPTConfig(layers=8, width=64), 0)
    assert model.bytes.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.bytes.weight.mean().item() == pytest.approx(0.0, abs=0.001)
    assert model.blocks[0].down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(64))


def test_embedding_and_head_are_one_matrix() -> None:
    model = build(SMALL, 0)
    assert model.head.weight is model.bytes.weight
    assert ModelLayout.of(model, 256).aliases == (("head.weight", "bytes.weight"),)


def test_shapes_and_losses() -> None:
    model = build(SMALL, 0)
    window = torch.randint(0, 256, (3, SMALL.context + 1), generator=torch.Generator().manual_seed(0))
    whole = model(window)
    given = model(window[:, :-1], window[:, 1:])
    assert whole.logits.shape == given.logits.shape == (3, SMALL.context, 256)
    assert torch.equal(whole.loss, given.loss)
    assert whole.loss.item() == pytest.approx(math.log(256), rel=0.1)
    assert model(window[:, :5]).logits.shape == (3, 5, 256)
    assert model(window[:, :1]).loss is None
    with pytest.raises(ValueError, match="18 bytes in a row do not fit"):
        model(torch.zeros(1, 18, dtype=torch.int64))
    with pytest.raises(ValueError, match="17 bytes in a row do not fit"):
        model(window, window)


def test_no_byte_sees_the_ones_after_it() -> None:
    model = build(SMALL, 0)
    tokens = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] += 1 if tokens[0, 9] < 255 else -1
    with torch.no_grad():
        same = (model(tokens).logits == model(changed).logits).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


@pytest.mark.parametrize("config", [{"layers": 0}, {"width": 30, "heads": 4}, {"context": 0}])
def test_impossible_sizes_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(UserError, match="model "):
        GPTConfig(**config)


def test_it_learns() -> None:
    corpus = load_corpus(max_bytes=400_000)
    windows = ByteWindows(corpus.train, SMALL.context)
    model = build(SMALL, 0)
    before = evaluate(model, corpus.held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in islice(DataLoader(windows, batch_size=16), 40):
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()
    assert evaluate(model, corpus.held_out) < before - 1.0


def test_evaluation_is_repeatable_and_leaves_the_model_as_it_was() -> None:
    model = build(SMALL, 0)
    data = torch.arange(1000).to(torch.uint8)
    first = evaluate(model, data, windows=5, batch=2)
    assert evaluate(model, data, windows=5, batch=5) == pytest.approx(first, rel=1e-6)
    assert evaluate(model, data, windows=5, batch=2) == first
    assert model.training
    assert model.bytes.weight.grad is None
    with pytest.raises(UserError, match="cannot cut 5 windows of 17 bytes out of 16 bytes"):
        evaluate(model, data[:16], windows=5)


# ---- the text


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
