"""Every tool that takes an optimizer gives the same bits with one in a run, and each of its steps counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from farflung.peer.trainer.run_optimizer import RunSteps
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
    return RunSteps(inner, lambda: None).optimizer


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


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_steps_that_overflow_and_they_are_not_counted(fused: bool, unscales: bool) -> None:
    """Also where a script leaves all to a fused optimizer, whose step the scaler calls all the same."""
    counted: list[str] = []

    def train(model: nn.Module, wrap: Callable[[Optimizer], Optimizer]) -> None:
        inner = Adam(model.parameters(), lr=0.01, fused=fused)
        if wrap is wrapped:
            RunSteps(inner, lambda: counted.append("after"), lambda: counted.append("before"))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            inner.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 3:
                model.weight.grad[0, 0] = torch.inf
            if unscales:
                scaler.unscale_(inner)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(inner)
            scaler.update()
        assert scaler.get_scale() == 2.0**9

    both(train)
    assert counted == ["before", "after"] * (STEPS - 1)


def test_each_step_counts_once_and_after_it() -> None:
    events: list[str] = []
    model = make_model()
    inner = SGD(model.parameters(), lr=0.1)
    inner.register_step_post_hook(lambda opt, args, kwargs: events.append("post"))
    steps = RunSteps(inner, lambda: events.append("run"), lambda: events.append("before"))
    for step in range(2):  # accumulation: two backward calls, one step
        loss_of(model, step).backward()
    inner.step()
    assert events == ["before", "post", "run"] and steps.steps == 1
    steps.end()
    inner.step()
    assert steps.steps == 1 and events[3:] == ["post"], "it is the user's alone again"
    assert RunSteps(inner, lambda: None).steps == 0, "and may join another run"


class Careful(AdamW):
    """As people write them: its step is that of its base, which torch hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Outer(Optimizer):
    """Two as one, as farflung.muon is."""

    def __init__(self, params: Any) -> None:
        first, *rest = params
        self.parts = [SGD([first], 0.1), AdamW(rest, 0.1)]
        super().__init__([group for each in self.parts for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:
        for each in self.parts:
            each.step()


@pytest.mark.parametrize("kind", [Careful, Outer])
def test_steps_within_a_step_are_none_of_their_own(kind: Any) -> None:
    model = make_model()
    AdamW(model.parameters())  # whose class is hooked from here on
    steps = RunSteps(kind(model.parameters()), lambda: None)
    for _ in range(3):
        loss_of(model, 0).backward()
        steps.optimizer.step()
    assert steps.steps == 3


class Bare(Optimizer):
    """A wrapper that never called `Optimizer.__init__`."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_a_wrapper_without_hooks_gets_them() -> None:
    steps = RunSteps(Bare(SGD(make_model().parameters(), 0.1)), lambda: None)
    steps.optimizer.step()
    assert steps.steps == 1


def test_a_step_that_was_broken_off_is_none_and_the_next_one_counts() -> None:
    model = make_model()
    inner = SGD(model.parameters(), lr=1.0)
    steps = RunSteps(inner, lambda: None)
    steps.start_small(10)

    def closure() -> float:
        raise MemoryError

    with pytest.raises(MemoryError):
        inner.step(closure)
    steps.forget_step()  # as run.step and run.batches do
    assert inner.param_groups[0]["lr"] == 1.0 and steps.steps == 0
    inner.step()
    assert steps.steps == 1


def test_a_compiled_model_and_a_compiled_step_count() -> None:
    model = make_model()
    steps = RunSteps(SGD(model.parameters(), lr=0.1), lambda: None)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.ones(2, 6)).sum().backward()
        steps.optimizer.step()
    assert steps.steps == 2


def test_closures_return_their_loss() -> None:
    model = make_model()
    steps = RunSteps(torch.optim.LBFGS(model.parameters(), max_iter=4), lambda: None)
    optimizer = steps.optimizer

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
    assert steps.steps == 2


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="must be a torch Optimizer, not Linear"):
        RunSteps(make_model(), lambda: None)  # type: ignore[arg-type]
    steps = RunSteps(SGD(make_model().parameters(), lr=0.1), lambda: None)
    with pytest.raises(UserError, match="already belongs to a run"):
        RunSteps(steps.optimizer, lambda: None)
