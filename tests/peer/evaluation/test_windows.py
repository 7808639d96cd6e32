"""The text that is held out: which rows are computed, from where they are read, and what can't be read stops nobody."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.builtin.llama import Llama
from farflung.peer.evaluation.windows import READ_AGAIN_S, TEXT_S, HeldOutText, made
from farflung.peer.local.words import Score, Scored
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.errors import ScoreCause
from farflung.protocol.manifest import Manifest
from farflung.protocol.mode_words import text_lengths

ROW = 9  # tokens


def manifest(**of_eval: object) -> Manifest:
    rules = {"source": "https://127.0.0.1:9/none.bin", "windows": 16, **of_eval}
    data = (
        {"source": "https://127.0.0.1:9/train.bin", "length": ROW, "batch": 4}
        if rules["source"] != "python-stdlib"
        else {}
    )
    return Manifest.model_validate({"data": data, "eval": rules, "round": {"sync_every": 1000}})


def ask(text: HeldOutText, *windows: int) -> Scored:
    return text.answer(Score(number=3, versions=(1,), windows=mask_to_bytes(mask_of(windows))))


def nats(said: Scored) -> list[float]:
    assert said.number == 3 and not said.why_not, said
    return [float(each) for each in np.frombuffer(said.nats, "<f4")]


class Rows:
    """Losses that name the rows that they were computed of; and how many came at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.sizes.append(len(rows))
        return rows[:, 0].float()


def folder(tmp_path: Path, rows: int) -> Path:
    """Beside what is trained on: row n begins with token n."""
    tokens = np.zeros((rows, ROW), np.uint16)
    tokens[:, 0] = np.arange(rows)
    (tmp_path / "held_out").mkdir()
    tokens.tofile(tmp_path / "held_out" / "held_out.bin")
    np.zeros((50, ROW), np.uint16).tofile(tmp_path / "train-00000.bin")
    return tmp_path


def test_windows_lie_at_even_distances_and_come_a_batch_at_a_time(tmp_path: Path) -> None:
    losses = Rows()
    text = HeldOutText(manifest(), str(folder(tmp_path, 151)), losses)
    assert nats(ask(text, *range(16))) == [10.0 * window for window in range(16)]
    assert losses.sizes == [4, 4, 4, 4]
    assert nats(ask(text, 15, 2, 7)) == [20.0, 70.0, 150.0], "in their order"


def test_equal_texts_have_equal_fingerprints_and_others_have_others(tmp_path: Path) -> None:
    def print_of(name: str, rows: int, second: int = 0) -> bytes:
        (tmp_path / name).mkdir()
        here = folder(tmp_path / name, rows)
        file = here / "held_out" / "held_out.bin"
        tokens = np.fromfile(file, np.uint16).reshape(rows, ROW)
        tokens[:, 1] = second
        tokens.tofile(file)
        return ask(HeldOutText(manifest(), str(here), Rows()), 1).data

    one = print_of("a", 40)
    assert one == print_of("b", 40) and len(one) == 32
    assert one not in (print_of("longer", 41), print_of("other", 40, second=7))


def test_the_text_that_every_peer_has_is_what_it_holds_out() -> None:
    seen: list[Tensor] = []

    def losses(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows.float().mean(1)

    found = manifest(source="python-stdlib")
    assert len(nats(ask(HeldOutText(found, "", losses), 0, 15))) == 2
    assert torch.equal(seen[0][0], load_corpus().held_out[: found.model.context + 1].long())


def test_too_few_rows_are_told_to_everybody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = ask(HeldOutText(manifest(), str(folder(tmp_path, 15)), Rows()), 0)
    assert said.why_not == ScoreCause.FEW_ROWS and not said.nats
    assert "[eval] source has 15 rows, fewer than windows (16)" in caplog.text


def test_what_lies_on_this_machine_is_told_to_its_owner_alone_and_read_once_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    held_out = folder(tmp_path, 20) / "held_out" / "held_out.bin"
    raw = held_out.read_bytes()
    held_out.write_bytes(raw[:-1])
    text = HeldOutText(manifest(), str(tmp_path), Rows())
    assert ask(text, 0).why_not == ScoreCause.UNREADABLE
    assert "held_out.bin" in caplog.text
    held_out.write_bytes(raw)
    assert ask(text, 0).why_not == ScoreCause.UNREADABLE, "it is not tried at each question"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + READ_AGAIN_S)
    assert nats(ask(text, 0)) == [0.0]


def test_tokens_that_the_model_has_not_are_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = ask(HeldOutText(manifest(), str(folder(tmp_path, 400)), Rows()), 15)
    assert said.why_not == ScoreCause.UNREADABLE
    assert "[eval] source: row 399 has token 399, and [model] vocab is 256" in caplog.text


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_a_loss_that_is_no_number_is_no_answer(odd: float, tmp_path: Path) -> None:
    text = HeldOutText(manifest(), str(folder(tmp_path, 20)), lambda rows: torch.full((len(rows),), odd))
    assert ask(text, 0, 1).why_not == ScoreCause.ODD_LOSSES


