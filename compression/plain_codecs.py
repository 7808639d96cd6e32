"""Every codec's payloads in numpy, both ways: the arithmetic that peers, the court and a replay have in common.  Pure.

Owns: fp32 and bf16, the list of formats, and the way from a payload to whole blocks and back.
Called by: `codec.py`, which knows faster ways to the same bits, and by whoever judges or replays what peers sent.
Must not know: rounds, weights, who sent what, torch.

fp32 is the identity, four bytes a value.  bf16 is its upper half, rounded to nearest with ties to even; values beyond
the largest bf16 become the largest: rounded to infinity, one value would spoil a whole merge.  A payload is refused by
its length and its head before memory is taken for what it holds.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farflung.protocol.errors import FrameError, UserError, Verdict
from farflung.protocol.extensions import CODEC, OWN_NUMBERS_FROM, codec_number, codec_word, loaded

# ---- payload -----------------------------------------------------------------------------------------------
# The head of every encoded chunk: sixteen bytes that say what follows, and the errors of both directions.
#
# Owns: the header's layout, the check of a header against what a round expects, `NonFinite`. Called by: every
# codec. Must not know: tensors' values, peers, rounds, or which codecs exist.
#
#     magic[4]  codec u8  version u8  flags u16  elements u32  block u16  zero u16      little-endian
#
# Everything in it follows from the codec and the number of elements, both of which the round's plan fixes; so
# a payload whose header differs in any byte is refused before memory is taken for it, and the text names the
# difference. The header is for what is read without a plan: a result log, a capture, a newer version's bytes.

Bytes = bytes | bytearray | memoryview

HEADER_BYTES = 16
NUMBER_AT = 4  # where the codec's number stands
MAX_ELEMENTS = 2**31 - 1  # an int32 counts them, on a GPU too

_LAYOUT = struct.Struct("<4sBBHIHH")
_FIELDS = ("magic", "codec", "version", "flags", "elements", "block", "zero")
_MAGIC = b"FFQ\x00"

assert _LAYOUT.size == HEADER_BYTES
# Codes are written as memory holds them.  Torch has no build for a big-endian machine.
assert sys.byteorder == "little"


class NonFinite(ValueError):
    """A vector with NaN or an infinite value, which no codec encodes; `index` is the first one's place."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"value {index} is {value}: only finite values can be encoded")
        self.index = index
        self.value = value


@dataclass(frozen=True, slots=True)
class Format:
    """What tells one codec's payloads from another's; numbers are never given out twice."""

    name: str
    number: int
    version: int
    block: int  # values that share a scale; 0 where there is none

    def header(self, elements: int) -> bytes:
        return _LAYOUT.pack(_MAGIC, self.number, self.version, 0, elements, self.block, 0)


def check_header(payload: Bytes, expected: Format, elements: int, payload_bytes: int) -> None:
    """FrameError unless `payload` has exactly `payload_bytes` and the header of `elements` values."""
    if not 0 <= elements <= MAX_ELEMENTS:
        raise FrameError(Verdict.MALFORMED, f"{expected.name} payload: a chunk of {elements} values")
    length = memoryview(payload).nbytes
    if length >= HEADER_BYTES:
        came = bytes(memoryview(payload).cast("B")[:HEADER_BYTES])
        wanted = expected.header(elements)
        if came != wanted:
            raise FrameError(Verdict.MALFORMED, f"{expected.name} payload: {_difference(came, wanted)}")
    if length != payload_bytes:
        raise FrameError(
            Verdict.MALFORMED,
            f"{expected.name} payload of {length} bytes for {elements} values, not {payload_bytes}",
        )


def _difference(came: bytes, wanted: bytes) -> str:
    for name, got, due in zip(_FIELDS, _LAYOUT.unpack(came), _LAYOUT.unpack(wanted), strict=True):
        if got != due:
            return f"{name} in the header is {got!r}, the round expects {due!r}"
    raise AssertionError("the headers are equal")


