"""The outer step of DiLoCo, exact: Nesterov momentum on the merged pseudo-gradient.

    m     <- mu * m + d                https://arxiv.org/abs/2311.08105, algorithm 1
    theta <- theta - lr * (d + mu * m)

Called by the outer state for one chunk at a time.  Only elementary fp32 operations, each rounded on its own
(no fused multiply-add, no `alpha=`, no reduction): every machine gets the same bits (P1).  `torch.optim.SGD`
computes the same formula but may fuse; it is therefore not used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch import Tensor


def fp32(value: float) -> float:
    """The nearest fp32 number: what a tensor operation really multiplies by."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class Nesterov:
    lr: float = 0.7
    momentum: float = 0.9

    def step(self, theta_n: Tensor, m_n: Tensor, d_n: Tensor) -> None:
        """In place on theta and m, both fp32 [n]; d is the merged pseudo-gradient, fp32 [n]."""
        mu, lr = fp32(self.momentum), fp32(self.lr)
        m_n.mul_(mu).add_(d_n)
        update_n = m_n.mul(mu).add_(d_n).mul_(lr)
        theta_n.sub_(update_n)


@dataclass(frozen=True)
class PlainMean:
    """theta <- theta - d: the weighted mean of what the peers hold.  Used for buffers."""

    def step(self, theta_n: Tensor, m_n: Tensor, d_n: Tensor) -> None:
        theta_n.sub_(d_n)


OuterStep = Nesterov | PlainMean