@pytest.mark.parametrize(
    "given",
    [
        lambda rows: rows.float(),
        lambda rows: torch.tensor(1.0),
        lambda rows: [1.0] * len(rows),
        lambda rows: None,
    ],
)
def test_what_is_not_a_loss_of_each_row_is_told_and_not_sent(
    given: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one for each token: a mean was forgotten."""
    said = ask(HeldOutText(manifest(), str(folder(tmp_path, 20)), given), 0, 1)
    assert said.why_not == ScoreCause.ODD_LOSSES and not said.nats
    assert "of 2 rows the script gave" in caplog.text


def test_of_a_scripts_model_nobody_here_knows_the_vocabulary(tmp_path: Path) -> None:
    found = Manifest.model_validate(manifest().model_dump() | {"model": {"kind": ""}})
    assert nats(ask(HeldOutText(found, str(folder(tmp_path, 400)), Rows()), 15)) == [399.0]


def test_bits_beyond_the_windows_are_not_computed(tmp_path: Path) -> None:
    assert len(nats(ask(HeldOutText(manifest(), str(folder(tmp_path, 20)), Rows()), 3, 90))) == 1


# ---- a text ------------------------------------------------------------------------------------------------------


class Writes:
    """Counts on from the last id, and takes some time for each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.seconds, self.now = seconds, 0.0

    def __call__(self, ids: list[int], most: int) -> Iterator[int]:
        self.asked.append((ids, most))
        for number in range(most):
            self.now += self.seconds
            yield ids[-1] + 1 + number


def write(text: HeldOutText, *windows: int) -> Scored:
    return text.answer(Score(number=3, versions=(1,), windows=mask_to_bytes(mask_of(windows)), text=True))


def test_a_text_goes_on_from_the_beginning_of_the_first_window(tmp_path: Path) -> None:
    writes = Writes()
    text = HeldOutText(manifest(), str(folder(tmp_path, 16)), Rows(), writes=writes)
    assert ask(text, 0, 1).text == () and not writes.asked, "nobody asked for it"
    said = write(text, 0, 1)
    assert len(said.nats) == 8
    given, most = text_lengths(manifest().model.context, ROW)
    assert said.text == (*[0] * given, *range(1, 1 + most)) and writes.asked == [([0] * given, most)]
    assert write(text, 1, 2).text == (), "the first window is another member's"


@pytest.mark.parametrize(
    ("context", "row", "due"),
    [(16, 17, (8, 8)), (96, 97, (48, 48)), (1024, 1025, (48, 96)), (1024, 2, (1, 96)), (1, 2, (1, 0))],
)
def test_no_text_is_longer_than_the_models_context(context: int, row: int, due: tuple[int, int]) -> None:
    """Also where rows are short, the model goes on with something."""
    assert text_lengths(context, row) == due


def test_a_text_takes_no_longer_than_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Writes(seconds=TEXT_S / 4)
    monkeypatch.setattr(time, "monotonic", lambda: writes.now)
    text = HeldOutText(manifest(), str(folder(tmp_path, 16)), Rows(), writes=writes)
    assert write(text, 0).text == (*[0] * (ROW // 2), 1, 2, 3, 4)


def test_a_model_that_can_not_write_has_its_loss_computed_all_the_same(tmp_path: Path) -> None:
    said = write(HeldOutText(manifest(), str(folder(tmp_path, 16)), Rows()), 0)
    assert said.text == () and nats(said) == [0.0]


def test_without_eval_there_is_nothing_to_compute() -> None:
    assert made(Manifest(), "", Rows(), lambda mine: [mine], None) is None


def test_the_losses_of_rows_are_those_of_the_built_in_model_one_by_one() -> None:
    found = Manifest()
    model = Llama(found.model, 1)
    rows = torch.randint(256, (3, found.model.context + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(
            model.losses(rows), torch.stack([model.loss(row[None]) for row in rows]), atol=1e-6
        )
        assert model.losses(rows).mean().item() == pytest.approx(model.loss(rows).item(), abs=1e-6)


def test_where_one_of_several_ranks_can_not_read_the_text_none_computes(tmp_path: Path) -> None:
    losses, said = Rows(), [b"", ScoreCause.UNREADABLE.encode()]
    text = HeldOutText(manifest(), str(folder(tmp_path, 20)), losses, lambda mine: [mine, said[1]])
    assert ask(text, 0).why_not == ScoreCause.UNREADABLE and losses.sizes == []
    said[1] = b""
    assert len(nats(ask(text, 0))) == 1
    lacks = HeldOutText(manifest(), "", losses, lambda mine: [mine, b""])
    assert ask(lacks, 0).why_not == ScoreCause.UNREADABLE
