"""A fresh optimizer in a run that has learned something: its first steps are small, in every script."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import LoadState, to_bytes, to_trainer
from farflung.peer.trainer.api import Connection, Run
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.manifest import Manifest

MANIFEST = Manifest.model_validate({"round": {"sync_every": 50, "chunk_kb": 1}})
SMALL = [pytest.approx(n / 10) for n in range(1, 11)]


def joined(folder: Path, version: int, keep: str) -> tuple[Run, AdamW]:
    """A script that has joined; its agent is this test."""
    model = nn.Linear(4, 3)
    inner = AdamW(model.parameters(), 1.0)
    shared = SharedState.create(folder, ModelLayout.of(model, 256).total_elements)
    load = LoadState(version=version, keep=keep, slot=0, tokens=0, steps=0, spare=1)  # type: ignore[arg-type]
    coming: deque[Any] = deque((shared.as_message(), load))

    def recv(timeout_s: float) -> object | None:
        return to_trainer(to_bytes(coming.popleft())) if coming else None

    channel = SimpleNamespace(send=lambda message: None, recv=recv)
    agent: Any = SimpleNamespace(channel=channel, problem=lambda: None, close=lambda reason: None)
    return Connection(agent, MANIFEST, "ann").join(model, inner), inner


def sizes(run: Run, inner: AdamW, steps: int) -> list[float]:
    """Of the next steps, as far as the rate goes."""
    seen: list[float] = []
    inner.register_step_pre_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))
    for _ in range(steps):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        run.step()
        assert inner.param_groups[0]["lr"] == 1.0, "schedulers find it as they left it"
    return seen


@pytest.mark.parametrize(
    "keep", ["drop", "restore"], ids=["a peer that joins", "a trainer that begins again"]
)
def test_the_first_steps_of_a_fresh_optimizer_are_small(tmp_path: Path, keep: str) -> None:
    assert sizes(*joined(tmp_path, 5, keep), 11) == [*SMALL, 1.0]


def test_who_founds_the_run_takes_whole_steps(tmp_path: Path) -> None:
    assert sizes(*joined(tmp_path, 0, "drop"), 1) == [1.0]


def test_a_rate_that_is_a_tensor_stays_the_same_object(tmp_path: Path) -> None:
    """A captured CUDA graph reads that one."""
    run, inner = joined(tmp_path, 5, "drop")
    rate = torch.tensor(1.0)
    for group in inner.param_groups:
        group["lr"] = rate
    seen: list[tuple[bool, float]] = []
    inner.register_step_pre_hook(
        lambda *_: seen.append((inner.param_groups[0]["lr"] is rate, float(rate))) or None
    )
    run.step()
    assert seen == [(True, SMALL[0])] and inner.param_groups[0]["lr"] is rate and float(rate) == 1.0
