"""The outer steps, exact: what a merged pseudo-gradient d does to the parameters.

    nesterov   m <- mu * m + d;  theta <- theta - lr * (d + mu * m)     https://arxiv.org/abs/2311.08105, algorithm 1
    mean       theta <- theta - lr * d                                  with lr = 1 plain averaging
    sparse     the same, for contributions of a few large values, of which each peer keeps the rest back: its error
               feedback is the momentum, and a second one would only delay    https://arxiv.org/abs/2508.15706
    adamw      adamw.py
    muon       muon.py

Chosen by one word, `[outer] step` in run.toml.  Called by the outer state for one chunk at a time, and by whoever
judges or replays what became of it: this is the only place where it is written, and it is pure.  Only elementary fp32
operations, each rounded on its own (no fused multiply-add, no reduction): every machine gets the same bits (P1).
`torch.optim.SGD` computes the first formula but may fuse; it is therefore not used.  Tensors lend their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from farflung.optim.adamw import AdamW, Floats
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
Fused = Callable[[Floats, Floats, Floats, float, float], None]


@dataclass(frozen=True)
class Nesterov:
    lr: float = 0.7
    momentum: float = 0.9
    fused: Fused | None = None  # only what `checked` let through

    @property
    def parts(self) -> int:
        return MOMENTUM_PARTS

    def step(self, theta_n: Floats, m_n: Floats, d_n: Floats) -> None:
        """In place on theta and m, both fp32 [n]; d is the merged pseudo-gradient, fp32 [n]."""
        theta_n, m_n, d_n = map(np.asarray, (theta_n, m_n, d_n))
        mu, lr = fp32(self.momentum), fp32(self.lr)
        if self.fused is not None:
            self.fused(theta_n, m_n, d_n, mu, lr)
            return
        m_n *= mu
        m_n += d_n
        update_n = m_n * mu
        update_n += d_n
        update_n *= lr
        theta_n -= update_n


@dataclass(frozen=True)
class PlainMean:
    """theta <- theta - lr * d: with lr = 1 the weighted mean of what the peers hold.  Buffers always take that."""

    lr: float = 1.0

    @property
    def parts(self) -> int:
        return MOMENTUM_PARTS

    def step(self, theta_n: Floats, m_n: Floats, d_n: Floats) -> None:
        lr, theta_n, d_n = fp32(self.lr), np.asarray(theta_n), np.asarray(d_n)
        theta_n -= d_n if lr == 1.0 else d_n * lr


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


@np.errstate(all="ignore")  # what a hostile result makes of a state has the same bits everywhere
def advance(
    step: OuterStep,
    parts: Sequence[Floats],
    d_n: Floats,
    version: int,
    factor: float = 1.0,
    tiles: Sequence[Tile] = (),
) -> None:
    """Take the step that makes this version, in place on the parts of a chunk's state (StateForm), each fp32 [n].

    `factor`: of the commit, by which d is multiplied: less than 1 where the gradient of a batch is clipped.
    `tiles`: of the chunk, for a step that takes matrices as such.
    """
    if factor != 1.0:
        d_n = np.asarray(d_n) * fp32(factor)
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
    chance = np.random.default_rng(1)
    theta_n, m_n, d_n = (
        (chance.standard_normal(4099) * np.exp2(chance.uniform(-90, 90, 4099))).astype(np.float32)
        for _ in range(3)
    )
    for mu, lr in ((0.9, 0.7), (0.0, 1.0), (1 / 3, 1e-3)):
        plain, other = (theta_n.copy(), m_n.copy()), (theta_n.copy(), m_n.copy())
        Nesterov(lr, mu).step(*plain, d_n)
        Nesterov(lr, mu, fused).step(*other, d_n)
        if any(a.tobytes() != b.tobytes() for a, b in zip(plain, other, strict=True)):
            return None
    return fused