# ---- plain blocks ------------------------------------------------------------------------------------------
# The block codecs in numpy: int8, int4, int2, topk and sparse, value for value as their formats say. Pure.
#
# Owns: the steps, levels and codes of these five, the other way and back, and what no payload of theirs may
# hold. `PlainCodec`, which knows the head of a payload, asks for whole blocks only. Must not know: headers,
# chunks, rounds, torch.
#
# A payload is `header | steps u16[blocks] | codes u8[blocks * code_bytes]`. A step is a positive number of 8
# exponent and 8 fraction bits: the middle 16 of the 32 bits of an fp32. With fp16, which is as long, blocks
# above 65504 would overflow and steps under 6e-5, the usual ones of a pseudo-gradient, would lose their
# digits. Nine significant bits also make `code * step` exact, so a decoded value is not rounded at all.
#
# Exactness: a chunk gives the same bytes on every machine (P1), because only these are used: single fp32
# operations that IEEE 754 rounds correctly and that are taken one by one, so that nothing can be fused;
# maxima, which are exact in any order; sums over a tree that is written out; and integers. No step, quotient
# or code that matters can be subnormal, so machines that flush subnormals to zero agree too. kernels.c and
# triton_kernels.py take the same operations.

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Places = NDArray[np.int64]

f32 = np.float32
# A step is the middle 16 of the 32 bits of an fp32: 8 of exponent, 8 of fraction, no sign.
DROPPED_BITS = 15
MIN_STEP = f32(2.0**-125)
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_LEAST_NORMAL = f32(2.0**-126)
_LEAST_NORMAL_BITS = 0x00800000

_INVERSE_TOP = f32(8454660 * 2.0**-30)  # the fp32 next to 1/127
_NO_INT8_CODE = -128
LEVELS = (-127, -88, -67, -50, -37, -24, -11, 0, 11, 20, 31, 42, 55, 72, 91, 126)
assert all((high - low) % 2 for low, high in pairwise(LEVELS))
_INT4_LEVELS = np.array(LEVELS, np.int8)
_INT2_LEVELS = np.array((-17, -5, 5, 17), np.int8)
_INT2_BORDER = f32(11.0)
_INT2_LEAST_STEP = f32(2.0**-100)
_INT2_STEP_OF_RMS = f32(12079596 * 2.0**-27)  # the fp32 next to 0.09
_TOPK_TAKEN = 64
_TOPK_LEVELS = np.array((27, 40, -27, -40), f32)
_TOPK_BORDER = f32(33.5)
_TOPK_STEP_OF_RMS = f32(2.0**-5)


def step_bits(steps_r: Floats) -> NDArray[np.uint16]:
    return (steps_r.view(np.uint32) >> DROPPED_BITS).astype(np.uint16)


def steps_of(bits_r: NDArray[np.uint16]) -> Floats:
    return (bits_r.astype(np.uint32) << DROPPED_BITS).view(f32)


def _max_step_bits(largest_level: int) -> int:
    """Of the largest step by which the largest level still is finite."""
    return int(f32(np.finfo(f32).max / f32(largest_level)).view(np.uint32)) >> DROPPED_BITS


