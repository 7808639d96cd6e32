"""Every codec's payloads in numpy, both ways: what the coordinator reads and makes when it judges one chunk.

Owns: the head of a payload, its length, fp32 and bf16, and the way from a payload to whole blocks and back.
Called by: `plain_steps.py`, and by whoever replays a run.
Must not know: rounds, weights, who sent what, torch.

The bytes and the values are those of compression/, bit for bit; plain_blocks.py says why they are computed twice.
A payload is refused by its length and its head before memory is taken for what it holds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.coordinator.court.plain_blocks import FORMATS, BlockFormat, step_bits, steps_of
from farflung.protocol.errors import FrameError, UserError
from farflung.protocol.verdicts import Verdict

Bytes = bytes | bytearray | memoryview
Floats = NDArray[np.float32]

HEADER_BYTES = 16
_HEADER = struct.Struct("<4sBBHIHH")  # magic, codec, version, flags, elements, block, zero
_HEADER_WORDS = ("magic", "codec", "version", "flags", "elements", "block", "zero")
_MAGIC, _VERSION = b"FFQ\x00", 1
_NUMBERS = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5, "topk": 6}
_NAMES = {number: name for name, number in _NUMBERS.items()}
_VALUE_BYTES = {"fp32": 4, "bf16": 2}  # of codecs that know no blocks
_MAX_ELEMENTS = 2**31 - 1
_BF16_LARGEST = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]


class NotFiniteInCourt(ValueError):
    """A vector with NaN or an infinite value, which no codec encodes."""


@dataclass(frozen=True)
class CourtCodec:
    """One codec by its name.  Every method is a function of its arguments alone."""

    name: str

    @property
    def _blocks(self) -> BlockFormat | None:
        return FORMATS.get(self.name)

    def payload_bytes(self, elements: int) -> int:
        blocks = self._blocks
        if blocks is None:
            return HEADER_BYTES + _VALUE_BYTES[self.name] * elements
        return HEADER_BYTES + blocks.blocks(elements) * (2 + blocks.code_bytes)

    def header(self, elements: int) -> bytes:
        block = self._blocks.block if self._blocks else 0
        return _HEADER.pack(_MAGIC, _NUMBERS[self.name], _VERSION, 0, elements, block, 0)

    def check_head(self, payload: Bytes, elements: int) -> None:
        """FrameError unless length and head are those of so many values; nothing behind the head is read."""
        self._expect(0 <= elements <= _MAX_ELEMENTS, f"a chunk of {elements} values")
        length = memoryview(payload).nbytes
        if length >= HEADER_BYTES:
            came, due = bytes(memoryview(payload).cast("B")[:HEADER_BYTES]), self.header(elements)
            self._expect(came == due, _difference(came, due))
        wanted = self.payload_bytes(elements)
        self._expect(length == wanted, f"{length} bytes for {elements} values, not {wanted}")

    def decode(self, payload: Bytes, elements: int) -> Floats:
        self.check_head(payload, elements)
        blocks = self._blocks
        try:
            with np.errstate(all="ignore"):
                if blocks is None:
                    return self._read_values(payload)
                return _read_blocks(blocks, payload, elements)
        except FrameError as error:
            raise FrameError(error.verdict, f"{self.name} payload: {error}") from None

    def encode(self, values: Floats) -> bytes:
        """fp32 [n], all finite; NotFinite otherwise."""
        values_n = np.ascontiguousarray(values, np.float32).reshape(-1)
        finite_n = np.isfinite(values_n)
        if not finite_n.all():
            place = int(finite_n.argmin())
            raise NotFiniteInCourt(f"value {place} is {values_n[place]}: only finite values can be encoded")
        blocks = self._blocks
        with np.errstate(all="ignore"):
            body = self._written(values_n) if blocks is None else _blocks_of(blocks, values_n)
        return self.header(len(values_n)) + body

    def _read_values(self, payload: Bytes) -> Floats:
        if self.name == "fp32":
            values_n = np.frombuffer(payload, "<f4", -1, HEADER_BYTES).astype(np.float32)
        else:
            halves_n = np.frombuffer(payload, "<u2", -1, HEADER_BYTES).astype(np.uint32)
            values_n = (halves_n << 16).view(np.float32)
        self._expect(bool(np.isfinite(values_n).all()), "NaN or infinite values")
        return values_n

    def _written(self, values_n: Floats) -> bytes:
        if self.name == "fp32":
            return values_n.astype("<f4").tobytes()
        # Beyond the largest bf16 becomes the largest; the upper half, rounded to nearest with ties to even.
        bits_n = values_n.clip(-_BF16_LARGEST, _BF16_LARGEST).view(np.uint32)
        return ((bits_n + (bits_n >> 16 & 1) + np.uint32(0x7FFF)) >> 16).astype("<u2").tobytes()

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise FrameError(Verdict.MALFORMED, f"{self.name} payload: {otherwise}")


def codec_named(name: str) -> CourtCodec:
    if name not in _NUMBERS:
        known = ", ".join(sorted(_NUMBERS))
        raise UserError(f'codec "{name}" is not known to this version; it knows: {known}')
    return CourtCodec(name)


def codec_in(payload: Bytes) -> CourtCodec:
    """The codec that the payload's head names; FrameError if it names none.  Nothing else is checked."""
    head = bytes(memoryview(payload).cast("B")[:HEADER_BYTES])
    name = _NAMES.get(head[len(_MAGIC)]) if len(head) == HEADER_BYTES else None
    if name is None:
        raise FrameError(Verdict.MALFORMED, f"a payload that begins with {head.hex()}, which names no codec")
    return CourtCodec(name)


def decode(payload: Bytes, elements: int) -> Floats:
    """By the codec that the payload names."""
    return codec_in(payload).decode(payload, elements)


def encode(codec_name: str, values: Floats) -> bytes:
    return codec_named(codec_name).encode(values)


def _read_blocks(blocks: BlockFormat, payload: Bytes, elements: int) -> Floats:
    count = blocks.blocks(elements)
    if not count:
        return np.zeros(0, np.float32)
    bits_r = np.frombuffer(payload, "<u2", count, HEADER_BYTES).astype(np.uint16)
    codes_rc = np.frombuffer(payload, np.uint8, -1, HEADER_BYTES + 2 * count).reshape(count, -1)
    blocks.refuse_steps(bits_r)
    blocks.refuse_codes(codes_rc)
    return blocks.restore(steps_of(bits_r), codes_rc).reshape(-1)[:elements]


def _blocks_of(blocks: BlockFormat, values_n: Floats) -> bytes:
    count = blocks.blocks(len(values_n))
    if not count:
        return b""
    filled = len(values_n) - (count - 1) * blocks.block
    padded_rb = np.zeros((count, blocks.block), np.float32)
    padded_rb.reshape(-1)[: len(values_n)] = values_n
    steps_r, codes_rc = blocks.quantise(padded_rb, filled)
    return step_bits(steps_r).astype("<u2").tobytes() + codes_rc.tobytes()


def _difference(came: bytes, due: bytes) -> str:
    for word, got, wanted in zip(_HEADER_WORDS, _HEADER.unpack(came), _HEADER.unpack(due), strict=True):
        if got != wanted:
            return f"{word} in the header is {got!r}, the round expects {wanted!r}"
    return ""
