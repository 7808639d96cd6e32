"""AdamW as the outer step, exact: the merged result d of a round is taken for the gradient of one large batch.

    g <- d, between -2^63 and 2^63
    m <- b1 m + (1 - b1) g
    v <- b2 v + (1 - b2) g g
    theta <- (1 - lr wd) theta - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)         t: the version that is made

https://arxiv.org/abs/1711.05101.  Called by the outer state for one chunk at a time.  Every operation is rounded on its
own, in this order, to fp32, at peers and in the court alike (P1).  What depends on the version alone comes from
protocol/outer_numbers.py.

Two things are as they are for the sake of equal bits.  The root is taken in fp64 and then rounded, because vector
libraries promise fp32 roots to the last bit but one; so rounded, the root of an fp32 number is the right one as long as
the library is off by less than four of the last places of fp64.  And g is bounded, so that its square is finite: an
infinite v would stop its value for ever, and infinite times 0 is a NaN, whose bits are each machine's own.

`torch.optim.AdamW` computes the same up to rounding, but may fuse, and is therefore not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.protocol.outer_numbers import EPS, GRADIENT_MOST, AdamWNumbers, fp32

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class AdamW:
    numbers: AdamWNumbers

    @property
    def parts(self) -> int:
        return self.numbers.parts

    def step(self, theta_n: Floats, m_n: Floats, v_n: Floats, d_n: Floats, version: int) -> None:
        """In place on theta, m and v, all fp32 [n]; d is the merged result, fp32 [n]; `version` is made by it."""
        theta_n, m_n, v_n, d_n = map(np.asarray, (theta_n, m_n, v_n, d_n))
        by = self.numbers.at(version)
        g_n: Floats = np.clip(d_n, -GRADIENT_MOST, GRADIENT_MOST)
        m_n *= by.keep_m
        m_n += g_n * by.take_m
        v_n *= by.keep_v
        g_n *= g_n
        g_n *= by.take_v
        v_n += g_n
        size_n = np.sqrt((v_n * by.scale_v).astype(np.float64)).astype(np.float32)
        size_n += fp32(EPS)
        update_n = m_n / size_n
        update_n *= by.rate
        theta_n *= by.decay
        theta_n -= update_n
