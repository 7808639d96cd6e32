"""The outer steps, exact: what a merged pseudo-gradient d does to the parameters.

    nesterov   m <- mu * m + d;  theta <- theta - lr * (d + mu * m)     https://arxiv.org/abs/2311.08105, algorithm 1
    mean       theta <- theta - lr * d                                  with lr = 1 plain averaging
    sparse     the same, for contributions of a few large values, of which each peer keeps the rest back: its error
               feedback is the momentum, and a second one would only delay    https://arxiv.org/abs/2508.15706
    adamw      AdamW, below
    muon       Muon for hidden matrices and AdamW for the rest, below
    any other  of an installed package (docs/extend.md)

Chosen by one word, `[outer] step` in run.toml.  Called by the outer state for one chunk at a time, and by whoever
judges or replays what became of it: this is the only place where it is written, and it is pure.  Only elementary fp32
operations, each rounded on its own (no fused multiply-add, no reduction): every machine gets the same bits (P1).
`torch.optim.SGD` computes the first formula but may fuse; it is therefore not used.  Tensors lend their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.protocol.outer_numbers import (
    EPS,
    GRADIENT_MOST,
    LEAST_MOMENTUM,
    MOMENTUM_PARTS,
    MUON_ITERATIONS,
    MUON_LEAST_NORM,
    MUON_ONE,
    MUON_POLYNOMIAL,
    AdamWNumbers,
    MuonNumbers,
    OwnNumbers,
    StepNumbers,
    Tile,
    between,
    fp32,
)

# ---- adamw -------------------------------------------------------------------------------------------------
# AdamW as the outer step, exact: the merged result d of a round is taken for the gradient of one large batch.
#
#     g <- d, between -2^63 and 2^63
#     m <- b1 m + (1 - b1) g
#     v <- b2 v + (1 - b2) g g
#     theta <- (1 - lr wd) theta - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)         t: the version made
#
# https://arxiv.org/abs/1711.05101. Called by the outer state for one chunk at a time. Every operation is
# rounded on its own, in this order, to fp32, at peers and in the court alike (P1). What depends on the
# version alone comes from protocol/outer_numbers.py.
#
# Two things are as they are for the sake of equal bits. The root is taken in fp64 and then rounded, because
# vector libraries promise fp32 roots to the last bit but one; so rounded, the root of an fp32 number is the
# right one as long as the library is off by less than four of the last places of fp64. And g is bounded, so
# that its square is finite: an infinite v would stop its value for ever, and infinite times 0 is a NaN, whose
# bits are each machine's own.
#
# `torch.optim.AdamW` computes the same up to rounding, but may fuse, and is therefore not used.

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


# ---- muon --------------------------------------------------------------------------------------------------
# Muon as the outer step, exact: hidden matrices are stepped along the orthogonal matrix next to their
# momentum.
#
#     g <- d, between -2^63 and 2^63                    of the whole rows of a matrix that lie in one chunk: a tile
#     m <- mu m + (1 - mu) g
#     u <- mu m + (1 - mu) g
#     theta <- (1 - lr wd) theta - lr 0.2 sqrt(max(rows, columns)) orthogonal(u)
#
# https://kellerjordan.github.io/posts/muon, with steps as long as AdamW's (https://arxiv.org/abs/2502.16982).
# All other values take AdamW's step: embeddings, the last layer, vectors, and rows that reach over
# the border of a chunk. Called by the outer state for one chunk at a time, of which the schema says the
# tiles; so the state of a chunk follows from its own results alone, and a matrix that is larger than a chunk
# is orthogonalised block by block.
#
# `orthogonal` is five Newton-Schulz iterations x <- a x + (b x x' + c x x' x x') x. A product of matrices in
# floating point ends with other bits on every machine, since each library adds in an order of its own. So the
# numbers are whole ones: x is rounded to multiples of 2^-24, and so is what follows from each product.
# Products are taken in fp64, where all whole numbers below 2^53 are exact: no singular value is ever above
# 1.21 and no row of the polynomial longer than 3, so that by Cauchy and Schwarz no sum, in whatever order,
# reaches 8 * 2^48. Whatever library multiplies, fused or not, on as many threads as it likes, the bits are
# the same (P1). Beside products there are elementary operations only, each rounded on its own.

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


# ---- outer -------------------------------------------------------------------------------------------------

# (theta, momentum, delta, mu, lr): the same in one pass over memory, in place.
Fused = Callable[[Floats, Floats, Floats, float, float], None]


@dataclass(frozen=True)
class Nesterov:
    lr: float = 0.7
    momentum: float = 0.9
    fused: Fused | None = None  # only what `checked` let through
    start: int = 0  # the versions up to this one are made with LEAST_MOMENTUM, if that is less

    @property
    def parts(self) -> int:
        return MOMENTUM_PARTS

    def momentum_of(self, version: int) -> float:
        """Of the step that makes this version."""
        return min(self.momentum, LEAST_MOMENTUM) if version <= self.start else self.momentum

    def step(self, theta_n: Floats, m_n: Floats, d_n: Floats, version: int) -> None:
        """In place on theta and m, both fp32 [n]; d is the merged pseudo-gradient, fp32 [n]."""
        theta_n, m_n, d_n = map(np.asarray, (theta_n, m_n, d_n))
        mu, lr = fp32(self.momentum_of(version)), fp32(self.lr)
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

    def step(self, theta_n: Floats, m_n: Floats, d_n: Floats, version: int) -> None:
        lr, theta_n, d_n = fp32(self.lr), np.asarray(theta_n), np.asarray(d_n)
        theta_n -= d_n if lr == 1.0 else d_n * lr


@dataclass(frozen=True)
class OwnStep:
    """Of an installed package (protocol/extensions.py), which passed its suite."""

    numbers: OwnNumbers

    @property
    def parts(self) -> int:
        return self.numbers.parts

    def step(self, chunk: Sequence[Floats], d_n: Floats, version: int) -> None:
        """In place on the chunk's theta and moments, by d, the merged result, each fp32 [n]."""
        theta_n, *moments, d_n = map(np.asarray, (*chunk, d_n))
        self.numbers.made().step(theta_n, tuple(moments), d_n, version)


OuterStep = Nesterov | PlainMean | AdamW | Muon | OwnStep


def outer_step_for(numbers: StepNumbers, fused: Fused | None = None) -> OuterStep:
    """The step that takes these numbers, which are the same for all peers."""
    if isinstance(numbers, AdamWNumbers):
        return AdamW(numbers)
    if isinstance(numbers, MuonNumbers):
        return Muon(numbers)
    if isinstance(numbers, OwnNumbers):
        return OwnStep(numbers)
    if numbers.nesterov:
        return Nesterov(numbers.lr, numbers.momentum, fused, numbers.start)
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
    elif isinstance(step, OwnStep):
        step.step(parts, d_n, version)
    else:
        step.step(parts[0], parts[1], d_n, version)


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
        Nesterov(lr, mu).step(*plain, d_n, version=1)
        Nesterov(lr, mu, fused).step(*other, d_n, version=1)
        if any(a.tobytes() != b.tobytes() for a, b in zip(plain, other, strict=True)):
            return None
    return fused