@dataclass(frozen=True)
class BlockFormat:
    """`quantise`: finite fp32 [rows, block] and how many values count in the last row -> steps, codes."""

    block: int
    code_bytes: int  # of one block
    largest_level: int
    may_be_zero: bool  # a step of 0 is a block of zeros
    quantise: Callable[[Floats, int], tuple[Floats, Codes]]
    restore: Callable[[Floats, Codes], Floats]
    refuse_codes: Callable[[Codes], None]
    levels: tuple[int, ...] = ()  # of each code, in steps; none where a code is its own level

    def blocks(self, elements: int) -> int:
        return -(-elements // self.block)

    def refuse_steps(self, bits_r: NDArray[np.uint16]) -> None:
        lowest, highest = int(step_bits(MIN_STEP.reshape(1))[0]), _max_step_bits(self.largest_level)
        valid_r = (bits_r >= lowest) & (bits_r <= highest)
        if self.may_be_zero:
            valid_r |= bits_r == 0
        if not valid_r.all():
            raise FrameError(Verdict.MALFORMED, f"the step of block {int(valid_r.argmin())} is out of range")


def _rounded(steps_r: Floats) -> Floats:
    """The nearest step, ties up."""
    half = 1 << (DROPPED_BITS - 1)
    bits_r = steps_r.view(np.uint32) + np.uint32(half)
    return (bits_r >> DROPPED_BITS << DROPPED_BITS).view(f32)


def _root_mean_square(values_rb: Floats, peaks_r: Floats, counts_r: Floats) -> Floats:
    """Scaled by the power of two below the peak, then summed half to half: one order on every machine."""
    scales_r = (peaks_r.view(np.uint32) & np.uint32(_EXPONENT)).view(f32)
    scales_r = scales_r.clip(f32(2.0**-126), f32(2.0**126))
    work_rb = values_rb * (f32(1) / scales_r)[:, None]
    work_rb *= work_rb
    width = work_rb.shape[1]
    while width > 1:
        width //= 2
        work_rb = work_rb[:, :width] + work_rb[:, width : 2 * width]
    means_r = work_rb[:, 0] / counts_r
    # An fp32 root of a math library may err in the last bit.  That of fp64, even if it errs as well, is close enough to
    # round to the right fp32: no root of an fp32 lies so near to the middle between two.
    roots_r: Floats = np.sqrt(means_r.astype(np.float64)).astype(f32)
    return roots_r * scales_r


# ---- int8: blocks of 256, a step of absmax/127, codes rounded to nearest with ties to even -----------------
#
# A step is rounded to 9 bits, so absmax/step lies within 127.25 and no code needs clamping.  Codes come from a
# multiplication by the separately rounded reciprocal: one division for each block instead of each value.  The error
# is at most half a step, plus the rounding of the product (a 60 000th of that).  Steps do not go below 2^-125:
# smaller values become zeros.


def _int8_codes(values_rb: Floats) -> tuple[Floats, NDArray[np.int8]]:
    steps_r = _rounded(np.maximum(np.abs(values_rb).max(axis=1) * _INVERSE_TOP, MIN_STEP))
    return steps_r, np.rint(values_rb * (f32(1) / steps_r)[:, None]).astype(np.int8)


def _int8_quantise(values_rb: Floats, filled: int) -> tuple[Floats, Codes]:
    steps_r, codes_rb = _int8_codes(values_rb)
    return steps_r, codes_rb.view(np.uint8)


def _int8_restore(steps_r: Floats, codes_rc: Codes) -> Floats:
    return _times_steps(codes_rc.view(np.int8), steps_r)


def _times_steps(levels_rb: NDArray[np.int8], steps_r: Floats) -> Floats:
    values_rb: Floats = levels_rb.astype(f32)
    values_rb *= steps_r[:, None]
    return values_rb


def _int8_refuse(codes_rc: Codes) -> None:
    if (codes_rc.view(np.int8) == _NO_INT8_CODE).any():
        raise FrameError(Verdict.MALFORMED, f"the code {_NO_INT8_CODE} means nothing")


# ---- int4: blocks of 64, sixteen levels that lie closer together near zero, two codes in a byte -----------
#
# The levels are those of NF4 (quantiles of a normal distribution, arXiv:2305.14314), in units of absmax/127 and moved
# by at most one unit, so that neighbours differ by an odd number.  Then every border lies halfway between two
# integers, and the nearest level of a value is the nearest level of its int8 code.  A tie goes the way of the int8
# rounding, to the even code.  0 is a level: what is exactly zero stays so.


def _nearest_nibbles() -> Codes:
    """u8 [256]: the byte of an int8 code -> the level next to it."""
    codes = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
    nearest = np.abs(codes[:, None] - _INT4_LEVELS.astype(np.int32)).argmin(1)
    return np.asarray(nearest, np.uint8)


_NIBBLES = _nearest_nibbles()
# Of each byte the levels of its codes, the lowest bits' first.
_INT4_PAIRS = _INT4_LEVELS[np.arange(256)[:, None] >> np.array([0, 4]) & 15].view(np.int16).reshape(-1)
_INT2_FOURS = _INT2_LEVELS[np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3].view(np.int32).reshape(-1)


def _int4_quantise(values_rb: Floats, filled: int) -> tuple[Floats, Codes]:
    steps_r, codes_rb = _int8_codes(values_rb)
    nibbles_rb = _NIBBLES[codes_rb.view(np.uint8)]
    return steps_r, _joined(nibbles_rb[:, 0::2], nibbles_rb[:, 1::2], bits=4)


def _joined(*parts_rk: Codes, bits: int) -> Codes:
    """u8: the first part in the lowest bits."""
    joined_rk = np.zeros_like(parts_rk[0])
    for place, part_rk in enumerate(parts_rk):
        joined_rk |= part_rk << np.uint8(bits * place)
    return joined_rk


def _int4_restore(steps_r: Floats, codes_rc: Codes) -> Floats:
    return _times_steps(_INT4_PAIRS[codes_rc].view(np.int8), steps_r)


# ---- int2: blocks of 64, levels of -1.53, -0.45, 0.45 and 1.53 times the rms, four codes in a byte ---------
#
# In units of a step of 0.09 rms the levels are -17, -5, 5 and 17.  The borders, -11, 0 and 11, are evenly spaced, so
# a code is the floor of 2 + value / (11 steps), bounded to 0 .. 3.  A value on a border takes the level above it.
# Adding before the floor counts as zero, so as positive, what is less than 2^-23 of a border: a quotient so small may
# be subnormal, and then some machines see its sign and some don't.  A division here, because 1/(11 steps) may be
# subnormal.  No level is zero.  So a block whose step is below 2^-100 is sent with the step 0, which makes all of it
# zero; that bound also puts subnormal values within the 2^-23 above.


def _int2_quantise(values_rb: Floats, filled: int) -> tuple[Floats, Codes]:
    counts_r = np.full(len(values_rb), values_rb.shape[1], f32)
    counts_r[-1] = filled
    steps_r = _root_mean_square(values_rb, np.abs(values_rb).max(axis=1), counts_r)
    steps_r = _bounded_step(steps_r * _INT2_STEP_OF_RMS, int(_INT2_LEVELS[-1]))
    borders_r = np.maximum(steps_r, _INT2_LEAST_STEP) * _INT2_BORDER
    levels_rb = np.floor(values_rb / borders_r[:, None] + f32(2)).clip(f32(0), f32(3)).astype(np.uint8)
    codes_rc = _joined(*(levels_rb[:, start::4] for start in range(4)), bits=2)
    return np.where(steps_r >= _INT2_LEAST_STEP, steps_r, f32(0)), codes_rc


def _bounded_step(steps_r: Floats, largest_level: int) -> Floats:
    top = steps_of(np.array([_max_step_bits(largest_level)], np.uint16))[0]
    bounded_r: Floats = np.minimum(_rounded(steps_r), top)
    return bounded_r


def _int2_restore(steps_r: Floats, codes_rc: Codes) -> Floats:
    return _times_steps(_INT2_FOURS[codes_rc].view(np.int8), steps_r)


# ---- places: ascending ones within a row of 4096, as Elias and Fano write them --------------------------------
#
# First the lowest bits of each, one after the other; then a bit for each place and each possible value of its other
# bits, of which entry i sets the one at i plus that value.  Of 64 places a place takes 8 bits, of 240 it takes 6.07:
# half a bit more than the least.  Bits are counted from the lowest of the first byte.

_ROW = 4096


def _places_bytes(count: int, low_bits: int) -> int:
    return (count * low_bits + count + (_ROW >> low_bits)) // 8


def _places_packed(places_rk: Places, low_bits: int) -> Codes:
    rows, count = places_rk.shape
    bits_rn = np.zeros((rows, 8 * _places_bytes(count, low_bits)), np.uint8)
    low_rkb = places_rk[:, :, None] >> np.arange(low_bits) & 1
    bits_rn[:, : count * low_bits] = low_rkb.reshape(rows, -1)
    np.put_along_axis(bits_rn, count * low_bits + np.arange(count) + (places_rk >> low_bits), 1, 1)
    return np.packbits(bits_rn, axis=1, bitorder="little")


def _places_of(codes_rc: Codes, count: int, low_bits: int) -> Places:
    """i64 [rows, count], as the bits say; FrameError unless they say so many, in order and within the row."""
    bits_rn = np.unpackbits(codes_rc[:, : _places_bytes(count, low_bits)], axis=1, bitorder="little")
    low_rkb = bits_rn[:, : count * low_bits].reshape(-1, count, low_bits).astype(np.int64)
    high_rn = bits_rn[:, count * low_bits :]
    if (np.count_nonzero(high_rn, axis=1) != count).any():
        raise FrameError(Verdict.MALFORMED, f"a row without {count} places")
    at_rk = np.flatnonzero(high_rn).reshape(-1, count) % high_rn.shape[1]
    places_rk: Places = (at_rk - np.arange(count)) << low_bits
    places_rk |= low_rkb @ (1 << np.arange(low_bits))
    if (places_rk[:, -1] >= _ROW).any() or (np.diff(places_rk, axis=1) < 0).any():
        raise FrameError(Verdict.MALFORMED, "places that do not ascend within their row")
    return places_rk


# ---- topk: of each 4096 values the 64 largest, each as a place of 8 bits and a value of 2 bits -------------
#
# Of equal magnitudes the one at the lower place is taken first.  A value is its sign and one of two magnitudes, in
# units of a step of rms/32, where the rms is that of the taken values: 27 and 40, border 33.5, on the border 40.
# Zero can't be said; where fewer than 64 values are normal numbers, the first taken entry is repeated instead, and a
# row without any has the step 0.  A row's 80 bytes: the places, with 6 lowest bits each; then four value codes to the
# byte: entries i, i + 16, i + 32, i + 48, the first in the lowest bits.

_TOPK_LOW_BITS = 6
_TOPK_PLACES = _places_bytes(_TOPK_TAKEN, _TOPK_LOW_BITS)


def _topk_quantise(values_rb: Floats, filled: int) -> tuple[Floats, Codes]:
    row_length = values_rb.shape[1]
    bits_rb = _magnitudes(values_rb)
    places_rk = largest_places(bits_rb, _TOPK_TAKEN)
    present_rk = np.take_along_axis(bits_rb, places_rk, 1) >= _LEAST_NORMAL_BITS
    taken_rk = np.take_along_axis(values_rb, places_rk, 1)
    counts_r = np.maximum(present_rk.sum(axis=1), 1).astype(f32)
    peaks_r = np.abs(values_rb).max(axis=1)
    steps_r = _root_mean_square(np.where(present_rk, taken_rk, f32(0)), peaks_r, counts_r)
    steps_r = _bounded_step(steps_r * _TOPK_STEP_OF_RMS, int(_TOPK_LEVELS[1]))
    steps_r = np.where(steps_r >= MIN_STEP, steps_r, f32(0))
    first_r1 = np.where(present_rk, places_rk, row_length - 1).min(axis=1, keepdims=True)
    places_rk = np.sort(np.where(present_rk, places_rk, first_r1), axis=1)
    taken_rk = np.take_along_axis(values_rb, places_rk, 1)
    large_rk = np.abs(taken_rk) >= (steps_r * _TOPK_BORDER)[:, None]
    # Not `< 0`: of a row without normal numbers an entry may be subnormal, and not all machines see its sign.
    negative_rk = taken_rk <= -_LEAST_NORMAL
    codes_rk = _joined(large_rk.astype(np.uint8), negative_rk.astype(np.uint8), bits=1)
    packed_rq = _joined(*np.split(codes_rk, 4, axis=1), bits=2)
    return steps_r, np.concatenate([_places_packed(places_rk, _TOPK_LOW_BITS), packed_rq], axis=1)


def _magnitudes(values_rb: Floats) -> NDArray[np.int32]:
    """Their bits without the sign: in the same order as the magnitudes."""
    return (values_rb.view(np.uint32) & np.uint32(_MAGNITUDE)).view(np.int32)


def largest_places(bits_rb: NDArray[np.int32], count: int) -> Places:
    """Ascending places of so many largest; of equal ones the first.  A partition finds the least that is taken."""
    row_length = bits_rb.shape[1]
    border_r1 = np.partition(bits_rb, row_length - count, axis=1)[:, row_length - count, None]
    taken_rb = bits_rb >= border_r1
    for row in np.flatnonzero(np.count_nonzero(taken_rb, axis=1) > count):
        ties = np.flatnonzero(bits_rb[row] == border_r1[row])
        surplus = int(np.count_nonzero(taken_rb[row])) - count
        taken_rb[row, ties[len(ties) - surplus :]] = False
    places_rk: Places = (np.flatnonzero(taken_rb) % row_length).reshape(-1, count)
    return places_rk


def _topk_entries(codes_rc: Codes) -> tuple[Places, Places]:
    """u8 [rows, 80] -> places and value codes, i64 [rows, 64] each."""
    packed_rq = codes_rc[:, _TOPK_PLACES:].astype(np.int64)
    codes_rk = np.concatenate([packed_rq >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _places_of(codes_rc, _TOPK_TAKEN, _TOPK_LOW_BITS), codes_rk


def _topk_restore(steps_r: Floats, codes_rc: Codes) -> Floats:
    places_rk, codes_rk = _topk_entries(codes_rc)
    values_rb = np.zeros((len(codes_rc), _ROW), f32)
    np.put_along_axis(values_rb, places_rk, _TOPK_LEVELS[codes_rk] * steps_r[:, None], 1)
    return values_rb


def _topk_refuse(codes_rc: Codes) -> None:
    """A place may come again, but with its own value: which of two a scatter leaves differs by machine."""
    places_rk, codes_rk = _topk_entries(codes_rc)
    if ((np.diff(places_rk, axis=1) == 0) & (np.diff(codes_rk, axis=1) != 0)).any():
        raise FrameError(Verdict.MALFORMED, "two values for one place")


# ---- sparse: of each 4096 values the 240 largest, each as a place of 6 bits and an int8 value ------------------
#
# For results of contributions in topk, most of whose values are zero.  Of equal magnitudes the one at the lower place
# is taken first, zeros too: a row has 240 places, each once.  Values are those of int8, by a step of their own row.  A
# row's 422 bytes: the places, with 4 lowest bits each; the values.

_SPARSE_TAKEN = 240
_SPARSE_LOW_BITS = 4
_SPARSE_PLACES = _places_bytes(_SPARSE_TAKEN, _SPARSE_LOW_BITS)


def _sparse_quantise(values_rb: Floats, filled: int) -> tuple[Floats, Codes]:
    places_rk = largest_places(_magnitudes(values_rb), _SPARSE_TAKEN)
    steps_r, codes_rk = _int8_codes(np.take_along_axis(values_rb, places_rk, 1))
    packed_rc = _places_packed(places_rk, _SPARSE_LOW_BITS)
    return steps_r, np.concatenate([packed_rc, codes_rk.view(np.uint8)], axis=1)


def _sparse_entries(codes_rc: Codes) -> tuple[Places, NDArray[np.int8]]:
    levels_rk = np.ascontiguousarray(codes_rc[:, _SPARSE_PLACES:]).view(np.int8)
    return _places_of(codes_rc, _SPARSE_TAKEN, _SPARSE_LOW_BITS), levels_rk


def _sparse_restore(steps_r: Floats, codes_rc: Codes) -> Floats:
    places_rk, levels_rk = _sparse_entries(codes_rc)
    values_rb = np.zeros((len(codes_rc), _ROW), f32)
    np.put_along_axis(values_rb, places_rk, _times_steps(levels_rk, steps_r), 1)
    return values_rb


def _sparse_refuse(codes_rc: Codes) -> None:
    places_rk, levels_rk = _sparse_entries(codes_rc)
    _int8_refuse(levels_rk.view(np.uint8))
    if (np.diff(places_rk, axis=1) == 0).any():
        raise FrameError(Verdict.MALFORMED, "two values for one place")


def _no_code_is_refused(codes_rc: Codes) -> None:
    """Each pattern of bits is a level."""


FORMATS = {
    "int8": BlockFormat(256, 256, 127, False, _int8_quantise, _int8_restore, _int8_refuse),
    "int4": BlockFormat(64, 32, 127, False, _int4_quantise, _int4_restore, _no_code_is_refused, LEVELS),
    "int2": BlockFormat(64, 16, 17, True, _int2_quantise, _int2_restore, _no_code_is_refused),
    "topk": BlockFormat(_ROW, 80, 40, True, _topk_quantise, _topk_restore, _topk_refuse),
    "sparse": BlockFormat(_ROW, 422, 127, False, _sparse_quantise, _sparse_restore, _sparse_refuse),
}


# ---- plain codecs ------------------------------------------------------------------------------------------

_VALUE_BYTES = {"fp32": 4, "bf16": 2}  # of codecs that know no blocks
# Values that are calculated with at a time, whole blocks of each codec: what operations need between them stays in the
# cache, and is not memory that is new each time.
_TILE = 1 << 16


@dataclass(frozen=True)
class PlainCodec:
    """Every method is a function of its arguments alone."""

    format: Format
    blocks: BlockFormat | None

    @property
    def name(self) -> str:
        return self.format.name

    def payload_bytes(self, elements: int) -> int:
        if self.blocks is None:
            return HEADER_BYTES + _VALUE_BYTES[self.name] * elements
        return HEADER_BYTES + self.blocks.blocks(elements) * (2 + self.blocks.code_bytes)

    def check_head(self, payload: Bytes, elements: int) -> None:
        """FrameError unless length and head are those of so many values; nothing behind the head is read."""
        check_header(payload, self.format, elements, self.payload_bytes(elements))

    def decode(self, payload: Bytes, elements: int) -> Floats:
        self.check(payload, elements)
        return self.restored(payload, elements)

    def check(self, payload: Bytes, elements: int) -> None:
        """FrameError unless this is the payload of so many finite values."""
        self.check_head(payload, elements)
        try:
            if self.blocks is None:
                if not np.isfinite(self.restored(payload, elements)).all():
                    raise FrameError(Verdict.MALFORMED, "NaN or infinite values")
            elif elements:
                bits_r, codes_rc = _parts(self.blocks, payload, elements)
                self.blocks.refuse_steps(bits_r)
                self.blocks.refuse_codes(codes_rc)
        except FrameError as error:
            raise FrameError(error.verdict, f"{self.name} payload: {error}") from None

    def restored(self, payload: Bytes, elements: int) -> Floats:
        """Of a checked payload, to be read; fp32 [elements]."""
        if self.blocks is not None:
            if not elements:
                return np.zeros(0, np.float32)
            bits_r, codes_rc = _parts(self.blocks, payload, elements)
            values_rb = np.empty((len(bits_r), self.format.block), np.float32)
            with np.errstate(all="ignore"):
                for at in _tiles(len(bits_r), self.format.block):
                    values_rb[at] = self.blocks.restore(steps_of(bits_r[at]), codes_rc[at])
            return values_rb.reshape(-1)[:elements]
        if self.name == "fp32":
            return np.frombuffer(payload, np.float32, -1, HEADER_BYTES)
        bits_n = np.frombuffer(payload, np.uint16, -1, HEADER_BYTES).astype(np.uint32)
        bits_n <<= 16
        return bits_n.view(np.float32)

    def encode(self, values: Floats) -> bytes:
        """fp32 [n], all finite; NonFinite otherwise."""
        values_n = np.ascontiguousarray(values, np.float32).reshape(-1)
        finite_n = np.isfinite(values_n)
        if not finite_n.all():
            place = int(finite_n.argmin())
            raise NonFinite(place, float(values_n[place]))
        with np.errstate(all="ignore"):
            parts = self._written(values_n) if self.blocks is None else _blocks_of(self.blocks, values_n)
        return b"".join((self.format.header(len(values_n)), *(part.data for part in parts)))

    def _written(self, values_n: Floats) -> tuple[NDArray[np.generic], ...]:
        if self.name == "fp32":
            return (values_n,)
        return tuple(_bf16_halves(values_n[at].view(np.uint32)) for at in _tiles(len(values_n), 1))


def _tiles(count: int, block: int) -> Iterator[slice]:
    """Of so many blocks."""
    step = _TILE // block
    return (slice(first, first + step) for first in range(0, count, step))


def _bf16_halves(bits_n: NDArray[np.uint32]) -> NDArray[np.uint16]:
    rounded_n = bits_n >> 16
    rounded_n &= 1
    rounded_n += 0x7FFF
    rounded_n += bits_n
    halves_n = rounded_n.view(np.uint16)[1::2].copy()  # the upper ones: memory is little-endian
    halves_n -= halves_n & 0x7FFF == 0x7F80  # rounded to infinity: the largest instead
    return halves_n


def _parts(
    blocks: BlockFormat, payload: Bytes, elements: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Steps, and codes [blocks, code_bytes]."""
    count = blocks.blocks(elements)
    bits_r = np.frombuffer(payload, np.uint16, count, HEADER_BYTES)
    return bits_r, np.frombuffer(payload, np.uint8, -1, HEADER_BYTES + 2 * count).reshape(count, -1)


def _blocks_of(blocks: BlockFormat, values_n: Floats) -> tuple[NDArray[np.generic], ...]:
    """All steps, and then all codes.  What fills no block is padded with zeros."""
    made = []
    for at in _tiles(len(values_n), 1):
        count = blocks.blocks(len(values_n[at]))
        padded_rb = np.zeros((count, blocks.block), np.float32)
        padded_rb.reshape(-1)[: len(values_n[at])] = values_n[at]
        filled = len(values_n[at]) - (count - 1) * blocks.block
        made.append(blocks.quantise(padded_rb, filled))
    return (*(step_bits(steps_r) for steps_r, _ in made), *(codes_rc for _, codes_rc in made))


_NUMBERS = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5, "topk": 6, "sparse": 7}


def _codec(name: str, number: int) -> PlainCodec:
    blocks = FORMATS.get(name)
    return PlainCodec(Format(name, number, version=1, block=blocks.block if blocks else 0), blocks)


CODECS = {name: _codec(name, number) for name, number in _NUMBERS.items()}
_BY_NUMBER = {codec.format.number: codec for codec in CODECS.values()}


# ---- own codecs --------------------------------------------------------------------------------------------
# Codecs of installed packages (protocol/extensions.py): for contributions, in a run that names one. A package writes
# and reads what follows the head, and knows no more of it.


@dataclass(frozen=True)
class OwnCodec(PlainCodec):
    """Of what hostile bytes make of a package's arithmetic nobody need be warned: it has the same bits everywhere."""

    of_package: Any

    def payload_bytes(self, elements: int) -> int:
        length: int = self.of_package.body_bytes(elements)
        return HEADER_BYTES + length

    def restored(self, payload: Bytes, elements: int) -> Floats:
        body = memoryview(payload).cast("B")[HEADER_BYTES:]
        try:
            with np.errstate(all="ignore"):
                values_n: Floats = self.of_package.decode(body, elements)
        except Exception as error:  # outermost of the package's code: what it raises, a sender has chosen
            raise FrameError(Verdict.MALFORMED, f"{type(error).__name__}: {error}"[:200]) from error
        if getattr(values_n, "dtype", None) != np.float32 or values_n.shape != (elements,):
            raise FrameError(Verdict.MALFORMED, f"it does not hold {elements} values")
        return values_n

    def _written(self, values_n: Floats) -> tuple[NDArray[np.generic], ...]:
        return (np.frombuffer(self.of_package.encode(values_n), np.uint8),)


@functools.cache
def _own_codec(word: str) -> OwnCodec:
    """UserError where no package here has it."""
    return OwnCodec(Format(word, codec_number(word), version=1, block=0), None, loaded(CODEC, word))


def codec_named(name: str) -> PlainCodec:
    """UserError for what is neither one of ours nor one of an installed package."""
    return CODECS[name] if name in CODECS else _own_codec(name)


def codec_in(payload: Bytes) -> PlainCodec:
    """The codec that the payload's head names; FrameError if it names none.  Nothing else is checked."""
    head = bytes(memoryview(payload).cast("B")[:HEADER_BYTES])
    codec = _numbered(head[NUMBER_AT]) if len(head) == HEADER_BYTES else None
    if codec is None:
        raise FrameError(Verdict.MALFORMED, f"a payload that begins with {head.hex()}, which names no codec")
    return codec


def _numbered(number: int) -> PlainCodec | None:
    if number < OWN_NUMBERS_FROM:
        return _BY_NUMBER.get(number)
    word = codec_word(number)
    try:
        return _own_codec(word) if word else None
    except UserError:  # a sender chose the number: a package that cannot be used is no reason to end here
        return None


def is_unknown_here(number: int) -> bool:
    """It is of a package that this machine lacks, or cannot use."""
    return number >= OWN_NUMBERS_FROM and _numbered(number) is None


def decode(payload: Bytes, elements: int) -> Floats:
    """By the codec that the payload names."""
    return codec_in(payload).decode(payload, elements)


def encode(codec_name: str, values: Floats) -> bytes:
    return codec_named(codec_name).encode(values)
