"""What [outer] asks of every peer, in numbers: the step, its rates by version, the parts of a chunk's state.  Pure.

Made by the manifest; read by whoever takes a step (optim/), recomputes one (coordinator/court/) or holds state.  Rates
are calculated with + - * / alone, in fp64, and then rounded once to fp32: every machine multiplies by the same bits.
Must not know tensors, or which chunk is stepped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from farflung.protocol.errors import FrameError, UserError, Verdict
from farflung.protocol.extensions import OUTER_STEP, WORD, loaded
from farflung.protocol.round_words import Count

# The parts of a chunk's state, one after the other, as files name them.  Which of them a run has, its step says.
PART_NAMES = ("params", "momentum", "second_moment")
MOMENTUM_PARTS, ADAMW_PARTS = 2, 3  # a step without momentum has one of zeros
VALUE_BYTES = 4  # fp32
EPS = 1e-8  # of AdamW, as torch has it
GRADIENT_MOST = 2.0**63  # AdamW takes larger values for this one: their squares would leave fp32

BUILT_IN_STEPS = ("nesterov", "mean", "sparse", "adamw", "muon")
EXACT_STEPS = ("adamw", "muon")  # those that take what is merged for the gradient of one large batch

# Of Muon, as torch has them: the polynomial of a Newton-Schulz iteration, how often it is taken, the least length that
# a matrix is divided by, and how long a value of the update is for that of AdamW.
MUON_POLYNOMIAL, MUON_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
MUON_LEAST_NORM, MUON_RMS = 1e-7, 0.2
MUON_ONE = 2.0**24  # one, in its fixed-point numbers
MUON_MOMENTUM = 0.95

# Of Nesterov's step where nobody chose one: with 0.7 as the rate, each round moves the model once as far as it says.
LEAST_MOMENTUM = 0.3

Number = Annotated[float, Meta(ge=0, le=10)]  # as run.toml bounds them, so that no rate leaves fp32
Decay = Annotated[float, Meta(ge=0, lt=1)]


def fp32(value: float) -> float:
    """The nearest fp32 number: what a tensor operation really multiplies by."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


class OuterNumbers(NamedTuple):
    """Of the steps with a momentum or none: no "auto" is left in it."""

    nesterov: bool  # else theta <- theta - lr * d, without momentum
    lr: float
    momentum: float
    start: int = 0  # the versions up to this one are made with less momentum

    @property
    def parts(self) -> int:
        """Of a chunk's state."""
        return MOMENTUM_PARTS


class AdamWFactors(NamedTuple):
    """What the values of one version are multiplied by, each an fp32 number."""

    keep_m: float
    take_m: float
    keep_v: float
    take_v: float
    scale_v: float  # 1 / (1 - beta2^version)
    decay: float  # 1 - lr * weight_decay
    rate: float  # lr / (1 - beta1^version)


class AdamWNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[outer] step = "adamw"`, with what it reads of [inner]."""

    lr: Number
    last_lr: Number  # at the run's last round
    warmup: Count  # versions
    rounds: Count
    beta1: Decay
    beta2: Decay
    weight_decay: Number

    @property
    def parts(self) -> int:
        """Of a chunk's state."""
        return ADAMW_PARTS

    def lr_at(self, version: int) -> float:
        """Up from 0 over the warm-up; then constant, or straight to `last_lr` at the last round."""
        if version < self.warmup:
            return self.lr * version / self.warmup
        if self.last_lr == self.lr or self.rounds <= self.warmup:
            return self.lr
        gone = (min(version, self.rounds) - self.warmup) / (self.rounds - self.warmup)
        return self.lr + (self.last_lr - self.lr) * gone

    def at(self, version: int) -> AdamWFactors:
        """Of the step that makes this version; the first one makes version 1."""
        lr = self.lr_at(version)
        return AdamWFactors(
            keep_m=fp32(self.beta1),
            take_m=fp32(1.0 - self.beta1),
            keep_v=fp32(self.beta2),
            take_v=fp32(1.0 - self.beta2),
            scale_v=fp32(1.0 / (1.0 - _power(self.beta2, version))),
            decay=fp32(1.0 - lr * self.weight_decay),
            rate=fp32(lr / (1.0 - _power(self.beta1, version))),
        )


class Tile(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Whole rows of a matrix that lie in one chunk, one after the other."""

    first: Count  # of the chunk's values
    rows: Annotated[int, Meta(ge=1)]
    columns: Annotated[int, Meta(ge=1)]

    @property
    def stop(self) -> int:
        return self.first + self.rows * self.columns


def between(tiles: Sequence[Tile], elements: int) -> Iterator[tuple[int, int]]:
    """First and stop of the values of a chunk of so many that are in none of its tiles, which are in their order."""
    at = 0
    for tile in tiles:
        if at < tile.first:
            yield at, tile.first
        at = tile.stop
    if at < elements:
        yield at, elements


class MuonFactors(NamedTuple):
    """What the values of one tile are multiplied by at one version, each an fp32 number."""

    keep_m: float
    take_m: float
    decay: float  # 1 - lr * weight_decay
    rate: float  # lr * 0.2 * sqrt(the longer side): as long a step as AdamW's


class MuonNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """`[outer] step = "muon"`: of hidden matrices, and AdamW's of all other values."""

    rest: AdamWNumbers
    momentum: Decay

    @property
    def parts(self) -> int:
        """Of a chunk's state, in which the second moment of a matrix's values stays zero."""
        return self.rest.parts

    def at(self, version: int, tile: Tile) -> MuonFactors:
        lr, side = self.rest.lr_at(version), max(tile.rows, tile.columns)
        return MuonFactors(
            keep_m=fp32(self.momentum),
            take_m=fp32(1.0 - self.momentum),
            decay=fp32(1.0 - lr * self.rest.weight_decay),
            rate=fp32(lr * (MUON_RMS * math.sqrt(side))),  # IEEE 754 says every bit of a root
        )


def _power(base: float, exponent: int) -> float:
    """By multiplications in one written order: a library's `pow` may end a bit elsewhere on another machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class OwnNumbers(Struct, frozen=True, forbid_unknown_fields=True):
    """A step of an installed package (extensions.py).  What is None, the package chooses."""

    word: Annotated[str, Meta(max_length=40, pattern=WORD)]
    lr: Number | None
    momentum: Decay | None

    def made(self) -> Any:
        """UserError where no package here has it, or where it knows no such number."""
        make = loaded(OUTER_STEP, self.word)
        given = {name: at for name, at in (("lr", self.lr), ("momentum", self.momentum)) if at is not None}
        try:
            return make(**given)
        except Exception as error:  # outermost of the package's code, given a host's numbers
            written = ", ".join(f"{name} = {at:g}" for name, at in given.items())
            raise UserError(f'[outer] step: "{self.word}" does not take {written}: {error}') from error

    @property
    def parts(self) -> int:
        """Of a chunk's state."""
        moments: int = loaded(OUTER_STEP, self.word).moments
        return 1 + moments


StepNumbers = OuterNumbers | AdamWNumbers | MuonNumbers | OwnNumbers


def outer_numbers(
    step: str, lr: float | str, momentum: float | str, rounds: int, start: int = 0
) -> OuterNumbers:
    """What `[outer]` of a run of so many rounds asks for, with a step other than AdamW and Muon.  `start`: so many of
    them have shorter periods: where nobody chose a momentum, they have the least."""
    nesterov = step == "nesterov"
    usual = 0.7 if nesterov else 1.0
    chosen = not (nesterov and isinstance(momentum, str))
    mu = _momentum_for(rounds) if isinstance(momentum, str) else momentum
    rate = usual if isinstance(lr, str) else lr
    return OuterNumbers(nesterov, rate, mu if nesterov else 0.0, 0 if chosen else start)


def _momentum_for(rounds: int) -> float:
    """A momentum that remembers ten rounds (0.9) of 100, and fewer of a shorter run: with the square, down to 0.3.

    In a run of 30 rounds a momentum of 0.9 still pushes where the first rounds went while the inner rate is already
    falling; of 100, less than 0.9 is too slow (docs/learning.md has the measurements of both).
    """
    return min(0.9, max(LEAST_MOMENTUM, 1.0 - 1000.0 / rounds**2))


@dataclass(frozen=True)
class StateForm:
    """How one chunk of the outer state lies in memory, on the line and on disk: its parts, one after the other.

    The first part are the parameters.  Where all others are zeros, as when a run begins, they need not be sent.
    """

    elements: int  # of a chunk
    parts: int

    @property
    def part_bytes(self) -> int:
        return VALUE_BYTES * self.elements

    @property
    def size_bytes(self) -> int:
        return self.part_bytes * self.parts

    @property
    def names(self) -> tuple[str, ...]:
        return PART_NAMES[: self.parts]

    def whole(self, piece: bytes | bytearray | memoryview) -> bytes:
        """With the zeros that were left out.  FrameError for what is no state of a chunk."""
        length = memoryview(piece).nbytes
        if length not in (self.size_bytes, self.part_bytes):
            told = f"a state chunk of {length} bytes, neither {self.size_bytes} nor {self.part_bytes}"
            raise FrameError(Verdict.MALFORMED, told)
        return bytes(piece) + bytes(self.size_bytes - length)


CLIP_SMALL = 1e-6  # as torch has it


def factor_of(squares: Sequence[float], clip: float) -> float:
    """By what a batch's gradient is multiplied, so that it is no longer than `clip`: what
    torch.nn.utils.clip_grad_norm_ multiplies by.  `squares`: of the lengths of all its parts."""
    norm = math.sqrt(total(squares))
    return min(1.0, fp32(clip / (norm + CLIP_SMALL))) if math.isfinite(norm) else 0.0


def total(squares: Sequence[float]) -> float:
    """Of the chunks of a stage, or of all stages: rounded once, so in any order."""
    try:
        return math.fsum(squares)
    except OverflowError:  # of lengths that nobody else holds: no result is so long
        return math.inf
