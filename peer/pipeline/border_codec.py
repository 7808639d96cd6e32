"""One border of a cut model as tensors: from what a stage gives to the bytes that cross, and back.

Owns: which codec each tensor goes through, riders beside the activations, devices.
Called by the pipeline loop.  The form of the bytes is in collectives/pipeline/crossing.py, which the agent reads, too.
Must not know: how bytes travel, the belt, which microbatch they are of.

Integers pass as they are.  A codec's gradient is taken straight through, as if it changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.collectives.pipeline.crossing import RAW, Border, CrossingPiece, pack, parse
from farflung.compression.codec import NonFinite, codec_named
from farflung.compression.turned import turned, turned_back
from farflung.peer.pipeline.parts import Riders, Tensors
from farflung.peer.pipeline.samples import ReadMicrobatch
from farflung.peer.pipeline.stage_loop import NonFiniteTensor
from farflung.protocol.frames import Payload

TURNED = "int4"  # the codec whose values are, where `[pipeline] turn` asks for it


class BorderCodec:
    """`riders`: their names, in the border's order; `turn`: what goes through int4 is turned before."""

    def __init__(self, border: Border, riders: Sequence[str], turn: bool = False) -> None:
        self.border = border
        self._turns = {TURNED} if turn else set()
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
                _bytes(how, turned(tensor.detach()) if how in self._turns else tensor)
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
        if piece.codec in self._turns:
            values_n = turned_back(values_n)
        return values_n.view(piece.dims).to(dtype)


def _bytes(codec: str, tensor: Tensor) -> bytes:
    if codec != RAW:
        return codec_named(codec).encode(tensor.detach())
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
