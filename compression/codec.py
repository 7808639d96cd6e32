"""Codecs: one chunk of a flat fp32 vector to bytes and back.

Called by the agent's arithmetic (encode a pseudo-gradient, decode and add as owner, decode a result).
No I/O, no protocol, no residual state.  A codec is exact about bytes: the same input gives the same bytes
on every machine, because bytes are hashed and compared between peers.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from farflung.collectives.errors import FrameError, UserError
from farflung.collectives.verdicts import Verdict

Bytes = bytes | bytearray | memoryview


class Codec(Protocol):
    name: str

    def payload_bytes(self, elements: int) -> int:
        """Length of the payload of a chunk: known beforehand, so a wrong length is refused unread."""

    def encode(self, chunk_n: Tensor) -> bytes:
        """fp32 [n] -> payload.  Non-finite values pass through where the format can hold them."""

    def decode(self, payload: Bytes, elements: int) -> Tensor:
        """payload -> fp32 [n].  Raises FrameError on a wrong length."""


class Fp32Codec:
    """The identity: four bytes a value, little-endian."""

    name = "fp32"

    def payload_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, chunk_n: Tensor) -> bytes:
        return chunk_n.detach().to(torch.float32).contiguous().numpy().tobytes()

    def decode(self, payload: Bytes, elements: int) -> Tensor:
        if len(payload) != self.payload_bytes(elements):
            raise FrameError(
                Verdict.MALFORMED,
                f"fp32 payload of {len(payload)} bytes for {elements} values, not {4 * elements}",
            )
        # Copied: a view would keep a whole network frame alive and be read-only.
        return torch.frombuffer(bytearray(payload), dtype=torch.float32)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32Codec(),)}


def codec_named(name: str) -> Codec:
    try:
        return _CODECS[name]
    except KeyError:
        known = ", ".join(sorted(_CODECS))
        raise UserError(f'codec "{name}" is not known to this version; it knows: {known}') from None


def codec_names() -> list[str]:
    return sorted(_CODECS)
