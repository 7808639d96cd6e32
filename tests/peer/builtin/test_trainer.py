"""The built-in trainer's own mistakes: told on one line, and the agent that started it hears of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

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
