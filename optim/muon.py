"""Muon as the outer step, exact: hidden matrices are stepped along the orthogonal matrix next to their momentum.

    g <- d, between -2^63 and 2^63                          of the whole rows of a matrix that lie in one chunk: a tile
    m <- mu m + (1 - mu) g
    u <- mu m + (1 - mu) g
    theta <- (1 - lr wd) theta - lr 0.2 sqrt(max(rows, columns)) orthogonal(u)

https://kellerjordan.github.io/posts/muon, with steps as long as AdamW's (https://arxiv.org/abs/2502.16982).  All other
values take AdamW's step (adamw.py): embeddings, the last layer, vectors, and rows that reach over the border of a
chunk.  Called by the outer state for one chunk at a time, of which the schema says the tiles; so the state of a chunk
follows from its own results alone, and a matrix that is larger than a chunk is orthogonalised block by block.

`orthogonal` is five Newton-Schulz iterations x <- a x + (b x x' + c x x' x x') x.  A product of matrices in floating
point ends with other bits on every machine, since each library adds in an order of its own.  So the numbers are whole
ones: x is rounded to multiples of 2^-24, and so is what follows from each product.  Products are taken in fp64, where
all whole numbers below 2^53 are exact: no singular value is ever above 1.21 and no row of the polynomial longer than 3,
so that by Cauchy and Schwarz no sum, in whatever order, reaches 8 * 2^48.  Whatever library multiplies, fused or not,
on as many threads as it likes, the bits are the same (P1).  Beside products there are elementary operations only, each
rounded on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.optim.adamw import AdamW, Floats
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

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Muon:
    numbers: MuonNumbers

    @property
    def parts(self) -> int:
        return self.numbers.parts

    def step(self, chunk: Sequence[Floats], d_n: Floats, version: int, tiles: Sequence[Tile]) -> None:
        """In place on the chunk's theta, m and v, by d, the merged result, each fp32 [n]; `version` is made by it."""
        theta_n, m_n, v_n, d_n = map(np.asarray, (*chunk, d_n))
        rest = AdamW(self.numbers.rest)
        for first, stop in between(tiles, len(d_n)):
            there = slice(first, stop)
            rest.step(theta_n[there], m_n[there], v_n[there], d_n[there], version)
        for tile in tiles:
            there = slice(tile.first, tile.stop)
            self._step_tile(theta_n[there], m_n[there], d_n[there], version, tile)

    def _step_tile(self, theta_n: Floats, m_n: Floats, d_n: Floats, version: int, tile: Tile) -> None:
        by = self.numbers.at(version, tile)
        g_n: Floats = np.clip(d_n, -GRADIENT_MOST, GRADIENT_MOST)
        g_n *= by.take_m
        m_n *= by.keep_m
        m_n += g_n
        u_n = m_n * by.keep_m
        u_n += g_n
        update_n = orthogonal(u_n.reshape(tile.rows, tile.columns)).reshape(-1) * by.rate
        theta_n *= by.decay
        theta_n -= update_n


def orthogonal(values: Floats) -> Floats:
    """Of the matrix, fp32 [rows, columns], the one with the same singular vectors and singular values of about 1."""
    wide: Doubles = values.astype(np.float64)
    norm = max(math.sqrt(sum_by_halves((wide * wide).reshape(-1))), MUON_LEAST_NORM)
    is_tall = wide.shape[0] > wide.shape[1]
    x: Doubles = np.rint((wide.T if is_tall else wide) * (MUON_ONE / norm))
    a, b, c = MUON_POLYNOMIAL
    for _ in range(MUON_ITERATIONS):
        square: Doubles = np.rint((x @ x.T) * (1.0 / MUON_ONE))
        polynomial: Doubles = np.rint(square * b + (square @ square) * (c / MUON_ONE))
        x = np.rint(x * a + (polynomial @ x) * (1.0 / MUON_ONE))
    # A zero below zero is another zero for a hash, and which of the two a sum of zeros is, no library promises.
    x = x * (1.0 / MUON_ONE) + 0.0
    found: Floats = np.ascontiguousarray(x.T if is_tall else x).astype(np.float32)
    return found


def sum_by_halves(values_n: Doubles) -> float:
    """Halves are added to each other until one value is left: the order of the additions is written down here."""
    while len(values_n) > 1:
        half = len(values_n) // 2
        sums_n = values_n[:half] + values_n[half : 2 * half]
        if len(values_n) % 2:
            sums_n[0] += values_n[-1]
        values_n = sums_n
    return float(values_n[0])
