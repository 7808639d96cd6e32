"""The int4 codec: blocks of 64, sixteen levels that lie closer together near zero, two codes in a byte.

Owns: the levels, and the tables from int8 codes to nibbles and back.
Called by: `compression/codec.py`, which lists it.  Must not know: peers, rounds.

The levels are those of NF4 (quantiles of a normal distribution, arXiv:2305.14314), in units of absmax/127 and moved by
at most one unit, so that neighbours differ by an odd number.  Then every border lies halfway between two integers, and
the nearest level of a value is the nearest level of its int8 code: one table lookup for two values, no comparisons.
A tie goes the way of the int8 rounding, to the even code.  0 is a level: what is exactly zero stays so.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from farflung.compression.blocks import BlockCodec, Kernel
from farflung.compression.int8 import TOP, Int8Kernel
from farflung.compression.payload import Format
from farflung.compression.tiles import scratch, split

LEVELS = (-127, -88, -67, -50, -37, -24, -11, 0, 11, 20, 31, 42, 55, 72, 91, 126)

assert all((high - low) % 2 for low, high in pairwise(LEVELS))


class Int4Codec(BlockCodec):
    format = Format("int4", number=4, version=1, block=64)
    code_bytes = 32
    largest_level = TOP
    levels = LEVELS

    def _kernel(self, rows: int, filled: int, device: torch.device) -> Kernel:
        return _Int4Kernel(rows, self.format.block, device)


class _Int4Kernel:
    def __init__(self, rows: int, block: int, device: torch.device) -> None:
        self._int8 = Int8Kernel(rows, block, device)
        self._codes_rb = scratch("int8 codes", rows * block, torch.uint8, device).view(rows, block)
        self._low_half = torch.tensor(0xFFFF, dtype=torch.int32, device=device)
        self._packing = _packing(device)
        self._unpacking = _unpacking(device)

    def quantise(self, values_rb: Tensor, peaks_r: Tensor, steps_r: Tensor, codes_rc: Tensor) -> None:
        self._int8.quantise(values_rb, peaks_r, steps_r, self._codes_rb)
        for int8_tb, codes_tc in split(self._codes_rb, codes_rc):
            places = self._places(int8_tb)
            torch.index_select(self._packing, 0, places, out=codes_tc.view(-1))

    def restore(self, steps_r: Tensor, codes_rc: Tensor, out_rb: Tensor) -> None:
        torch.index_select(
            self._unpacking, 0, self._places(codes_rc), out=self._codes_rb.view(-1).view(torch.int32)
        )
        self._int8.restore(steps_r, self._codes_rb, out_rb)

    def _places(self, codes: Tensor) -> Tensor:
        """Pairs of bytes as places in a table: two int8 codes when encoding, four nibbles when decoding."""
        pairs = codes.view(-1).view(torch.int16)
        places = scratch("places", pairs.numel(), torch.int32, codes.device)
        return places.copy_(pairs).bitwise_and_(self._low_half)


@lru_cache(maxsize=8)
def _packing(device: torch.device) -> Tensor:
    """u8 [65536]: two int8 codes, the first in the low byte -> two nibbles, the first in the low one."""
    codes = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
    nibbles = np.abs(codes[:, None] - np.array(LEVELS)).argmin(1).astype(np.uint8)
    return torch.from_numpy((nibbles[None, :] | nibbles[:, None] << 4).reshape(-1)).to(device)


@lru_cache(maxsize=8)
def _unpacking(device: torch.device) -> Tensor:
    """i32 [65536]: four nibbles -> four int8 levels, in order of address."""
    four = np.arange(65536)[:, None] >> np.array([0, 4, 8, 12]) & 15
    levels = np.array(LEVELS, dtype=np.int8)[four]
    return torch.from_numpy(levels.view(np.int32).reshape(-1)).to(device)
