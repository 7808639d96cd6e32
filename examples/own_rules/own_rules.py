"""An outer step, a codec and a merge rule that farflung does not have, each in about twenty lines.

    pip install ./examples/own_rules
    farflung simulate run.toml --try outer.step=lion --try round.codec=ternary --try "merge.policy=median merge.audit=0"

Only + - * /, square roots, comparisons and whole numbers: they have the same bits on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Lion:
    """theta <- theta - lr sign(mu m + (1 - mu) d);  m <- 0.99 m + 0.01 d      https://arxiv.org/abs/2302.06675"""

    moments = 1  # vectors kept beside the parameters, zeros at first

    def __init__(self, lr: float = 1e-3, momentum: float = 0.9) -> None:
        self.lr, self.mu = np.float32(lr), np.float32(momentum)

    def step(self, theta_n: Floats, moments: tuple[Floats, ...], d_n: Floats, version: int) -> None:
        (m_n,) = moments
        theta_n -= self.lr * np.sign(self.mu * m_n + (np.float32(1) - self.mu) * d_n)
        m_n *= np.float32(0.99)
        m_n += np.float32(0.01) * d_n


class Ternary:
    """Of each 64 values one scale, their mean size, and of each value -1, 0 or 1: four to a byte, 2.5 bits a value."""

    memory = 1.0  # what is lost is added to the next contribution

    def body_bytes(self, count: int) -> int:
        return -(-count // 64) * 20

    def encode(self, values_n: Floats) -> bytes:
        rows_rb = np.zeros((-(-len(values_n) // 64), 64), np.float32)
        rows_rb.reshape(-1)[: len(values_n)] = values_n
        # Halves are added to each other: the order of the additions is written down.
        sums_rb = np.minimum(np.abs(rows_rb), np.float32(2.0**120))
        while sums_rb.shape[1] > 1:
            sums_rb = sums_rb[:, ::2] + sums_rb[:, 1::2]
        scales_r = sums_rb[:, 0] / np.float32(64)
        signs_rb = np.where(np.abs(rows_rb) < scales_r[:, None], 0, np.sign(rows_rb)).astype(np.int8) + 1
        codes_rc = signs_rb.reshape(-1, 16, 4) @ np.array([1, 4, 16, 64], np.int64)
        return scales_r.tobytes() + codes_rc.astype(np.uint8).tobytes()

    def decode(self, body: memoryview, count: int) -> Floats:
        rows = -(-count // 64)
        scales_r = np.frombuffer(body, np.float32, rows)
        codes_rc = np.frombuffer(body, np.uint8, rows * 16, rows * 4)
        signs_rb = (codes_rc[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(rows, 64)
        if (signs_rb == 3).any() or (scales_r < 0).any():
            raise ValueError("a sign that is none, or a negative scale")
        values_rb = (signs_rb.astype(np.float32) - np.float32(1)) * scales_r[:, None]
        return values_rb.reshape(-1)[:count]


TERNARY = Ternary()


def median(values_mn: Floats, weights_m: Floats) -> Floats:
    """Of each value the one in the middle: what a few members say cannot move it far.  Weights do not count."""
    # A zero below zero equals zero, and which of them comes first no library promises: adding zero leaves one of them.
    ordered_mn = np.sort(values_mn + np.float32(0), axis=0)
    middle = len(ordered_mn) // 2
    if len(ordered_mn) % 2:
        return ordered_mn[middle].copy()
    return ordered_mn[middle - 1] * np.float32(0.5) + ordered_mn[middle] * np.float32(0.5)
