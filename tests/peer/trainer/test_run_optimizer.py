"""`RunOptimizer`: every tool that takes an optimizer gives the same bits with it as with the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from farflung.peer.trainer.run_optimizer import RunOptimizer
from farflung.protocol.errors import UserError

STEPS = 8
INNER: list[Callable[[Any], Optimizer]] = [
    lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    lambda params: AdamW(params, lr=0.01),
]
SCHEDULERS: list[Callable[[Optimizer], LRScheduler]] = [
    lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.5),
    lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.2, total_steps=STEPS + 1
    ),  # also cycles momentum or betas
]


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    return (model(inputs) - inputs[:, :2]).pow(2).mean()


def plain(inner: Optimizer) -> Optimizer:
    return inner


def wrapped(inner: Optimizer) -> Optimizer:
    return RunOptimizer(inner, lambda: None)


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def both(train: Callable[[nn.Module, Callable[[Optimizer], Optimizer]], object]) -> None:
    models = []
    for wrap in (plain, wrapped):
        models.append(make_model())
        train(models[-1], wrap)
    assert same_bits(*models)
    assert not same_bits(models[0], make_model())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.filterwarnings("error")  # schedulers warn when they believe the optimizer never stepped
def test_schedulers_and_clipping(
    inner: Callable[[Any], Optimizer], scheduler: Callable[[Optimizer], LRScheduler]
) -> None:
    def train(model: nn.Module, wrap: Callable[[Optimizer], Optimizer]) -> None:
        optimizer = wrap(inner(model.parameters()))
        schedule = scheduler(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            optimizer.step()
            schedule.step()

    both(train)


def test_a_scheduler_made_before_the_wrapper_keeps_working() -> None:
    inner = SGD(make_model().parameters(), lr=1.0)
    schedule = StepLR(inner, step_size=1, gamma=0.5)
    optimizer = RunOptimizer(inner, lambda: None)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_plateau_scheduler() -> None:
    optimizer = RunOptimizer(SGD(make_model().parameters(), lr=1.0), lambda: None)
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        schedule.step(1.0)
    assert optimizer.inner.param_groups[0]["lr"] < 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_steps_that_overflow_and_they_are_not_counted(fused: bool) -> None:
    counts = []

    def train(model: nn.Module, wrap: Callable[[Optimizer], Optimizer]) -> None:
        optimizer = wrap(Adam(model.parameters(), lr=0.01, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 3:
                model.weight.grad[0, 0] = torch.inf
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        counts.append(getattr(optimizer, "steps", None))
        assert scaler.get_scale() == 2.0**9

    both(train)
    assert counts == [None, STEPS - 1]


def test_after_step_is_called_once_per_optimizer_step_and_last() -> None:
    events: list[str] = []
    model = make_model()
    optimizer = RunOptimizer(SGD(model.parameters(), lr=0.1), lambda: events.append("run"))
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: events.append("pre"))
    handle = optimizer.register_step_post_hook(lambda opt, args, kwargs: events.append("post"))
    optimizer.inner.register_step_post_hook(lambda opt, args, kwargs: events.append("inner post"))
    for step in range(2):  # accumulation: two backward calls, one step
        loss_of(model, step).backward()
    optimizer.step()
    assert events == ["pre", "post", "inner post", "run"]
    assert optimizer.steps == 1
    handle.remove()
    optimizer.step()
    assert events[4:] == ["pre", "inner post", "run"]


def test_global_hooks_fire_once() -> None:
    fired: list[Optimizer] = []
    optimizer = RunOptimizer(SGD(make_model().parameters(), lr=0.1), lambda: None)
    handle = register_optimizer_step_post_hook(lambda opt, a, k: fired.append(opt))
    try:
        optimizer.step()
    finally:
        handle.remove()
    assert fired == [optimizer.inner]


def test_closures_return_their_loss() -> None:
    model = make_model()
    optimizer = RunOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=4), lambda: None)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
    assert optimizer.steps == 2
    assert RunOptimizer(SGD(model.parameters(), lr=0.1), lambda: None).step() is None


def test_everything_belongs_to_the_inner_optimizer() -> None:
    model, extra = make_model(), nn.Parameter(torch.ones(3))
    inner = AdamW(model.parameters(), lr=0.01)
    optimizer = RunOptimizer(inner, lambda: None)
    assert isinstance(optimizer, Optimizer)
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert len(inner.param_groups) == 2
    loss_of(model, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"].keys() == inner.state_dict()["state"].keys()

    loaded: list[str] = []
    optimizer.register_load_state_dict_post_hook(lambda opt: loaded.append("hook"))
    optimizer.load_state_dict(saved)  # rebinds the inner optimizer's lists: the properties must follow
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert loaded == ["hook"]
    optimizer.param_groups[1]["lr"] = 0.25
    assert inner.param_groups[1]["lr"] == 0.25

    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert repr(optimizer).startswith("RunOptimizer(steps=1, inner=AdamW (")


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="must be a torch Optimizer, not Linear"):
        RunOptimizer(make_model(), lambda: None)  # type: ignore[arg-type]
    optimizer = RunOptimizer(SGD(make_model().parameters(), lr=0.1), lambda: None)
    with pytest.raises(UserError, match="already belongs to a run"):
        RunOptimizer(optimizer, lambda: None)
