"""The outer steps: what each of them keeps to; and that the compiled Nesterov step is the plain one, bit for bit.

A whole run against plain torch: test_diloco_reference.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from farflung.compression.native import outer_step
from farflung.optim.outer import (
    AdamW,
    Floats,
    Nesterov,
    OuterStep,
    PlainMean,
    advance,
    checked,
    outer_step_for,
)
from farflung.optim.recipes import ahead, momentum_rate
from farflung.protocol.outer_numbers import AdamWNumbers, outer_numbers


def test_P1_the_compiled_outer_step_gives_the_bits_of_the_plain_one_or_is_not_used() -> None:
    compiled = outer_step()
    if compiled is None:
        pytest.skip("no compiled library on this machine")
    assert checked(compiled) is compiled
    assert checked(None) is None

    def off_by_a_bit(theta_n: Floats, m_n: Floats, d_n: Floats, mu: float, lr: float) -> None:
        m_n[:] = m_n * mu + d_n
        theta_n -= (m_n * mu + d_n) * (lr + 1e-7)

    assert checked(off_by_a_bit) is None
    generator = torch.Generator().manual_seed(3)
    theta_n, m_n = torch.randn(10_001, generator=generator), torch.zeros(10_001)
    same_theta_n, same_m_n = theta_n.clone(), m_n.clone()
    for _ in range(5):
        d_n = torch.randn(10_001, generator=generator) * 1e-3
        Nesterov(0.7, 0.9).step(theta_n, m_n, d_n, VERSION)
        Nesterov(0.7, 0.9, compiled).step(same_theta_n, same_m_n, d_n, VERSION)
    assert torch.equal(theta_n, same_theta_n) and torch.equal(m_n, same_m_n)


# ---- what every outer step keeps to -----------------------------------------------------------------------------

STEPS = {
    "nesterov": outer_step_for(outer_numbers("nesterov", 0.7, 0.9, 100)),
    "nesterov, at the start": outer_step_for(outer_numbers("nesterov", "auto", "auto", 100, start=40)),
    "nesterov, auto": outer_step_for(outer_numbers("nesterov", "auto", "auto", 40)),
    "mean": outer_step_for(outer_numbers("mean", "auto", "auto", 40)),
    "mean, slow": outer_step_for(outer_numbers("mean", 0.3, "auto", 40)),
    "sparse": outer_step_for(outer_numbers("sparse", "auto", "auto", 40)),
    "adamw": outer_step_for(AdamWNumbers(0.05, 0.0, 3, 40, 0.9, 0.95, 0.1)),
}
# adamw's own formula is in test_adamw.py.
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
other_steps = pytest.mark.parametrize(
    "step", [step for step in STEPS.values() if not isinstance(step, AdamW)]
)
VERSION = 5


def values(seed: int, count: int = 257) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta, m, d = (torch.randn(count, generator=generator) * 10.0 ** (i - 1) for i in range(3))
    return theta, m, d


def state_and_d(step: OuterStep, seed: int) -> tuple[list[Tensor], Tensor]:
    """The parts that the step needs, and a pseudo-gradient."""
    theta, m, d = values(seed)
    return [theta, m, m.abs()][: step.parts], d


def as_numpy(step: OuterStep, theta: Tensor, m: Tensor, d: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The formula in another library, each operation rounded to fp32 on its own."""
    assert not isinstance(step, AdamW)
    t, v, x = theta.numpy().copy(), m.numpy().copy(), d.numpy()
    lr = np.float32(step.lr)
    if isinstance(step, PlainMean):
        return t - lr * x, v
    mu = np.float32(step.momentum_of(VERSION))
    v = mu * v + x
    return t - lr * (mu * v + x), v


def same_bits(a: Tensor, b: np.ndarray) -> bool:
    return a.numpy().tobytes() == b.astype(np.float32).tobytes()


@other_steps
def test_P1_the_bits_are_those_of_separately_rounded_operations(step: OuterStep) -> None:
    theta, m, d = values(1)
    expected = as_numpy(step, theta, m, d)
    advance(step, (theta, m), d, VERSION)
    assert same_bits(theta, expected[0]) and same_bits(m, expected[1])


@every_step
def test_P1_chunk_by_chunk_is_the_same_as_all_at_once(step: OuterStep) -> None:
    (whole, d), (pieces, _) = state_and_d(step, 2), state_and_d(step, 2)
    advance(step, whole, d, VERSION)
    for part in (slice(0, 3), slice(3, 100), slice(100, 257)):
        advance(step, [each[part] for each in pieces], d[part], VERSION)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


