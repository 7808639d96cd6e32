"""The root mean square of rows, with the same bits on every machine.

Owns: a sum whose order is written out, and the scaling that keeps its squares in range.
Called by: int2, topk.  Must not know: formats, levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_LEAST, _MOST = 2.0**-126, 2.0**126  # powers of two whose reciprocals are not subnormal


def root_mean_square(values_rb: Tensor, peaks_r: Tensor, counts_r: Tensor, work_rb: Tensor) -> Tensor:
    """sqrt(sum(values^2) / counts) [rows] of rows whose length is a power of two; `work_rb` is overwritten.

    Scaled by the power of two below the row's peak, which is exact.  The squares are added half to half: with 64
    values, 32 sums of two, 16 sums of two of those, and so on.  A library's `sum` takes another order on every CPU.
    """
    scales_r = (peaks_r.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(_LEAST, _MOST)
    torch.mul(values_rb, torch.reciprocal(scales_r).unsqueeze(1), out=work_rb)
    work_rb.mul_(work_rb)
    width = work_rb.shape[1]
    while width > 1:
        width //= 2
        work_rb[:, :width].add_(work_rb[:, width : 2 * width])
    return torch.sqrt_(torch.div(work_rb[:, 0], counts_r)).mul_(scales_r)
