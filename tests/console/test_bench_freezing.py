"""benchmarks/freezing.py: a real trainer's loop, rounds that commit, and figures of each; its options."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import freezing
import pytest
import torch
from as_script import called
from freezing import WARM, FreezingOptions, measured, row

from farflung.protocol.errors import UserError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model of 15,000 values; and what is logged afterwards is heard again."""
    for name, size in (("WIDTH", 24), ("VOCABULARY", 200), ("LENGTH", 100)):
        monkeypatch.setattr(freezing, name, size)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("schedule", ["blocking", "overlap"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_each_round_is_frozen_committed_and_loaded(small: None, schedule: str, dtype: str) -> None:
    loads: list[int] = []

    class Counting(freezing.StandIn):
        def commit(self) -> None:
            super().commit()
            assert self.shared is not None and bool(torch.isfinite(self.shared.anchor).all())
            loads.append(self.version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freezing, "StandIn", Counting)
        found = measured(schedule, dtype, layers=1, rounds=WARM + 3, device="cpu", threads=1)
    assert loads == list(range(1, len(loads) + 1)) and len(loads) >= WARM + 2
    assert found["values"] == 7_200 + 12 * 24 * 24 + 13 * 24 + 48 and found["threads"] == 1
    for what in ("freeze_s", "load_s", "most_s"):
        assert 0.0 < found[what] < math.inf
    assert f"{schedule:9} {dtype}" in row(found)


WRONG = [
    (["--dtype", "bf16,fp8"], "--dtype: fp8 is not known; give bf16 or fp32"),
    (["--layers", "0"], "at least 1 layer"),
    (["--schedule", "soon"], "soon"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, told = called(freezing.freezing, FreezingOptions, words), capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and sentence in told, told


def test_a_device_that_is_not_there_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no CUDA device here"):
        FreezingOptions(device="cuda:1")