@every_step
def test_the_pseudo_gradient_is_only_read(step: OuterStep) -> None:
    state, d = state_and_d(step, 3)
    before = d.clone()
    advance(step, state, d, VERSION)
    assert torch.equal(d, before)


@every_step
def test_where_nothing_was_ever_learned_nothing_moves(step: OuterStep) -> None:
    (theta, *moments), d = state_and_d(step, 4)
    before = theta.clone()
    advance(step, [theta, *(each.zero_() for each in moments)], d.zero_(), VERSION)
    decay = step.numbers.at(VERSION).decay if isinstance(step, AdamW) else 1.0
    assert torch.equal(theta, before * decay) and not any(each.any() for each in moments)


@every_step
def test_it_goes_the_way_that_was_learned(step: OuterStep) -> None:
    """A quadratic bowl, whose pseudo-gradient points away from its bottom: every step ends near it."""
    state = [torch.full((4,), 3.0), *(torch.zeros(4) for _ in range(step.parts - 1))]
    constant = replace(step.numbers, last_lr=step.numbers.lr) if isinstance(step, AdamW) else None
    for version in range(1, 301):
        advance(AdamW(constant) if constant else step, state, state[0] * 0.05, version)
    assert state[0].abs().max() < 0.05


def test_plain_averaging_ends_where_the_peers_are_on_average() -> None:
    anchor = torch.tensor([1.0, 2.0])
    local = [torch.tensor([0.0, 4.0]), torch.tensor([2.0, -2.0])]
    step = outer_step_for(outer_numbers("mean", "auto", "auto", 10))
    advance(step, (anchor, torch.zeros(2)), sum(anchor - each for each in local) / 2, VERSION)  # type: ignore[arg-type]
    assert anchor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rounds", "mu"), [(1, 0.3), (20, 0.3), (40, 0.375), (50, 0.6), (100, 0.9), (9999, 0.9)]
)
def test_short_runs_remember_less(rounds: int, mu: float) -> None:
    step = outer_step_for(outer_numbers("nesterov", "auto", "auto", rounds))
    assert isinstance(step, Nesterov) and step.momentum == pytest.approx(mu)
    named = outer_step_for(outer_numbers("nesterov", "auto", 0.9, rounds))
    assert isinstance(named, Nesterov) and named.momentum == 0.9


def test_while_periods_are_short_there_is_little_momentum_unless_a_host_has_chosen_one() -> None:
    step = outer_step_for(outer_numbers("nesterov", "auto", "auto", 100, start=40))
    assert isinstance(step, Nesterov)
    assert [step.momentum_of(version) for version in (1, 40, 41, 100)] == [0.3, 0.3, 0.9, 0.9]
    chosen = outer_step_for(outer_numbers("nesterov", "auto", 0.8, 100, start=40))
    assert isinstance(chosen, Nesterov) and chosen.momentum_of(1) == 0.8
    assert outer_numbers("mean", "auto", "auto", 100, start=40).start == 0
    assert momentum_rate(step, 40) == pytest.approx(0.7 * 0.09) and momentum_rate(step, 41) > 0.5


# ---- where a peer trains on: optim/recipes.py
# -----------------------------------------------------------------------


@every_step
def test_ahead_is_where_a_peer_stands_and_what_the_momentum_alone_will_do(step: OuterStep) -> None:
    theta, m, owed = values(1)
    before = theta.clone(), m.clone(), owed.clone()
    there = ahead(momentum_rate(step, VERSION), theta, m, owed, theta.numel())
    assert all(torch.equal(a, b) for a, b in zip((theta, m, owed), before, strict=True)), "all are only read"
    if not isinstance(step, AdamW):
        step.step(theta, m, torch.zeros_like(m), VERSION)
        assert torch.allclose(there, theta - owed, rtol=1e-5, atol=1e-3)  # values are up to some dozens
    if isinstance(step, PlainMean | AdamW):
        assert torch.equal(there, before[0] - owed), "where the peer stands"


def test_buffers_know_no_momentum_and_stay() -> None:
    theta, m, owed = values(1)
    rate = momentum_rate(STEPS["nesterov"], VERSION)
    there = ahead(rate, theta, m, owed, 200)
    assert torch.equal(there[200:], theta[200:] - owed[200:])
    assert torch.equal(there[:200], ahead(rate, theta, m, owed, 999)[:200])
    assert torch.equal(ahead(rate, theta, m, owed, 0), theta - owed)
