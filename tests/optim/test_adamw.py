"""AdamW as the outer step: the same bits in numpy and in torch, and the step that everybody knows."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from farflung.optim.outer import AdamW
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.outer_numbers import AdamWNumbers, StateForm, fp32

Floats = NDArray[np.float32]
LARGEST = np.finfo(np.float32).max
NUMBERS = AdamWNumbers(4e-4, 4e-5, 10, 1000, 0.9, 0.95, 0.1)


def reference(
    numbers: AdamWNumbers, theta: Floats, m: Floats, v: Floats, d: Floats, version: int
) -> list[Floats]:
    """The formula of optim/outer.py's docstring, one numpy scalar operation after the other; rates by fractions."""
    lr, b1, b2 = numbers.lr_at(version), numbers.beta1, numbers.beta2
    f = np.float32
    with np.errstate(all="ignore"):
        g = np.maximum(np.minimum(d, f(2.0**63)), f(-(2.0**63)))
        m = m * f(b1) + g * f(1.0 - b1)
        v = v * f(b2) + g * g * f(1.0 - b2)
        root = np.array([_root(x) for x in v * f(numbers.at(version).scale_v)], f)
        theta = theta * f(1.0 - lr * numbers.weight_decay) - m / (root + f(1e-8)) * f(
            numbers.at(version).rate
        )
    return [theta, m, v]


def _root(x: np.float32) -> np.float32:
    """The fp32 number next to the root, whatever a library's root is like: found with whole numbers."""
    if not np.isfinite(x) or x <= 0:
        return x
    exact = Fraction(float(x))
    guess = np.float32(math.sqrt(float(x)))
    below, above = (np.nextafter(guess, np.float32(to)) for to in (0, np.inf))
    while (Fraction(float(below)) + Fraction(float(guess))) ** 2 / 4 > exact:
        guess, below = below, np.nextafter(below, np.float32(0))
        above = np.nextafter(guess, np.float32(np.inf))
    while np.isfinite(above) and (Fraction(float(above)) + Fraction(float(guess))) ** 2 / 4 < exact:
        guess, above = above, np.nextafter(above, np.float32(np.inf))
    return guess


def numbers_of_all_sizes(count: int, chance: np.random.Generator) -> Floats:
    """Zeros of both signs, denormals, ordinary values, the largest."""
    values = chance.standard_normal(count) * 10.0 ** chance.uniform(-45, 38, count)
    values[chance.random(count) < 0.1] = 0.0
    values[chance.random(count) < 0.1] = -0.0
    values[chance.random(count) < 0.1] = LARGEST
    return np.clip(values, -LARGEST, LARGEST).astype(np.float32)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from((1, 2, 3, 7, 8, 9, 31, 33, 255)),
    st.sampled_from((0.0, 0.5, 0.9, 0.999, 1.0 - 2.0**-53)),
    st.sampled_from((0.0, 0.95, 0.999)),
    st.sampled_from((1, 2, 9, 10, 500, 1000, 10**6)),
)
def test_P1_it_is_the_step_of_the_reference_bit_for_bit(
    seed: int, count: int, beta1: float, beta2: float, version: int
) -> None:
    chance = np.random.default_rng(seed)
    numbers = AdamWNumbers(4e-4, 4e-5, 10, 1000, beta1, beta2, 0.1)
    theta, m, v, d = (numbers_of_all_sizes(count, chance) for _ in range(4))
    v = np.abs(v)
    tensors = [torch.from_numpy(each.copy()) for each in (theta, m, v, d)]
    AdamW(numbers).step(*tensors, version)
    for mine, wanted in zip(tensors, reference(numbers, theta, m, v, d, version), strict=False):
        assert mine.numpy().tobytes() == wanted.tobytes()
    assert tensors[3].numpy().tobytes() == d.tobytes(), "the gradient is only read"


