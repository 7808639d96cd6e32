"""AdamW as the outer step, exact: the merged result d of a round is taken for the gradient of one large batch.

    g <- d, between -2^63 and 2^63
    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) g g
    theta <- (1 - lr wd) theta - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)         t: the version that is made

https://arxiv.org/abs/1711.05101.  Called by the outer state for one chunk at a time.  Every operation is rounded on its
own, in this order, to fp32; coordinator/court/plain_steps.py takes the same ones in numpy, to the same bits (P1).  What
depends on the version alone comes from protocol/outer_numbers.py.

Two things are as they are for the sake of equal bits.  The root is taken in fp64 and then rounded, because vector
libraries promise fp32 roots to the last bit but one; so rounded, the root of an fp32 number is the right one as long as
the library is off by less than four of the last places of fp64.  And g is bounded, so that its square is finite: an
infinite v would stop its value for ever, and infinite times 0 is a NaN, whose bits are each machine's own.

`torch.optim.AdamW` computes the same up to rounding, but may fuse, and is therefore not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.protocol.outer_numbers import EPS, GRADIENT_MOST, AdamWNumbers, fp32


@dataclass(frozen=True)
class AdamW:
    numbers: AdamWNumbers

    @property
    def parts(self) -> int:
        return self.numbers.parts

    def step(self, theta_n: Tensor, m_n: Tensor, v_n: Tensor, d_n: Tensor, version: int) -> None:
        """In place on theta, m and v, all fp32 [n]; d is the merged result, fp32 [n]; `version` is made by it."""
        by = self.numbers.at(version)
        g_n = d_n.clamp(-GRADIENT_MOST, GRADIENT_MOST)
        m_n.mul_(by.keep_m).add_(g_n.mul(by.take_m))
        v_n.mul_(by.keep_v).add_(g_n.mul_(g_n).mul_(by.take_v))
        size_n = v_n.mul(by.scale_v).to(torch.float64).sqrt_().to(torch.float32).add_(fp32(EPS))
        update_n = m_n.div(size_n).mul_(by.rate)
        theta_n.mul_(by.decay).sub_(update_n)
