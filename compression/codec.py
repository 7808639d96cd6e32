"""Codecs: one chunk of a flat vector to bytes and back.  This file holds their interface and their list.

Called by the agent's arithmetic: encode a pseudo-gradient, decode and add as owner, decode a result.
No I/O, no protocol, no residual state (that is `feedback.py`).  A codec is exact about bytes: the same input gives
the same bytes on every machine, because bytes are hashed and compared between peers.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from farflung.compression.int2 import Int2Codec
from farflung.compression.int4 import Int4Codec
from farflung.compression.int8 import Int8Codec
from farflung.compression.payload import NUMBER_AT, Bytes, Format, NonFinite
from farflung.compression.plain import Bf16Codec, Fp32Codec
from farflung.compression.topk import TopKCodec
from farflung.protocol.errors import UserError

__all__ = ["Bytes", "Codec", "NonFinite", "codec_named", "codec_names", "codec_of"]


class Codec(Protocol):
    format: ClassVar[Format]

    @property
    def name(self) -> str: ...

    def payload_bytes(self, elements: int) -> int:
        """Length of the payload of a chunk: known beforehand, so a wrong length is refused unread."""

    def encode(self, chunk_n: Tensor) -> bytes:
        """fp32, bf16 or fp16 of any shape, on CPU or GPU -> payload.  Raises NonFinite with the first bad place."""

    def encode_here(self, chunk_n: Tensor) -> Bytes:
        """The same, to be put elsewhere at once: it may lie where this thread's next one will.

        Memory that is new for each payload costs four times what encoding it does.
        """

    def check(self, payload: Bytes, elements: int) -> None:
        """FrameError unless this is the payload of `elements` finite values; the header before anything else."""

    def decode(self, payload: Bytes, elements: int, out_n: Tensor | None = None) -> Tensor:
        """payload -> fp32 [n] on the CPU, after `check`; into `out_n` where the caller keeps memory for it."""

    def decode_add(self, payload: Bytes, weight: float, total_n: Tensor) -> None:
        """total_n += weight * decode(payload), after `check`, where fp32 `total_n` [n] lies.

        The bits are those of `total_n.add_(decode(payload, n).mul_(weight))`: two roundings, never fused.
        """


_ALL: tuple[Codec, ...] = (
    Fp32Codec(),
    Bf16Codec(),
    Int8Codec(),
    Int4Codec(),
    Int2Codec(),
    TopKCodec(),
)
_CODECS = {codec.name: codec for codec in _ALL}
_BY_NUMBER = {codec.format.number: codec for codec in _ALL}


def codec_named(name: str) -> Codec:
    try:
        return _CODECS[name]
    except KeyError:
        known = ", ".join(sorted(_CODECS))
        raise UserError(f'codec "{name}" is not known to this version; it knows: {known}') from None


def check_payload(name: str, payload: Bytes, elements: int) -> None:
    """FrameError unless these are so many finite values in that codec; UserError for one that nobody knows."""
    codec_named(name).check(payload, elements)


def payload_bytes(name: str, elements: int) -> int:
    """So long is the payload of so many values in that codec."""
    return codec_named(name).payload_bytes(elements)


def codec_of(payload: Bytes) -> Codec:
    """The codec that a checked payload names in its header."""
    return _BY_NUMBER[memoryview(payload).cast("B")[NUMBER_AT]]


def codec_names() -> list[str]:
    return sorted(_CODECS)
