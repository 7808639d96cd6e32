"""The root mean square of rows, with the same bits on every machine.

Owns: a sum whose order is written out, and the scaling that keeps its squares in range.
Called by: int2, topk.  Must not know: formats, levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.compression.tiles import fitting, split, work_for

_EXPONENT = 0x7F800000
_LEAST, _MOST = 2.0**-126, 2.0**126  # powers of two whose reciprocals are not subnormal


def root_mean_square(values_rb: Tensor, peaks_r: Tensor, counts_r: Tensor, out_r: Tensor) -> None:
    """out = sqrt(sum(values^2) / counts) of each row; a row's length is a power of two.

    Scaled by the power of two below the row's peak, which is exact.  The squares are added half to half: with 64
    values, 32 sums of two, 16 sums of two of those, and so on.  A library's `sum` takes another order on every CPU.
    """
    scales_r = (peaks_r.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(_LEAST, _MOST)
    inverse_r1 = torch.reciprocal(scales_r).unsqueeze(1)
    room_tb = work_for(values_rb)
    for tile_tb, inverse_t1, out_t in split(values_rb, inverse_r1, out_r):
        work_tb = fitting(room_tb, tile_tb)
        torch.mul(tile_tb, inverse_t1, out=work_tb)
        work_tb.mul_(work_tb)
        width = work_tb.shape[1]
        while width > 1:
            width //= 2
            work_tb[:, :width].add_(work_tb[:, width : 2 * width])
        out_t.copy_(work_tb[:, 0])
    # Torch's fp32 root is a math library's, which may err in the last bit.  That of fp64, even if it errs as well, is
    # close enough to round to the right fp32: no root of an fp32 lies so near to the middle between two.
    out_r.copy_(out_r.div_(counts_r).to(torch.float64).sqrt_()).mul_(scales_r)
