"""The order in which samples are visited: a pseudo-random permutation that nobody has to store.

Owns: (seed, epoch, position) -> sample index, the same on every machine.
Called by: the trainer and `run.batches`, to turn leased positions into indices of the user's dataset.
Must not know: leases, datasets, torch.

A Feistel network permutes [0, 4**k) for the smallest 4**k >= size; indices outside [0, size) are sent through
again ("cycle walking", under four times on average), which leaves a permutation of [0, size).
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 2.  Difference: the round function is
a 64-bit mixer keyed by blake3, not a cipher.  It shuffles; it keeps no secret.
"""

from __future__ import annotations

from functools import lru_cache

from blake3 import blake3

_ROUNDS = 6
_MASK = 2**64 - 1
_DOMAIN = "farflung.order.1"


def permuted_index(seed: int, epoch: int, size: int, position: int) -> int:
    """The sample at `position` of this epoch's order over `size` samples."""
    if not 0 <= position < size:
        raise ValueError(f"position {position} is outside [0, {size})")
    keys = _round_keys(seed, epoch)
    half_bits = _half_bits(size)
    index = _feistel(position, keys, half_bits)
    while index >= size:
        index = _feistel(index, keys, half_bits)
    return index


def permuted_range(seed: int, epoch: int, size: int, start: int, stop: int) -> list[int]:
    """The samples at positions start, ..., stop - 1."""
    if not 0 <= start <= stop <= size:
        raise ValueError(f"range [{start}, {stop}) is outside [0, {size})")
    return [permuted_index(seed, epoch, size, position) for position in range(start, stop)]


def _half_bits(size: int) -> int:
    if size > 2**64:
        raise ValueError(f"size {size} is more than 2**64")
    return max(1, ((size - 1).bit_length() + 1) // 2)


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    # Text, so that any integer is a valid seed and no two pairs collide.
    stream = blake3(f"{_DOMAIN}:{seed}:{epoch}".encode()).digest(length=8 * _ROUNDS)
    return tuple(int.from_bytes(stream[i : i + 8], "little") for i in range(0, len(stream), 8))


def _feistel(value: int, keys: tuple[int, ...], half_bits: int) -> int:
    left, right = value >> half_bits, value & ((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) >> (64 - half_bits))
    return (left << half_bits) | right


def _mix(x: int) -> int:
    """The 64-bit finalizer of splitmix64: every input bit reaches every output bit."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
