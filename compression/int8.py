"""The int8 codec: blocks of 256, a step of absmax/127, codes rounded to nearest with ties to even.

Owns: the arithmetic of one tile, which int4 shares.
Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.

A step is rounded to 9 bits, so absmax/step lies within 127.25 and no code needs clamping.  Codes come from a
multiplication by the separately rounded reciprocal: one division for each block instead of each value, and torch
turns the division by a number into this on a GPU but not on a CPU.  The error is at most half a step, plus the
rounding of the product (a 60 000th of that).  Steps do not go below 2^-125: smaller values become zeros.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.blocks import MIN_STEP, BlockCodec, Kernel, StepRounder
from farflung.compression.payload import Format
from farflung.compression.tiles import fitting, row_peaks, scratch, split, work_for
from farflung.protocol.errors import FrameError
from farflung.protocol.verdicts import Verdict

TOP = 127
# The fp32 next to 1/127, written in full so that no conversion is left to a library.
INVERSE_TOP = 8454660 * 2.0**-30
_NO_CODE = -128  # out of range at the largest step


class Int8Codec(BlockCodec):
    format = Format("int8", number=3, version=1, block=256)
    code_bytes = 256
    largest_level = TOP

    def _kernel(self, rows: int, filled: int, device: torch.device) -> Kernel:
        return Int8Kernel(rows, self.format.block, device)

    def _check_codes(self, codes: NDArray[np.uint8]) -> None:
        if int(codes.view(np.int8).min()) == _NO_CODE:
            raise FrameError(Verdict.MALFORMED, f"int8 payload with the code {_NO_CODE}, which means nothing")


class Int8Kernel:
    def __init__(self, rows: int, block: int, device: torch.device) -> None:
        self._inverse_r = scratch("inverse", rows, torch.float32, device)
        self._inverse_top = torch.tensor(INVERSE_TOP, dtype=torch.float32, device=device)
        self._min_step = torch.tensor(MIN_STEP, dtype=torch.float32, device=device)
        self._rounder = StepRounder(device)

    def quantise(self, values_rb: Tensor, peaks_r: Tensor, steps_r: Tensor, codes_rc: Tensor) -> None:
        row_peaks(values_rb, peaks_r)
        torch.mul(peaks_r, self._inverse_top, out=steps_r)
        torch.maximum(steps_r, self._min_step, out=steps_r)
        self._rounder.round_(steps_r)
        torch.reciprocal(steps_r, out=self._inverse_r)
        inverse_r1 = self._inverse_r.unsqueeze(1)
        room_tb = work_for(values_rb)
        for tile_tb, inverse_t1, codes_tc in split(values_rb, inverse_r1, codes_rc.view(torch.int8)):
            work_tb = fitting(room_tb, tile_tb)
            torch.mul(tile_tb, inverse_t1, out=work_tb)
            work_tb.round_()
            codes_tc.copy_(work_tb)

    def restore(self, steps_r: Tensor, codes_rc: Tensor, out_rb: Tensor) -> None:
        out_rb.copy_(codes_rc.view(torch.int8))
        out_rb.mul_(steps_r.unsqueeze(1))
