"""The codecs fp32 and bf16: a header, and then one number for each value, in order.

fp32 is the identity, four bytes a value.  bf16 is its upper half, rounded to nearest with ties to even; values beyond
the largest bf16 become the largest: rounded to infinity, one value would spoil a whole merge.
Called by: `codec.py`, which lists both.  Must not know: peers, rounds.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.payload import HEADER_BYTES, Bytes, Format, check_header
from farflung.compression.tiles import (
    flat,
    from_bytes,
    peaks_of,
    refuse_non_finite,
    scratch,
    spans,
    tile_length,
    to_bytes,
)
from farflung.protocol.errors import FrameError
from farflung.protocol.verdicts import Verdict

_CPU = torch.device("cpu")


class PlainCodec:
    format: ClassVar[Format]
    stored: ClassVar[torch.dtype]
    exponent_mask: ClassVar[int]  # all exponent bits set is NaN or infinite

    @property
    def name(self) -> str:
        return self.format.name

    def payload_bytes(self, elements: int) -> int:
        return HEADER_BYTES + self.stored.itemsize * elements

    def encode(self, chunk_n: Tensor) -> bytes:
        flat_n = flat(chunk_n)
        refuse_non_finite(flat_n, peaks_of(flat_n))
        stored_n = flat_n
        if flat_n.dtype != self.stored:
            stored_n = scratch("stored", flat_n.numel(), self.stored, flat_n.device)
            for start, stop in spans(flat_n.numel(), tile_length(flat_n.device)):
                self._store(flat_n[start:stop], stored_n[start:stop])
        return to_bytes(self.format.header(flat_n.numel()), stored_n)

    def encode_here(self, chunk_n: Tensor) -> Bytes:
        return self.encode(chunk_n)

    def check(self, payload: Bytes, elements: int) -> None:
        check_header(payload, self.format, elements, self.payload_bytes(elements))
        bits_n = self._bits(payload)
        for start, stop in spans(elements, tile_length(_CPU)):
            if int((bits_n[start:stop] & self.exponent_mask).max()) == self.exponent_mask:
                raise FrameError(
                    Verdict.MALFORMED, f"{self.name} payload with NaN or infinite values after {start}"
                )

    def decode(self, payload: Bytes, elements: int, out_n: Tensor | None = None) -> Tensor:
        self.check(payload, elements)
        out_n = torch.empty(elements, dtype=torch.float32) if out_n is None else out_n
        bits_n = self._bits(payload)
        for start, stop in spans(elements, tile_length(_CPU)):
            out_n[start:stop].copy_(self._restored(bits_n[start:stop], _CPU))
        return out_n

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        self.check(payload, total_n.numel())
        device = total_n.device
        bits_n = self._bits(payload)
        factor = torch.tensor(weight, dtype=torch.float32, device=device)
        for start, stop in spans(total_n.numel(), tile_length(device)):
            values = scratch("values", stop - start, torch.float32, device)
            # Widened first: bf16 times a single number would be rounded to bf16.
            values.copy_(self._restored(bits_n[start:stop], device)).mul_(factor)
            total_n[start:stop].add_(values)

    def _bits(self, payload: Bytes) -> NDArray[np.unsignedinteger]:
        return np.frombuffer(payload, np.uint32 if self.stored.itemsize == 4 else np.uint16, -1, HEADER_BYTES)

    def _restored(self, bits_n: NDArray[np.unsignedinteger], device: torch.device) -> Tensor:
        return from_bytes(bits_n, device).view(self.stored)

    def _store(self, values_n: Tensor, out_n: Tensor) -> None:
        raise NotImplementedError


class Fp32Codec(PlainCodec):
    format = Format("fp32", number=1, version=1, block=0)
    stored = torch.float32
    exponent_mask = 0x7F800000

    def _store(self, values_n: Tensor, out_n: Tensor) -> None:
        out_n.copy_(values_n)


_LARGEST = torch.finfo(torch.bfloat16).max


class Bf16Codec(PlainCodec):
    format = Format("bf16", number=2, version=1, block=0)
    stored = torch.bfloat16
    exponent_mask = 0x7F80

    def _store(self, values_n: Tensor, out_n: Tensor) -> None:
        bounded_n = scratch("work", values_n.numel(), torch.float32, values_n.device)
        torch.clamp(values_n.to(torch.float32), -_LARGEST, _LARGEST, out=bounded_n)
        out_n.copy_(bounded_n)
