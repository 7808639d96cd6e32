"""What a model computes, in a few numbers: the same for the same code, other ones for other code, and no trace left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.coordinator.court.alike import distance
from farflung.peer.checks.forward_check import ForwardCheck, folded
from farflung.protocol.round_words import Forward


class Blocks(nn.Module):
    """A transformer in small: what is not stored in it is its activation and its positions."""

    def __init__(self, act: Callable[[Tensor], Tensor], base: float = 10000.0, layers: int = 4) -> None:
        super().__init__()
        self.act, self.base = act, base
        self.embed, self.head = nn.Embedding(300, 32), nn.Linear(32, 300)
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(128, 32) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(32) for _ in range(layers))
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x: Tensor = self.embed(ids)
        turn = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.base ** (-torch.arange(32) / 32)
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            mean = (norm(x) * turn.cos().to(x.dtype)).cumsum(1) / ids.shape[1]
            x = x + self.drop(down(self.act(up(mean))))
        return {"logits": self.head(x)}


def seen(model: nn.Module, *args: Any, **kwargs: Any) -> Forward | None:
    """After the script's first call."""
    check = ForwardCheck(model)
    model(*args, **kwargs)
    return check.read(3)


def ids(rows: int = 4, length: int = 50) -> Tensor:
    return torch.randint(300, (rows, length))


def twins(first: nn.Module, second: nn.Module) -> None:
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("other", [Blocks(nn.functional.relu), Blocks(nn.functional.gelu, base=100.0)])
def test_other_code_of_the_same_shapes_is_seen_whatever_the_batch_is(other: Blocks) -> None:
    mine = Blocks(nn.functional.gelu)
    twins(mine, other)
    a, b = seen(mine, ids(4, 50)), seen(other, ids(7, 33))
    assert a is not None and b is not None and a.form == b.form and a.version == 3
    assert distance(a, b) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float32])
def test_the_same_code_is_the_same_in_other_precision_compiled_and_with_other_threads(
    dtype: torch.dtype,
) -> None:
    mine = Blocks(nn.functional.gelu)
    other = copy.deepcopy(mine).to(dtype)
    a, b = seen(mine, ids(), mask=torch.ones(4, 50)), seen(other, ids(2), mask=torch.ones(2, 50))
    assert a is not None and b is not None and a.form == b.form
    assert b.coarse == (dtype == torch.bfloat16)
    assert distance(a, b) is None
    wrapped = torch.compile(mine, backend="eager")
    c = seen(wrapped, ids(), mask=torch.ones(4, 50))  # type: ignore[arg-type]
    assert c is not None and distance(a, c) is None


def test_a_script_notices_nothing_of_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[2].eval()  # of its own will
    check = ForwardCheck(model)
    model(torch.randn(5, 8))
    before, modes = copy.deepcopy(model.state_dict()), [each.training for each in model.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert check.read(0) is not None
    assert torch.equal(torch.rand(3), expected)
    assert [each.training for each in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_pre_hooks


class Picky(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 5:
            raise RuntimeError("five at a time")
        return super().forward(x)


class Moody(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(1) if not self.training else super().forward(x)


class Endless(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0


@pytest.mark.parametrize("model", [Picky(4, 4), Moody(4, 4), Endless(4, 4)])
def test_what_gives_nothing_to_compare_is_left_alone(model: nn.Module) -> None:
    check = ForwardCheck(model)
    assert check.read(0) is None, "it was not called yet"
    model(torch.randn(5, 4))
    assert check.read(0) is None
    assert check.read(1) is None


def test_an_input_that_cant_be_made_up_is_no_error() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x.value)

    class Held:
        value = torch.randn(5, 4)

    assert seen(Odd(4, 4), Held()) is None
    complex_one = nn.Linear(4, 4, dtype=torch.complex64)
    assert seen(complex_one, torch.randn(5, 4, dtype=torch.complex64)) is None


def test_a_call_in_eval_mode_is_not_the_scripts_first_step() -> None:
    model = nn.Linear(4, 4)
    check = ForwardCheck(model)
    model.eval()(torch.randn(5, 4))
    assert check.read(0) is None
    model.train()(torch.randn(5, 4))
    assert check.read(0) is not None
    assert (
        copy.deepcopy(ForwardCheck(model)._model) is not None
    )  # a copy takes a hook along that does nothing


def test_sums_are_as_far_apart_as_the_values() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000)
    mine, other = folded([values]), folded([values * 1.1])
    assert mine is not None and other is not None
    away = distance(Forward(0, b"f" * 8, False, mine), Forward(0, b"f" * 8, False, other))
    assert away == pytest.approx(0.1 / 1.1, rel=0.01)
    assert folded([]) is None
    assert folded([torch.tensor([float("nan")])]) is None
