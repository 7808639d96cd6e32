"""The arithmetic of int8 and int4 on a GPU, in Triton: one kernel to encode, one to restore and add, for each codec.

Called by: triton_path.py, which imports this file only where Triton is installed, and uses it only where it gives the
bytes of the plain path.
Must not know: headers of payloads, hosts, devices.

Exactness follows from the rules in plain_codecs.py.  Every floating point operation below rounds once: the launches in
triton_path.py forbid fused operations, `div_rn` is the division that IEEE 754 rounds to nearest (Triton's `/` is not),
and nearest integers come from an addition that leaves them in the lowest bits of the sum.  Maxima are taken over bits,
where NaN and infinity are the largest.

A program takes ROWS blocks.  Steps and codes have room for whole programs, so only values are masked, and only in
the program that holds the last of them: a masked access is not known to be aligned and would move single values.
Loads of codes are told to be as wide as four values are: wider ones would have to be spread over other threads, as
fp32 and through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)
MIN_STEP = tl.constexpr(2.0**-125)
INVERSE_TOP = tl.constexpr(8454660 * 2.0**-30)  # as in int8.py
DROPPED_BITS = tl.constexpr(15)
HALF = tl.constexpr(1 << 14)
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _values(start_at, elements_left, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[rows, block] of fp32, zeros beyond the last."""
    place_rb = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if elements_left >= ROWS * BLOCK:
        values_rb = tl.load(start_at + place_rb)
    else:
        values_rb = tl.load(start_at + place_rb, mask=place_rb < elements_left, other=0.0)
    return values_rb.to(tl.float32)


@triton.jit
def _integers(values_rb, bad_at, steps_at, ROWS: tl.constexpr):
    """Stores the steps, and 1 at `bad_at` where a value is not finite; gives the values in steps, i32 [rows, block]."""
    peaks_r = tl.max(values_rb.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    if tl.max(peaks_r, axis=0) >= INFINITE:
        tl.store(bad_at, 1)
    steps_r = peaks_r.to(tl.float32, bitcast=True) * INVERSE_TOP
    steps_r = tl.where(steps_r > MIN_STEP, steps_r, MIN_STEP)
    bits_r = (steps_r.to(tl.int32, bitcast=True) + HALF) >> DROPPED_BITS
    tl.store(steps_at + tl.arange(0, ROWS), bits_r.to(tl.int16))
    rounded_r = (bits_r << DROPPED_BITS).to(tl.float32, bitcast=True)
    inverse_r = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), rounded_r)
    quotients_rb = values_rb * inverse_r[:, None]
    return (quotients_rb + TO_INTEGER).to(tl.int32, bitcast=True)


@triton.jit
def _steps(steps_at, ROWS: tl.constexpr):
    bits_r = tl.load(steps_at + tl.arange(0, ROWS)).to(tl.int32) & 0xFFFF
    return (bits_r << DROPPED_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _write(values_rb, weight, start_at, elements_left, ADD: tl.constexpr):
    """To `start_at` on: the values, or what is there plus weight times the values, in two roundings."""
    ROWS: tl.constexpr = values_rb.shape[0]
    BLOCK: tl.constexpr = values_rb.shape[1]
    place_rb = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if ADD:
        values_rb = values_rb * weight
    if elements_left >= ROWS * BLOCK:
        if ADD:
            values_rb = tl.load(start_at + place_rb) + values_rb
        tl.store(start_at + place_rb, values_rb)
    else:
        inside_rb = place_rb < elements_left
        if ADD:
            values_rb = tl.load(start_at + place_rb, mask=inside_rb, other=0.0) + values_rb
        tl.store(start_at + place_rb, values_rb, mask=inside_rb)


@triton.jit(do_not_specialize=["elements"])
def int8_encode(values_at, bad_at, steps_at, codes_at, elements, ROWS: tl.constexpr):
    BLOCK: tl.constexpr = 256
    first = tl.program_id(0).to(tl.int64) * ROWS  # times 256 it may pass 2^31 in the last program
    values_rb = _values(values_at + first * BLOCK, elements - first * BLOCK, BLOCK, ROWS)
    codes_rb = _integers(values_rb, bad_at, steps_at + first, ROWS).to(tl.int8)
    place_rb = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(codes_at + first * BLOCK + place_rb, codes_rb)


@triton.jit(do_not_specialize=["elements"])
def int8_restore(steps_at, codes_at, weight, out_at, elements, ROWS: tl.constexpr, ADD: tl.constexpr):
    BLOCK: tl.constexpr = 256
    first = tl.program_id(0).to(tl.int64) * ROWS
    place_rb = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes_rb = tl.load(codes_at + first * BLOCK + tl.max_contiguous(place_rb, [1, 4]))
    values_rb = codes_rb.to(tl.float32) * _steps(steps_at + first, ROWS)[:, None]
    _write(values_rb, weight, out_at + first * BLOCK, elements - first * BLOCK, ADD)


@triton.jit(do_not_specialize=["elements"])
def int4_encode(values_at, bad_at, steps_at, codes_at, nibbles_at, elements, ROWS: tl.constexpr):
    """nibbles: i8 [256], the nibble of each int8 code, at the code's place as a number without sign."""
    BLOCK: tl.constexpr = 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    values_rb = _values(values_at + first * BLOCK, elements - first * BLOCK, BLOCK, ROWS)
    integers_rb = _integers(values_rb, bad_at, steps_at + first, ROWS)
    nibbles_rb = tl.load(nibbles_at + (integers_rb & 0xFF)).to(tl.int32)
    low_rc, high_rc = tl.split(tl.reshape(nibbles_rb, (ROWS, BLOCK // 2, 2)))
    place_rc = tl.arange(0, ROWS)[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(codes_at + first * (BLOCK // 2) + place_rc, (low_rc | (high_rc << 4)).to(tl.int8))


@triton.jit(do_not_specialize=["elements"])
def int4_restore(
    steps_at, codes_at, levels_at, weight, out_at, elements, ROWS: tl.constexpr, ADD: tl.constexpr
):
    """levels: i16 [256], both levels of each byte, the first in the low half."""
    BLOCK: tl.constexpr = 64
    first = tl.program_id(0).to(tl.int64) * ROWS
    place_rc = tl.arange(0, ROWS)[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    bytes_rc = (
        tl.load(codes_at + first * (BLOCK // 2) + tl.max_contiguous(place_rc, [1, 2])).to(tl.int32) & 0xFF
    )
    pairs_rc = tl.load(levels_at + bytes_rc)
    levels_rb = tl.reshape(tl.join(pairs_rc.to(tl.int8), (pairs_rc >> 8).to(tl.int8)), (ROWS, BLOCK))
    values_rb = levels_rb.to(tl.float32) * _steps(steps_at + first, ROWS)[:, None]
    _write(values_rb, weight, out_at + first * BLOCK, elements - first * BLOCK, ADD)
