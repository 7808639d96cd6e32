"""A fixed turn of 256 values before int4, for activations in which a few channels are far larger than the rest.

A block of int4 has one step for 64 values: one large value among them, and the others are rounded away.  The turn,
fixed signs and then the Hadamard matrix over 16, is orthogonal: it spreads each value over all 256, so that none
stands out, and back it is its own transpose.  https://arxiv.org/abs/2506.01352 has it for activations of stages.

Used by the border codecs where `[pipeline] turn` asks for it; the payload is that of int4, as long as ever.  What is
left behind the last whole 256 stays as it is.  Two products with a matrix of 16, so it runs where the tensor is.
Nobody compares its bits: a crossing is made once, and named by the hash of what was made.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from farflung.protocol.digests import hash_bytes

WIDTH, ROOT = 256, 16
# Of a value that came: 256 of them still add up to a number, and no honest activation is so large.
_MOST = 2.0**100


def turned(values: Tensor) -> Tensor:
    """fp32 [n], from a tensor of any shape and float dtype."""
    flat_n = values.reshape(-1).float()
    whole = _whole(flat_n)
    if not whole:
        return flat_n
    blocks_kb = flat_n[:whole].view(-1, WIDTH) * _signs(flat_n.device)
    return torch.cat([_hadamard(blocks_kb).view(-1), flat_n[whole:]])


def turned_back(flat_n: Tensor) -> Tensor:
    """What `turned` was given, as fp32 [n]."""
    whole = _whole(flat_n)
    if not whole:
        return flat_n
    blocks_kb = _hadamard(flat_n[:whole].clamp(-_MOST, _MOST).view(-1, WIDTH)).mul_(_signs(flat_n.device))
    return torch.cat([blocks_kb.view(-1), flat_n[whole:]])


def _whole(flat_n: Tensor) -> int:
    return flat_n.numel() // WIDTH * WIDTH


def _hadamard(blocks_kb: Tensor) -> Tensor:
    """Times the Hadamard matrix over 16, as that of 16 twice: over columns, and over rows."""
    matrix = _hadamard_16(blocks_kb.device)
    rows = blocks_kb.view(-1, ROOT) @ matrix
    return torch.matmul(matrix, rows.view(-1, ROOT, ROOT)).view(-1, WIDTH)


@lru_cache(maxsize=8)
def _hadamard_16(device: torch.device) -> Tensor:
    """Over 4, so that it is its own inverse."""
    signs = [[1.0 - 2.0 * ((row & column).bit_count() & 1) for column in range(ROOT)] for row in range(ROOT)]
    return torch.tensor(signs, device=device) / 4.0


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    """Fixed for ever: the bits of a hash.  Without them, equal values would all come out as one."""
    drawn = int.from_bytes(hash_bytes(b"farflung: the signs of a turn"), "little")
    return torch.tensor([1.0 - 2.0 * (drawn >> place & 1) for place in range(WIDTH)], device=device)
