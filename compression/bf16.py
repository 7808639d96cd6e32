"""The bf16 codec: the upper half of fp32, rounded to nearest with ties to even.

Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.

Values beyond the largest bf16 become the largest: rounded to infinity, one value would spoil a whole merge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.compression.plain import PlainCodec
from farflung.compression.tiles import scratch
from farflung.compression.wire import Format

_LARGEST = torch.finfo(torch.bfloat16).max


class Bf16Codec(PlainCodec):
    format = Format("bf16", number=2, version=1, block=0)
    stored = torch.bfloat16
    exponent_mask = 0x7F80

    def _store(self, values_n: Tensor, out_n: Tensor) -> None:
        bounded_n = scratch("work", values_n.numel(), torch.float32, values_n.device)
        torch.clamp(values_n.to(torch.float32), -_LARGEST, _LARGEST, out=bounded_n)
        out_n.copy_(bounded_n)
