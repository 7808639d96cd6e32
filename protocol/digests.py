"""Hashes and bit masks: how bytes are named and how sets of chunks are written down.

Called by everybody that sends, checks or records chunks.  Pure; knows nothing of what the bytes mean.
A mask is a Python int: bit c stands for chunk c.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator

from blake3 import blake3

HASH_BYTES = 32
LENGTH_BYTES = 8


def hash_bytes(*parts: bytes | bytearray | memoryview) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def keyed_hash(key: bytes, *parts: bytes | bytearray | memoryview) -> bytes:
    """Only somebody who has the bytes and the key can name it."""
    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def drawn_chunk(nonce: bytes, count: int) -> int:
    """Which of so many chunks a nonce names, by its index."""
    return int.from_bytes(nonce[:8], "little") % count


def is_piece(
    expected: bytes, payload: bytes | bytearray | memoryview, payload_hash: bytes, parts: int
) -> bool:
    """Whether these bytes are the chunk of state with this hash: all its parts, or the first where others are zeros."""
    return payload_hash == expected or hash_bytes(payload, bytes((parts - 1) * len(payload))) == expected


def root_of(hashes: Iterable[bytes]) -> bytes:
    """One name for a list of hashes: the digest of a state is the root of its chunks' hashes."""
    return hash_bytes(b"".join(hashes))


def combined(held: Iterable[tuple[int, bytes]]) -> bytes:
    """One name for 'these chunks with these hashes', whatever order they arrived in."""
    hasher = blake3()
    for chunk, chunk_hash in sorted(held):
        hasher.update(chunk.to_bytes(4, "little") + chunk_hash)
    return hasher.digest()


def length_to_bytes(square: float) -> bytes:
    """How long a result is: the sum of the squares of its values, as members prove to hold it."""
    return struct.pack("<d", square)


def split_lengths(blob: bytes) -> list[float]:
    """Empty for what is no list of lengths."""
    if len(blob) % LENGTH_BYTES:
        return []
    found = [square for (square,) in struct.iter_unpack("<d", blob)]
    return found if all(math.isfinite(square) and square >= 0.0 for square in found) else []


def split_hashes(blob: bytes) -> list[bytes]:
    return [blob[start : start + HASH_BYTES] for start in range(0, len(blob), HASH_BYTES)]


def hash_at(blob: bytes, place: int) -> bytes:
    """The same as `split_hashes(blob)[place]`, without cutting up all the others."""
    if not 0 <= place * HASH_BYTES < len(blob):
        raise IndexError(f"hash {place} of {len(blob)} bytes")
    return blob[place * HASH_BYTES : (place + 1) * HASH_BYTES]


def full_mask(count: int) -> int:
    return (1 << count) - 1


def bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_of(chunks: Iterable[int]) -> int:
    mask = 0
    for chunk in chunks:
        mask |= 1 << chunk
    return mask


def in_fewer(masks: Iterable[int], count: int, of: int) -> int:
    """Which bits of `of` are set in fewer than `count` of these masks.

    Counted in all places at once: a thousand masks of a thousand bits are a few thousand steps.
    """
    digits: list[int] = []  # of the counts in all places, the lowest first
    for mask in masks:
        carry, place = mask, 0
        while carry:
            if place == len(digits):
                digits.append(0)
            digits[place], carry = digits[place] ^ carry, digits[place] & carry
            place += 1
    fewer, equal = 0, of
    for place in reversed(range(max(len(digits), count.bit_length()))):
        digit = digits[place] if place < len(digits) else 0
        if count >> place & 1:
            fewer, equal = fewer | equal & ~digit, equal & digit
        else:
            equal &= ~digit
    return fewer


def mask_to_bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def mask_from_bytes(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
