"""The outer step: its compiled form is the plain one, bit for bit (the plain one: test_diloco_reference.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farflung.compression.native import outer_step
from farflung.optim.outer import Nesterov, checked


def test_P1_the_compiled_outer_step_gives_the_bits_of_the_plain_one_or_is_not_used() -> None:
    compiled = outer_step()
    if compiled is None:
        pytest.skip("no compiled library on this machine")
    assert checked(compiled) is compiled
    assert checked(None) is None

    def off_by_a_bit(theta_n: Tensor, m_n: Tensor, d_n: Tensor, mu: float, lr: float) -> None:
        m_n.mul_(mu).add_(d_n)
        theta_n.sub_(m_n.mul(mu).add_(d_n).mul_(lr + 1e-7))

    assert checked(off_by_a_bit) is None
    generator = torch.Generator().manual_seed(3)
    theta_n, m_n = torch.randn(10_001, generator=generator), torch.zeros(10_001)
    same_theta_n, same_m_n = theta_n.clone(), m_n.clone()
    for _ in range(5):
        d_n = torch.randn(10_001, generator=generator) * 1e-3
        Nesterov(0.7, 0.9).step(theta_n, m_n, d_n)
        Nesterov(0.7, 0.9, compiled).step(same_theta_n, same_m_n, d_n)
    assert torch.equal(theta_n, same_theta_n) and torch.equal(m_n, same_m_n)
