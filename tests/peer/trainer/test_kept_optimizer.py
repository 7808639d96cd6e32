"""An optimizer's state outlives its script, where that leaves a run in order, and no other optimizer takes it."""

from __future__ import annotations

import logging
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from farflung.optim.inner import inner_optimizer, muon
from farflung.peer.trainer.kept_optimizer import KeptOptimizer, OptimizerState

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.01),
    "amsgrad, two groups": lambda model: AdamW(
        [{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()], "lr": 0.1}],  # type: ignore[index,union-attr]
        amsgrad=True,
    ),
    "momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "adafactor": lambda model: Adafactor(model.parameters(), lr=0.01),
    "muon": lambda model: muon(model, lr=0.01),
    "by its word": lambda model: inner_optimizer("adamw", model, 0.01),
}


def model(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))


def train(net: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        net(torch.randn(5, 4, generator=chance)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def beside(tmp_path: Path) -> str:
    return str(tmp_path / "run-peer")


def written(
    beside: str, make: Callable[[nn.Module], Optimizer] = MAKERS["adamw"]
) -> tuple[nn.Module, Optimizer]:
    net = model()
    optimizer = make(net)
    train(net, optimizer, 7, seed=1)
    KeptOptimizer(beside).write(optimizer)
    return net, optimizer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_goes_on_bit_for_bit_where_it_was(
    make: Callable[[nn.Module], Optimizer], beside: str
) -> None:
    net, optimizer = written(beside, make)
    back = model()
    back.load_state_dict(net.state_dict())
    again = make(back)
    assert KeptOptimizer(beside).read_into(again)
    train(net, optimizer, 5, seed=2)
    train(back, again, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), back.parameters(), strict=True))


def test_it_is_one_file_that_nobody_else_may_read_and_that_is_read_once(beside: str) -> None:
    written(beside)
    [path] = Path(beside).parent.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeptOptimizer(beside).read_into(MAKERS["adamw"](model()))
    assert not KeptOptimizer(beside).read_into(MAKERS["adamw"](model())), "the next life was killed"


def test_a_write_that_was_cut_short_is_removed(beside: str) -> None:
    part = Path(f"{Path(beside).parent}/.{Path(beside).name}.optimizer.77.part")
    part.write_bytes(b"half")
    assert not KeptOptimizer(beside).read_into(MAKERS["adamw"](model())) and not part.exists()


def test_what_is_put_into_an_optimizer_is_a_copy() -> None:
    net = model()
    first, second = MAKERS["adamw"](net), MAKERS["adamw"](model())
    train(net, first, 3, seed=1)
    state = OptimizerState.of(first)
    assert state is not None and state.put_into(second)
    mine = second.state[second.param_groups[0]["params"][0]]["exp_avg"]
    then = mine.clone()
    train(net, first, 1, seed=3)
    assert torch.equal(mine, then) and not torch.equal(mine, first.state[net[0].weight]["exp_avg"])


@pytest.mark.parametrize(
    "other",
    [
        lambda: MAKERS["momentum"](model()),
        lambda: MAKERS["adamw"](model(width=7)),
        lambda: AdamW(model()[0].parameters()),
        lambda: AdamW(model().parameters(), amsgrad=True),
    ],
    ids=["another optimizer", "another model", "fewer parameters", "another switch"],
)
def test_another_optimizer_begins_from_nothing(other: Callable[[], Optimizer], beside: str) -> None:
    written(beside)
    optimizer = other()
    assert not KeptOptimizer(beside).read_into(optimizer) and not optimizer.state


def test_what_is_spoilt_is_not_taken(beside: str) -> None:
    _net, optimizer = written(beside)
    next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
    KeptOptimizer(beside).write(optimizer)
    fresh = MAKERS["adamw"](model())
    assert not KeptOptimizer(beside).read_into(fresh) and not fresh.state


def test_a_fresh_optimizer_and_one_that_knows_odd_things_are_not_written(beside: str) -> None:
    fresh = MAKERS["adamw"](model())
    assert OptimizerState.of(fresh) is None
    net = model()
    odd = MAKERS["adamw"](net)
    train(net, odd, 1, seed=1)
    next(iter(odd.state.values()))["projector"] = object()
    for each in (fresh, odd):
        KeptOptimizer(beside).write(each)
    assert list(Path(beside).parent.iterdir()) == []


def test_where_nothing_may_be_kept_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _net, optimizer = written("")
    assert list(tmp_path.iterdir()) == [] and not KeptOptimizer("").read_into(optimizer)


@pytest.mark.parametrize("damage", ["cut", "empty", "no head"])
def test_a_damaged_file_is_told_and_training_begins_from_nothing(
    damage: str, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    written(beside)
    [path] = Path(beside).parent.iterdir()
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-5], "empty": b"", "no head": raw.replace(b'"about"', b'"other"')}[damage])
    fresh = MAKERS["adamw"](model())
    with caplog.at_level(logging.WARNING):
        assert not KeptOptimizer(beside).read_into(fresh)
    assert "what the optimizer knew when this peer left is lost" in caplog.text
    assert not fresh.state and not path.exists()


def test_a_full_disk_is_told_and_what_was_there_stays(
    beside: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, optimizer = written(beside)
    [path] = Path(beside).parent.iterdir()
    before, usage = path.read_bytes(), shutil.disk_usage(path.parent)
    full: Any = usage._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    train(net, optimizer, 1, seed=4)
    with caplog.at_level(logging.WARNING):
        KeptOptimizer(beside).write(optimizer)
    assert "what the optimizer knows is not kept: 0.00 GB are more than a half" in caplog.text
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
