"""The outer steps, exact: what a merged pseudo-gradient d does to the parameters.

    nesterov   m <- mu * m + d;  theta <- theta - lr * (d + mu * m)     https://arxiv.org/abs/2311.08105, algorithm 1
    mean       theta <- theta - lr * d                                  with lr = 1 plain averaging
    sparse     the same, for contributions of a few large values, of which each peer keeps the rest back: its error
               feedback is the momentum, and a second one would only delay    https://arxiv.org/abs/2508.15706
    adamw      adamw.py
    muon       muon.py

Chosen by one word, `[outer] step` in run.toml.  Called by the outer state for one chunk at a time.  Only elementary
fp32 operations, each rounded on its own (no fused multiply-add, no `alpha=`, no reduction): every machine gets the same
bits (P1).  `torch.optim.SGD` computes the first formula but may fuse; it is therefore not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.optim.adamw import AdamW
from farflung.optim.muon import Muon
from farflung.protocol.outer_numbers import (
    MOMENTUM_PARTS,
    AdamWNumbers,
    MuonNumbers,
    StepNumbers,
    Tile,
    fp32,
)

# (theta, momentum, delta, mu, lr): the same in one pass over memory, in place.
Fused = Callable[[Tensor, Tensor, Tensor, float, float], None]


@dataclass(frozen=True)
class Nesterov:
    lr: float = 0.7
    momentum: float = 0.9
    fused: Fused | None = None  # only what `checked` let through

    @property
    def parts(self) -> int:
        return MOMENTUM_PARTS

    def step(self, theta_n: Tensor, m_n: Tensor, d_n: Tensor) -> None:
        """In place on theta and m, both fp32 [n]; d is the merged pseudo-gradient, fp32 [n]."""
        mu, lr = fp32(self.momentum), fp32(self.lr)
        if self.fused is not None:
            self.fused(theta_n, m_n, d_n, mu, lr)
            return
        m_n.mul_(mu).add_(d_n)
        update_n = m_n.mul(mu).add_(d_n).mul_(lr)
        theta_n.sub_(update_n)


@dataclass(frozen=True)
class PlainMean:
    """theta <- theta - lr * d: with lr = 1 the weighted mean of what the peers hold.  Buffers always take that."""

    lr: float = 1.0

    @property
    def parts(self) -> int:
        return MOMENTUM_PARTS

    def step(self, theta_n: Tensor, m_n: Tensor, d_n: Tensor) -> None:
        lr = fp32(self.lr)
        theta_n.sub_(d_n if lr == 1.0 else d_n.mul(lr))


OuterStep = Nesterov | PlainMean | AdamW | Muon


def outer_step_for(numbers: StepNumbers, fused: Fused | None = None) -> OuterStep:
    """The step that takes these numbers, which are the same for all peers."""
    if isinstance(numbers, AdamWNumbers):
        return AdamW(numbers)
    if isinstance(numbers, MuonNumbers):
        return Muon(numbers)
    if numbers.nesterov:
        return Nesterov(numbers.lr, numbers.momentum, fused)
    return PlainMean(numbers.lr)


def advance(
    step: OuterStep,
    parts: Sequence[Tensor],
    d_n: Tensor,
    version: int,
    factor: float = 1.0,
    tiles: Sequence[Tile] = (),
) -> None:
    """Take the step that makes this version, in place on the parts of a chunk's state (StateForm), each fp32 [n].

    `factor`: of the commit, by which d is multiplied in place: less than 1 where the gradient of a batch is clipped.
    `tiles`: of the chunk, for a step that takes matrices as such.
    """
    if factor != 1.0:
        d_n.mul_(fp32(factor))
    if isinstance(step, AdamW):
        theta_n, m_n, v_n = parts
        step.step(theta_n, m_n, v_n, d_n, version)
    elif isinstance(step, Muon):
        step.step(parts, d_n, version, tiles)
    else:
        step.step(parts[0], parts[1], d_n)


def checked(fused: Fused | None) -> Fused | None:
    """`fused`, if it gives the bits of the plain step for values of all sizes; else None."""
    if fused is None:
        return None
    generator = torch.Generator().manual_seed(1)
    theta_n, m_n, d_n = (
        torch.randn(4099, generator=generator) * torch.randn(4099, generator=generator).mul(20).exp()
        for _ in range(3)
    )
    for mu, lr in ((0.9, 0.7), (0.0, 1.0), (1 / 3, 1e-3)):
        plain, other = (theta_n.clone(), m_n.clone()), (theta_n.clone(), m_n.clone())
        Nesterov(lr, mu).step(*plain, d_n)
        Nesterov(lr, mu, fused).step(*other, d_n)
        if not all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(plain, other, strict=True)
        ):
            return None
    return fused
