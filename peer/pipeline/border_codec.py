"""One border of a cut model as tensors: from what a stage gives to the bytes that cross, and back.

Owns: which codec each tensor goes through, riders beside the activations, devices.
Called by the pipeline loop.  The form of the bytes is in collectives/pipeline/crossing.py, which the agent reads, too.
Must not know: how bytes travel, the belt, which microbatch they are of.

Integers pass as they are.  A codec's gradient is taken straight through, as if it changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from farflung.collectives.pipeline.crossing import RAW, Border, CrossingPiece, pack, parse
from farflung.compression.codec import NonFinite, codec_named
from farflung.peer.pipeline.parts import Riders, Tensors
from farflung.peer.pipeline.samples import ReadMicrobatch
from farflung.peer.pipeline.stage_loop import NonFiniteTensor
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Payload

# ---- turned ------------------------------------------------------------------------------------------------
# A fixed turn of 256 values before int4, for activations in which a few channels are far larger than the
# rest.
#
# A block of int4 has one step for 64 values: one large value among them, and the others are rounded away. The
# turn, fixed signs and then the Hadamard matrix over 16, is orthogonal: it spreads each value over all 256,
# so that none stands out, and back it is its own transpose. https://arxiv.org/abs/2506.01352 has it for
# activations of stages.
#
# Used by the border codecs; the payload is that of int4, as long as ever.
# What is left behind the last whole 256 stays as it is. Two products with a matrix of 16, so it runs where
# the tensor is. Nobody compares its bits: a crossing is made once, and named by the hash of what was made.

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


# ---- border codec ------------------------------------------------------------------------------------------

TURNED = "int4"  # the codec whose values are


class BorderCodec:
    """`riders`: their names, in the border's order.  What goes through int4 is turned before."""

    def __init__(self, border: Border, riders: Sequence[str]) -> None:
        self.border = border
        self._riders = tuple(riders)

    def there(self, gives: Tensors, riders: Riders, tokens: int) -> bytes:
        """NotFinite if a value is no number."""
        named = [riders[name] for name in self._riders]
        return self._packed(False, (*gives, *named), tokens, "what goes to the next stage")

    def read_there(self, payload: Payload, device: torch.device) -> ReadMicrobatch:
        """FrameError if it is no crossing of this border."""
        came = parse(self.border, False, payload)
        tensors = [self._tensor(piece, device) for piece in came.pieces]
        count = len(self.border.tensors)
        riders = dict(zip(self._riders, tensors[count:], strict=True))
        return ReadMicrobatch(tuple(tensors[:count]), riders, came.tokens)

    def back(self, gradients: Tensors, tokens: int) -> bytes:
        return self._packed(True, gradients, tokens, "the gradient for the stage before")

    def read_back(self, payload: Payload, device: torch.device) -> Tensors:
        """Of each floating tensor that went there; FrameError as above."""
        came = parse(self.border, True, payload)
        return tuple(self._tensor(piece, device) for piece in came.pieces)

    def _packed(self, backwards: bool, tensors: Tensors, tokens: int, what: str) -> bytes:
        items = self.border.items(backwards)
        try:
            data = [
                _bytes(how, turned(tensor.detach()) if how == TURNED else tensor)
                for (how, _), tensor in zip(items, tensors, strict=True)
            ]
        except NonFinite as error:
            raise NonFiniteTensor(f"{what} has a value that is no number: {error}") from None
        return pack(self.border, backwards, len(tensors[0]), tokens, data)

    def _tensor(self, piece: CrossingPiece, device: torch.device) -> Tensor:
        """In memory of its own: the slot is written again."""
        dtype: torch.dtype = getattr(torch, piece.dtype)
        if piece.codec == RAW:
            return torch.frombuffer(bytearray(piece.data), dtype=dtype).view(piece.dims).to(device)
        values_n = codec_named(piece.codec).decode(piece.data, math.prod(piece.dims)).to(device)
        if piece.codec == TURNED:
            values_n = turned_back(values_n)
        return values_n.view(piece.dims).to(dtype)


def _bytes(codec: str, tensor: Tensor) -> bytes:
    if codec != RAW:
        return codec_named(codec).encode(tensor.detach())
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
