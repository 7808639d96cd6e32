"""The owner's sum: the weighted mean of one chunk, in fp32, in fixed member order, encoded once.

Called through the Merge effect.  Every operation is elementary and separately rounded, so that a second
owner, on other hardware, ends with identical bytes (P1).  Knows nothing of who the members are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farflung.collectives.frames import Payload
from farflung.compression.codec import Codec

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Codecs:
    """How a run's bytes travel, each way."""

    scatter: Codec  # contributions
    gather: Codec  # results


def merged_chunk(
    codecs: Codecs, elements: int, payloads: Sequence[Payload], weights: Sequence[float]
) -> bytes:
    """encode(sum_i w_i * decode(x_i)); the weights sum to 1 and are exactly representable in fp32."""
    total_n = torch.zeros(elements, dtype=torch.float32)
    for payload, weight in zip(payloads, weights, strict=True):
        # Two roundings on purpose: multiply, then add.  `add(alpha=...)` may fuse them on some machines.
        codecs.scatter.decode_add(payload, weight, total_n)
    # Each value is finite, but a hostile one near the largest could make the sum overflow: it is held there.
    return codecs.gather.encode(total_n.clamp_(-_LARGEST, _LARGEST))
