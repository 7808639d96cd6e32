"""Every codec's payloads in numpy, both ways: the arithmetic that peers, the court and a replay have in common.  Pure.

Owns: fp32 and bf16, the list of formats, and the way from a payload to whole blocks and back.
Called by: `codec.py`, which knows faster ways to the same bits, and by whoever judges or replays what peers sent.
Must not know: rounds, weights, who sent what, torch.

fp32 is the identity, four bytes a value.  bf16 is its upper half, rounded to nearest with ties to even; values beyond
the largest bf16 become the largest: rounded to infinity, one value would spoil a whole merge.  A payload is refused by
its length and its head before memory is taken for what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farflung.compression.payload import HEADER_BYTES, NUMBER_AT, Bytes, Format, NonFinite, check_header
from farflung.compression.plain_blocks import FORMATS, BlockFormat, step_bits, steps_of
from farflung.protocol.errors import FrameError, UserError
from farflung.protocol.verdicts import Verdict

Floats = NDArray[np.float32]

_VALUE_BYTES = {"fp32": 4, "bf16": 2}  # of codecs that know no blocks
# Values that are calculated with at a time, whole blocks of each codec: what operations need between them stays in the
# cache, and is not memory that is new each time.
_TILE = 1 << 16


@dataclass(frozen=True)
class PlainCodec:
    """Every method is a function of its arguments alone."""

    format: Format
    blocks: BlockFormat | None

    @property
    def name(self) -> str:
        return self.format.name

    def payload_bytes(self, elements: int) -> int:
        if self.blocks is None:
            return HEADER_BYTES + _VALUE_BYTES[self.name] * elements
        return HEADER_BYTES + self.blocks.blocks(elements) * (2 + self.blocks.code_bytes)

    def check_head(self, payload: Bytes, elements: int) -> None:
        """FrameError unless length and head are those of so many values; nothing behind the head is read."""
        check_header(payload, self.format, elements, self.payload_bytes(elements))

    def decode(self, payload: Bytes, elements: int) -> Floats:
        self.check(payload, elements)
        return self.restored(payload, elements)

    def check(self, payload: Bytes, elements: int) -> None:
        """FrameError unless this is the payload of so many finite values."""
        self.check_head(payload, elements)
        try:
            if self.blocks is None:
                if not np.isfinite(self.restored(payload, elements)).all():
                    raise FrameError(Verdict.MALFORMED, "NaN or infinite values")
            elif elements:
                bits_r, codes_rc = _parts(self.blocks, payload, elements)
                self.blocks.refuse_steps(bits_r)
                self.blocks.refuse_codes(codes_rc)
        except FrameError as error:
            raise FrameError(error.verdict, f"{self.name} payload: {error}") from None

    def restored(self, payload: Bytes, elements: int) -> Floats:
        """Of a checked payload, to be read; fp32 [elements]."""
        if self.blocks is not None:
            if not elements:
                return np.zeros(0, np.float32)
            bits_r, codes_rc = _parts(self.blocks, payload, elements)
            values_rb = np.empty((len(bits_r), self.format.block), np.float32)
            with np.errstate(all="ignore"):
                for at in _tiles(len(bits_r), self.format.block):
                    values_rb[at] = self.blocks.restore(steps_of(bits_r[at]), codes_rc[at])
            return values_rb.reshape(-1)[:elements]
        if self.name == "fp32":
            return np.frombuffer(payload, np.float32, -1, HEADER_BYTES)
        bits_n = np.frombuffer(payload, np.uint16, -1, HEADER_BYTES).astype(np.uint32)
        bits_n <<= 16
        return bits_n.view(np.float32)

    def encode(self, values: Floats) -> bytes:
        """fp32 [n], all finite; NonFinite otherwise."""
        values_n = np.ascontiguousarray(values, np.float32).reshape(-1)
        finite_n = np.isfinite(values_n)
        if not finite_n.all():
            place = int(finite_n.argmin())
            raise NonFinite(place, float(values_n[place]))
        with np.errstate(all="ignore"):
            parts = self._written(values_n) if self.blocks is None else _blocks_of(self.blocks, values_n)
        return b"".join((self.format.header(len(values_n)), *(part.data for part in parts)))

    def _written(self, values_n: Floats) -> tuple[NDArray[np.generic], ...]:
        if self.name == "fp32":
            return (values_n,)
        return tuple(_bf16_halves(values_n[at].view(np.uint32)) for at in _tiles(len(values_n), 1))


def _tiles(count: int, block: int) -> Iterator[slice]:
    """Of so many blocks."""
    step = _TILE // block
    return (slice(first, first + step) for first in range(0, count, step))


def _bf16_halves(bits_n: NDArray[np.uint32]) -> NDArray[np.uint16]:
    rounded_n = bits_n >> 16
    rounded_n &= 1
    rounded_n += 0x7FFF
    rounded_n += bits_n
    halves_n = rounded_n.view(np.uint16)[1::2].copy()  # the upper ones: memory is little-endian (payload.py)
    halves_n -= halves_n & 0x7FFF == 0x7F80  # rounded to infinity: the largest instead
    return halves_n


def _parts(
    blocks: BlockFormat, payload: Bytes, elements: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Steps, and codes [blocks, code_bytes]."""
    count = blocks.blocks(elements)
    bits_r = np.frombuffer(payload, np.uint16, count, HEADER_BYTES)
    return bits_r, np.frombuffer(payload, np.uint8, -1, HEADER_BYTES + 2 * count).reshape(count, -1)


def _blocks_of(blocks: BlockFormat, values_n: Floats) -> tuple[NDArray[np.generic], ...]:
    """All steps, and then all codes.  What fills no block is padded with zeros."""
    made = []
    for at in _tiles(len(values_n), 1):
        count = blocks.blocks(len(values_n[at]))
        padded_rb = np.zeros((count, blocks.block), np.float32)
        padded_rb.reshape(-1)[: len(values_n[at])] = values_n[at]
        filled = len(values_n[at]) - (count - 1) * blocks.block
        made.append(blocks.quantise(padded_rb, filled))
    return (*(step_bits(steps_r) for steps_r, _ in made), *(codes_rc for _, codes_rc in made))


_NUMBERS = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4, "int2": 5, "topk": 6}


def _codec(name: str, number: int) -> PlainCodec:
    blocks = FORMATS.get(name)
    return PlainCodec(Format(name, number, version=1, block=blocks.block if blocks else 0), blocks)


CODECS = {name: _codec(name, number) for name, number in _NUMBERS.items()}
_BY_NUMBER = {codec.format.number: codec for codec in CODECS.values()}


def codec_named(name: str) -> PlainCodec:
    try:
        return CODECS[name]
    except KeyError:
        known = ", ".join(sorted(CODECS))
        raise UserError(f'codec "{name}" is not known to this version; it knows: {known}') from None


def codec_in(payload: Bytes) -> PlainCodec:
    """The codec that the payload's head names; FrameError if it names none.  Nothing else is checked."""
    head = bytes(memoryview(payload).cast("B")[:HEADER_BYTES])
    codec = _BY_NUMBER.get(head[NUMBER_AT]) if len(head) == HEADER_BYTES else None
    if codec is None:
        raise FrameError(Verdict.MALFORMED, f"a payload that begins with {head.hex()}, which names no codec")
    return codec


def decode(payload: Bytes, elements: int) -> Floats:
    """By the codec that the payload names."""
    return codec_in(payload).decode(payload, elements)


def encode(codec_name: str, values: Floats) -> bytes:
    return codec_named(codec_name).encode(values)
