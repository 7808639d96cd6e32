"""An optimizer that does not train this model, or not from where the run puts it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import farflung
from farflung.peer.checks.misuse import refuse_other_parameters
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.errors import UserError


def model_of_two() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def test_an_optimizer_of_another_model_is_refused_before_an_agent_starts() -> None:
    model = model_of_two()
    old = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(UserError, match="the optimizer has no parameter of this model: make it of"):
        farflung.join("farflung://not.looked.at", model, old)


@pytest.mark.parametrize("some", [lambda m: m.parameters(), lambda m: m[2].parameters()])
def test_one_that_trains_all_of_it_or_a_part_is_not(some: Any) -> None:
    model = model_of_two()
    refuse_other_parameters(model, torch.optim.AdamW(some(model)))
    refuse_other_parameters(nn.DataParallel(model), torch.optim.SGD(some(model)))


def test_a_model_in_which_nothing_trains_is_told_so_elsewhere() -> None:
    refuse_other_parameters(
        model_of_two().requires_grad_(False), torch.optim.SGD(nn.Linear(1, 1).parameters())
    )


class ScheduleFree(Optimizer):
    """As schedule-free SGD does: z takes the steps, and the parameters lie between it and their mean."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, 0.1)


def steps(optimizer: Optimizer, model: nn.Module, count: int) -> None:
    draw = torch.Generator().manual_seed(2)
    for _ in range(count):
        rows: Tensor = torch.randn(4, 6, generator=draw)
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_that_steps_from_a_copy_of_its_own_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of_two()
    optimizer = RunSteps(ScheduleFree(model.parameters(), 1e-3), lambda: None).optimizer
    steps(optimizer, model, 1)
    assert not caplog.text
    steps(optimizer, model, 5)
    assert caplog.text.count("the optimizer seems to keep a copy of the parameters ('z' of its state)") == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lr": 1e-3, "amsgrad": True}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        ("Adagrad", {"lr": 1e-2}),
        ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}),
        ("NAdam", {"lr": 1e-3}),
        ("Adadelta", {}),
        ("Rprop", {}),
    ],
)
def test_moments_are_no_copies(name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = model_of_two()
    made: Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    steps(RunSteps(made, lambda: None).optimizer, model, 5)
    assert not caplog.text, caplog.text
