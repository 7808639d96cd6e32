"""The head of every encoded chunk: sixteen bytes that say what follows, and the errors of both directions.

Owns: the header's layout, the check of a header against what a round expects, `NonFinite`.
Called by: every codec.
Must not know: tensors' values, peers, rounds, or which codecs exist.

    magic[4]  codec u8  version u8  flags u16  elements u32  block u16  zero u16      little-endian

Everything in it follows from the codec and the number of elements, both of which the round's plan fixes; so a
payload whose header differs in any byte is refused before memory is taken for it, and the text names the
difference.  The header is for what is read without a plan: a result log, a capture, a newer version's bytes.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass

from farflung.protocol.errors import FrameError
from farflung.protocol.verdicts import Verdict

Bytes = bytes | bytearray | memoryview

HEADER_BYTES = 16
NUMBER_AT = 4  # where the codec's number stands
MAX_ELEMENTS = 2**31 - 1  # an int32 counts them, on a GPU too

_LAYOUT = struct.Struct("<4sBBHIHH")
_FIELDS = ("magic", "codec", "version", "flags", "elements", "block", "zero")
_MAGIC = b"FFQ\x00"

assert _LAYOUT.size == HEADER_BYTES
# Codes are written as memory holds them.  Torch has no build for a big-endian machine.
assert sys.byteorder == "little"


class NonFinite(ValueError):
    """A vector with NaN or an infinite value, which no codec encodes; `index` is the first one's place."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"value {index} is {value}: only finite values can be encoded")
        self.index = index
        self.value = value


@dataclass(frozen=True, slots=True)
class Format:
    """What tells one codec's payloads from another's; numbers are never given out twice."""

    name: str
    number: int
    version: int
    block: int  # values that share a scale; 0 where there is none

    def header(self, elements: int) -> bytes:
        return _LAYOUT.pack(_MAGIC, self.number, self.version, 0, elements, self.block, 0)


def check_header(payload: Bytes, expected: Format, elements: int, payload_bytes: int) -> None:
    """FrameError unless `payload` has exactly `payload_bytes` and the header of `elements` values."""
    if not 0 <= elements <= MAX_ELEMENTS:
        raise FrameError(Verdict.MALFORMED, f"{expected.name} payload: a chunk of {elements} values")
    length = memoryview(payload).nbytes
    if length >= HEADER_BYTES:
        came = bytes(memoryview(payload).cast("B")[:HEADER_BYTES])
        wanted = expected.header(elements)
        if came != wanted:
            raise FrameError(Verdict.MALFORMED, f"{expected.name} payload: {_difference(came, wanted)}")
    if length != payload_bytes:
        raise FrameError(
            Verdict.MALFORMED,
            f"{expected.name} payload of {length} bytes for {elements} values, not {payload_bytes}",
        )


def _difference(came: bytes, wanted: bytes) -> str:
    for name, got, due in zip(_FIELDS, _LAYOUT.unpack(came), _LAYOUT.unpack(wanted), strict=True):
        if got != due:
            return f"{name} in the header is {got!r}, the round expects {due!r}"
    raise AssertionError("the headers are equal")
