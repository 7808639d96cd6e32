"""How a hostile peer of the simulator damages the frames that it sends, or what it has learned.

Called by the simulator, which feeds the outcome to the receiver as the data plane would.  Knows frames as bytes;
the randomness is the caller's, so that a seed replays.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

import msgspec

from farflung.compression.codec import codec_of
from farflung.compression.payload import HEADER_BYTES
from farflung.protocol.digests import hash_bytes
from farflung.protocol.frames import Payload
from farflung.protocol.messages import Audited
from farflung.protocol.round_words import ChunkVerdict

LARGEST_BYTES = 1 << 20  # more than any frame of the simulator
_LENGTH_AT, _HASH_AT, _CHUNK_AT = 44, 48, 40  # in the header; see protocol/frames.py

Parts = tuple[bytes, bytes]


def damaged(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """As a bad line or memory does it: one bit.  A frame without a payload is left as it is."""
    return _flipped(header, payload, draw) if payload else (header, payload)


def _flipped(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    at = draw.randrange(len(payload))
    return header, payload[:at] + bytes([payload[at] ^ 1 << draw.randrange(8)]) + payload[at + 1 :]


def _cut(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return header, payload[: draw.randrange(len(payload))]


def _too_long(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header, bytes(LARGEST_BYTES + 1)


def _garbage(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    return draw.randbytes(len(header)), payload


def _of_another_run(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return header[:8] + b"another!" + header[16:], payload


def _for_another_chunk(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """A frame that is whole and true, but for the chunk that it names."""
    return header[:_CHUNK_AT] + struct.pack("<I", draw.randrange(5)) + header[_LENGTH_AT:], payload


def _other_values(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return other_values(header, payload)


def other_values(header: bytes, payload: bytes) -> Parts:
    """Another payload of the same form under its own hash: only what others know of it gives it away."""
    return _with_payload(header, payload[:-1] + bytes([payload[-1] ^ 1]))


def all_is_here(header: bytes, payload: bytes) -> Parts:
    """Of the word which pieces somebody has: all of them."""
    return _with_payload(header, b"\xff" * len(payload))


def _with_payload(header: bytes, payload: bytes) -> Parts:
    return header[:_HASH_AT] + hash_bytes(payload) + header[_HASH_AT + 32 :], payload


def _not_finite(header: bytes, payload: bytes, _: random.Random) -> Parts:
    return _with_payload(header, payload[:16] + b"\xff" * (len(payload) - 16))


_WAYS: tuple[Callable[[bytes, bytes, random.Random], Parts], ...] = (
    _flipped,
    _cut,
    _too_long,
    _garbage,
    _of_another_run,
    _for_another_chunk,
    _other_values,
    _not_finite,
)


def forged(payloads: Mapping[int, Payload], elements: int, how: str) -> dict[int, Payload]:
    """A contribution as a malicious peer makes it, in a form that is right: "1000x", "flip" or "nan"."""
    return {chunk: _forged(payload, elements, how) for chunk, payload in payloads.items()}


def _forged(payload: Payload, elements: int, how: str) -> Payload:
    if how == "nan":
        return bytes(payload)[:HEADER_BYTES] + b"\xff" * (len(payload) - HEADER_BYTES)
    codec = codec_of(payload)
    return codec.encode(codec.decode(payload, elements).mul_({"1000x": 1000.0, "flip": -1.0}[how]))


def forged_sum(payload: bytes) -> bytes:
    """A result that is a result in every way, but not the sum: the lowest bit of its first value is another one."""
    return payload[:HEADER_BYTES] + bytes([payload[HEADER_BYTES] ^ 1]) + payload[HEADER_BYTES + 1 :]


def lied(audited: Audited, wrong: bool) -> Audited:
    """What an auditor found, as a liar tells it."""
    chunks = tuple(ChunkVerdict(each.chunk, wrong) for each in audited.chunks)
    return msgspec.structs.replace(audited, chunks=chunks)


def spoil(header: bytes, payload: bytes, draw: random.Random) -> Parts:
    """Header and payload as a hostile peer sends them.  A frame without a payload stays as it is."""
    return draw.choice(_WAYS)(header, payload, draw) if payload else (header, payload)
