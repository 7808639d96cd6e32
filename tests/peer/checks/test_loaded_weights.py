"""Weights that are loaded past the run: refused before anything is written, and only in the model that joined."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from farflung.peer.checks.misuse import LoadWatch
from farflung.protocol.errors import UserError


def built() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))


def other_weights() -> dict[str, Tensor]:
    return {name: value + 1 for name, value in built().state_dict().items()}


def values(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def test_what_is_loaded_after_joining_is_refused_before_a_value_is_written() -> None:
    model = built()
    before = values(model)
    LoadWatch(model)
    for load in (
        lambda: model.load_state_dict(other_weights()),
        lambda: model.load_state_dict(other_weights(), assign=True),
        lambda: model[1][0].load_state_dict(nn.Linear(3, 1).state_dict()),  # type: ignore[index]
        lambda: torch.compile(model, backend="eager").load_state_dict(other_weights(), strict=False),  # type: ignore[attr-defined]
    ):
        with pytest.raises(UserError, match="before farflung.join"):
            load()
    assert all(map(torch.equal, before, values(model)))


def test_a_copy_a_pickled_model_and_a_model_whose_run_is_over_may_load_what_they_like() -> None:
    model = built()
    watch = LoadWatch(model)
    copied = copy.deepcopy(model)
    copied.load_state_dict(other_weights())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False).load_state_dict(other_weights())
    with pytest.raises(UserError):
        model.load_state_dict(other_weights())
    watch.end()
    watch.end()
    model.load_state_dict(other_weights())
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


def test_reading_and_training_the_model_are_as_before() -> None:
    model = built()
    LoadWatch(model)
    before = values(model)
    model(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad if parameter.grad is not None else 0.0
            parameter.clamp_(-1.0, 1.0)
    assert not all(map(torch.equal, before, values(model)))
