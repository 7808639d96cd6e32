"""Muon's step on one chunk, in numpy: the operations of optim/muon.py, in their order.

Called by: plain_steps.py, for whoever recomputes what a peer did.  AdamW, of all other values, is handed in.
Must not know: which chunk it is, payloads, torch.

Products of matrices are of whole numbers in fp64 below 2^53, so they are exact in every library (optim/muon.py says
why); all other operations are single ones and rounded on their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farflung.protocol.outer_numbers import (
    GRADIENT_MOST,
    MUON_ITERATIONS,
    MUON_LEAST_NORM,
    MUON_ONE,
    MUON_POLYNOMIAL,
    MuonNumbers,
    Tile,
    between,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Parts = tuple[Floats, Floats, Floats]  # parameters, momentum, second moment
f32 = np.float32


def muon(
    numbers: MuonNumbers,
    parts: Parts,
    delta_n: Floats,
    version: int,
    tiles: Sequence[Tile],
    adamw: Callable[[Parts, Floats], Parts],
) -> Parts:
    """The chunk's parts at this version."""
    theta_n, m_n, v_n = (part.copy() for part in parts)
    for first, stop in between(tiles, len(delta_n)):
        there = slice(first, stop)
        old = (theta_n[there], m_n[there], v_n[there])
        theta_n[there], m_n[there], v_n[there] = adamw(old, delta_n[there])
    for tile in tiles:
        there = slice(tile.first, tile.stop)
        keep_m, take_m, decay, rate = (f32(each) for each in numbers.at(version, tile))
        g_n: Floats = delta_n[there].clip(-f32(GRADIENT_MOST), f32(GRADIENT_MOST)) * take_m
        m_n[there] = m_n[there] * keep_m + g_n
        u_n = m_n[there] * keep_m + g_n
        update_n = orthogonal(u_n.reshape(tile.rows, tile.columns)).reshape(-1) * rate
        theta_n[there] = theta_n[there] * decay - update_n
    return theta_n, m_n, v_n


def orthogonal(values: Floats) -> Floats:
    """Of the matrix the one with the same singular vectors and singular values of about 1."""
    wide: Doubles = values.astype(np.float64)
    norm = max(math.sqrt(sum_by_halves((wide * wide).reshape(-1))), MUON_LEAST_NORM)
    is_tall = wide.shape[0] > wide.shape[1]
    x: Doubles = np.rint((wide.T if is_tall else wide) * (MUON_ONE / norm))
    a, b, c = MUON_POLYNOMIAL
    for _ in range(MUON_ITERATIONS):
        square: Doubles = np.rint((x @ x.T) * (1.0 / MUON_ONE))
        polynomial: Doubles = np.rint(square * b + (square @ square) * (c / MUON_ONE))
        x = np.rint(x * a + (polynomial @ x) * (1.0 / MUON_ONE))
    x = x * (1.0 / MUON_ONE) + 0.0
    found: Any = np.ascontiguousarray(x.T if is_tall else x).astype(f32)
    return found  # type: ignore[no-any-return]


def sum_by_halves(values_n: Doubles) -> float:
    """Halves are added to each other until one value is left: the order of the additions is written down here."""
    while len(values_n) > 1:
        half = len(values_n) // 2
        sums_n = values_n[:half] + values_n[half : 2 * half]
        if len(values_n) % 2:
            sums_n[0] += values_n[-1]
        values_n = sums_n
    return float(values_n[0])
