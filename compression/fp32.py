"""The fp32 codec: the identity, four bytes a value.

Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.compression.plain import PlainCodec
from farflung.compression.wire import Format


class Fp32Codec(PlainCodec):
    format = Format("fp32", number=1, version=1, block=0)
    stored = torch.float32
    exponent_mask = 0x7F800000

    def _store(self, values_n: Tensor, out_n: Tensor) -> None:
        out_n.copy_(values_n)