def test_it_is_the_step_of_torch_within_rounding() -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(1001, generator=generator)
    theirs = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.AdamW([theirs], 4e-4, (0.9, 0.95), weight_decay=0.1)
    mine, numbers = (
        [theta, torch.zeros(1001), torch.zeros(1001)],
        AdamWNumbers(4e-4, 4e-4, 0, 9, 0.9, 0.95, 0.1),
    )
    for version in range(1, 201):
        d = torch.randn(1001, generator=generator) * 10.0 ** (version % 7 - 5)
        theirs.grad = d.clone()
        optimizer.step()
        AdamW(numbers).step(mine[0], mine[1], mine[2], d, version)
    assert torch.allclose(theta, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(theta, theirs.detach() + 1e-4, rtol=1e-5, atol=1e-6)


def test_one_huge_value_does_not_make_a_nan_or_stop_its_place_for_ever() -> None:
    numbers = AdamWNumbers(0.01, 0.01, 0, 9, 0.9, 0.95, 0.0)
    theta, m, v = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    AdamW(numbers).step(theta, m, v, torch.tensor([float(LARGEST), 1e25, -float(LARGEST)]), 1)
    assert torch.allclose(theta, torch.tensor([-0.01, -0.01, 0.01])), "no step is longer than the rate"
    for version in range(2, 2001):
        AdamW(numbers).step(theta, m, v, torch.ones(3), version)
        assert torch.isfinite(torch.stack([theta, m, v])).all()
    before = theta.clone()
    AdamW(numbers).step(theta, m, v, torch.ones(3), 2001)
    assert torch.allclose(theta, before - 0.01, rtol=1e-3), "each goes down again where the gradient is 1"


# ---- rates by version ---------------------------------------------------------------------------------------------


def test_the_rate_goes_up_and_then_down_to_the_last() -> None:
    numbers = AdamWNumbers(1.0, 0.25, 4, 10, 0.9, 0.95, 0.1)
    assert [numbers.lr_at(version) for version in range(1, 13)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.25, 0.25]
    )
    constant = AdamWNumbers(1.0, 1.0, 0, 10, 0.9, 0.95, 0.1)
    assert {constant.lr_at(version) for version in range(1, 30)} == {1.0}


@pytest.mark.parametrize("version", [1, 2, 3, 10, 1000, 123_457])
@pytest.mark.parametrize("beta", [0.0, 0.9, 0.95, 0.999])
def test_P1_rates_are_fp32_numbers_next_to_the_true_ones(beta: float, version: int) -> None:
    numbers = AdamWNumbers(4e-4, 4e-4, 0, 9, beta, beta, 0.1)
    by = numbers.at(version)
    assert all(fp32(each) == each for each in by)
    true = 1 / (1 - Fraction(beta) ** version) if version < 2000 else Fraction(1)
    assert by.scale_v == pytest.approx(float(true), rel=1e-7)
    assert by.rate == pytest.approx(float(true) * 4e-4, rel=1e-7)


# ---- run.toml -----------------------------------------------------------------------------------------------------


def manifest(text: str) -> Manifest:
    return Manifest.from_toml(text, "run.toml")


def test_it_reads_its_numbers_of_inner() -> None:
    found = manifest(
        """
        [run]
        rounds = 7
        [inner]
        lr = 0.002
        betas = [0.8, 0.9]
        weight_decay = 0.2
        warmup_steps = 3
        schedule = "linear"
        [outer]
        step = "adamw"
        """
    )
    assert found.outer_numbers == AdamWNumbers(0.002, 0.1 * 0.002, 3, 7, 0.8, 0.9, 0.2)
    assert found.state_form(10) == StateForm(10, 3) and found.state_form(10).size_bytes == 120
    assert Manifest().state_form(10) == StateForm(10, 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[outer]\nstep = "adamw"\nmomentum = 0.9',
            'momentum: step = "adamw" takes betas of \\[inner\\] instead',
        ),
        (
            '[run]\nrounds = 5\n[inner]\nwarmup_steps = 5\nschedule = "linear"\n[outer]\nstep = "adamw"',
            r"\[inner\] warmup_steps: expected less than rounds \(5\)",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        manifest(text)
    assert "\n" not in str(error.value)
