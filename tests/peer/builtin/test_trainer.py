"""The built-in trainer's own mistakes: told on one line, and the agent that started it hears of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from farflung.peer.builtin import trainer
from farflung.protocol.manifest import Manifest


def test_a_peer_without_the_optimizers_package_is_told_what_to_install_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Manifest.from_toml('[inner]\noptimizer = "soap"\n', "run.toml")
    given_up: list[bool] = []
    connection = SimpleNamespace(manifest=manifest, abandon=lambda: given_up.append(True))
    monkeypatch.setattr(trainer, "connect", lambda: connection)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert trainer.main([]) == 2 and given_up == [True]
    said = capsys.readouterr().err
    assert "pip install pytorch-optimizer" in said and said.count("\n") == 1


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 0), (4, 1)])
def test_of_several_gpus_it_says_which_it_takes_and_how_to_use_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, lines: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert trainer.best_device().type == ("cuda" if count else "cpu")
    said = capsys.readouterr().err
    assert said.count("\n") == lines
    if lines:
        assert "cuda:0 (Some GPU), and not on 3 more" in said and "CUDA_VISIBLE_DEVICES" in said
