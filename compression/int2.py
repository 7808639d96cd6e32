"""The int2 codec: blocks of 64, levels of -1.53, -0.45, 0.45 and 1.53 times the block's rms, four codes in a byte.

Owns: the levels and their packing.
Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.

In units of a step of 0.09 rms the levels are -17, -5, 5 and 17.  The borders, -11, 0 and 11, are evenly spaced, so a
code is the floor of 2 + value / (11 steps), bounded to 0 .. 3.  A value on a border takes the level above it.  Adding
before the floor counts as zero, so as positive, what is less than 2^-23 of a border: a quotient so small may be
subnormal, and then some machines see its sign and some don't.  A division here, because 1/(11 steps) may be subnormal.
No level is zero.  So a block whose step is below 2^-100 is sent with the step 0, which makes all of it zero; that
bound also puts subnormal values within the 2^-23 above.
Error feedback is needed: a third of the norm is lost each time.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from farflung.compression.blocks import BlockCodec, Kernel, StepRounder, max_step
from farflung.compression.int8 import Int8Kernel
from farflung.compression.payload import Format
from farflung.compression.rms import root_mean_square
from farflung.compression.tiles import fitting, row_peaks, scratch, split, work_for

LEVELS = (-17, -5, 5, 17)
BORDER = 11.0
LEAST_STEP = 2.0**-100
STEP_OF_RMS = 12079596 * 2.0**-27  # the fp32 next to 0.09


class Int2Codec(BlockCodec):
    format = Format("int2", number=5, version=1, block=64)
    code_bytes = 16
    largest_level = LEVELS[-1]
    may_be_zero = True

    def _kernel(self, rows: int, filled: int, device: torch.device) -> Kernel:
        return _Int2Kernel(rows, self.format.block, filled, device)


class _Int2Kernel:
    def __init__(self, rows: int, block: int, filled: int, device: torch.device) -> None:
        self._int8 = Int8Kernel(rows, block, device)
        self._codes_rb = scratch("int8 codes", rows * block, torch.int8, device).view(rows, block)
        self._counts_r = torch.full((rows,), float(block), device=device)
        self._counts_r[-1] = filled
        self._rounder = StepRounder(device)
        self._two = torch.tensor(2.0, device=device)
        self._unpacking = _unpacking(device)

    def quantise(self, values_rb: Tensor, peaks_r: Tensor, steps_r: Tensor, codes_rc: Tensor) -> None:
        row_peaks(values_rb, peaks_r)
        root_mean_square(values_rb, peaks_r, self._counts_r, steps_r)
        self._rounder.round_(steps_r.mul_(STEP_OF_RMS)).clamp_(max=max_step(LEVELS[-1]))
        borders_r1 = steps_r.clamp(min=LEAST_STEP).mul_(BORDER).unsqueeze(1)
        room_tb = work_for(values_rb)
        for tile_tb, borders_t1, int8_tb, codes_tc in split(values_rb, borders_r1, self._codes_rb, codes_rc):
            work_tb = fitting(room_tb, tile_tb)
            torch.div(tile_tb, borders_t1, out=work_tb)
            int8_tb.copy_(work_tb.add_(self._two).floor_().clamp_(0.0, 3.0))
            # One code in each byte; the low byte gathers its neighbour's, then both gather the other two's.
            fours = int8_tb.view(-1).view(torch.int32)
            fours.bitwise_or_(fours >> 6)
            fours.bitwise_or_(fours >> 12)
            codes_tc.view(-1).copy_(fours.bitwise_and_(0xFF))
        steps_r.mul_(steps_r >= LEAST_STEP)

    def restore(self, steps_r: Tensor, codes_rc: Tensor, out_rb: Tensor) -> None:
        places = scratch("places", codes_rc.numel(), torch.int32, codes_rc.device).copy_(codes_rc.view(-1))
        torch.index_select(self._unpacking, 0, places, out=self._codes_rb.view(-1).view(torch.int32))
        self._int8.restore(steps_r, self._codes_rb.view(torch.uint8), out_rb)


@lru_cache(maxsize=8)
def _unpacking(device: torch.device) -> Tensor:
    """i32 [256]: four codes of two bits -> four int8 levels, in order of address."""
    four = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3
    levels = np.array(LEVELS, dtype=np.int8)[four]
    return torch.from_numpy(levels.view(np.int32).reshape(-1)).to(device)
