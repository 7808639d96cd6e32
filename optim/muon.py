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
rounded on its own; coordinator/court/plain_muon.py takes the same ones in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.optim.adamw import AdamW
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


@dataclass(frozen=True)
class Muon:
    numbers: MuonNumbers

    @property
    def parts(self) -> int:
        return self.numbers.parts

    def step(self, chunk: Sequence[Tensor], d_n: Tensor, version: int, tiles: Sequence[Tile]) -> None:
        """In place on the chunk's theta, m and v, by d, the merged result, each fp32 [n]; `version` is made by it."""
        theta_n, m_n, v_n = chunk
        rest = AdamW(self.numbers.rest)
        for first, stop in between(tiles, len(d_n)):
            there = slice(first, stop)
            rest.step(theta_n[there], m_n[there], v_n[there], d_n[there], version)
        for tile in tiles:
            there = slice(tile.first, tile.stop)
            self._step_tile(theta_n[there], m_n[there], d_n[there], version, tile)

    def _step_tile(self, theta_n: Tensor, m_n: Tensor, d_n: Tensor, version: int, tile: Tile) -> None:
        by = self.numbers.at(version, tile)
        g_n = d_n.clamp(-GRADIENT_MOST, GRADIENT_MOST).mul_(by.take_m)
        m_n.mul_(by.keep_m).add_(g_n)
        u_n = m_n.mul(by.keep_m).add_(g_n)
        update_n = orthogonal(u_n.view(tile.rows, tile.columns)).reshape(-1).mul_(by.rate)
        theta_n.mul_(by.decay).sub_(update_n)


def orthogonal(values: Tensor) -> Tensor:
    """Of the matrix, fp32 [rows, columns], the one with the same singular vectors and singular values of about 1."""
    wide = values.to(torch.float64)
    norm = max(math.sqrt(_sum_of(wide.mul(wide).view(-1))), MUON_LEAST_NORM)
    is_tall = wide.shape[0] > wide.shape[1]
    x = (wide.t().contiguous() if is_tall else wide).mul_(MUON_ONE / norm).round_()
    a, b, c = MUON_POLYNOMIAL
    for _ in range(MUON_ITERATIONS):
        square = (x @ x.t()).mul_(1.0 / MUON_ONE).round_()
        fourth = square @ square
        square.mul_(b).add_(fourth.mul_(c / MUON_ONE)).round_()
        more = square @ x
        x.mul_(a).add_(more.mul_(1.0 / MUON_ONE)).round_()
    # A zero below zero is another zero for a hash, and which of the two a sum of zeros is, no library promises.
    x.mul_(1.0 / MUON_ONE).add_(0.0)
    return (x.t().contiguous() if is_tall else x).to(torch.float32)


def _sum_of(values_n: Tensor) -> float:
    """Halves are added to each other until one value is left: the order of the additions is written down here."""
    while len(values_n) > 1:
        half = len(values_n) // 2
        sums_n = values_n[:half] + values_n[half : 2 * half]
        if len(values_n) % 2:
            sums_n[0] += values_n[-1]
        values_n = sums_n
    return float(values_n[0])
