"""The owner's sum: the weighted mean of one chunk, in fp32, in fixed member order, encoded once.

Called through the Merge effect.  Every operation is elementary and separately rounded, so that a second
owner, on other hardware, ends with identical bytes (P1).  Knows nothing of who the members are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farflung.compression.codec import Codec, codec_of
from farflung.compression.tiles import scratch
from farflung.protocol.frames import Payload

_LARGEST = torch.finfo(torch.float32).max


def merged_chunk(
    gather: Codec, elements: int, payloads: Sequence[Payload], weights: Sequence[float]
) -> bytes:
    """encode(sum_i w_i * decode(x_i)); the weights sum to 1 and are exactly representable in fp32.

    Each payload says in which codec it is, and was checked against what the plan gives its sender.
    """
    total_n = scratch("merge", elements, torch.float32, torch.device("cpu")).zero_()
    for payload, weight in zip(payloads, weights, strict=True):
        # Two roundings on purpose: multiply, then add.  `add(alpha=...)` may fuse them on some machines.
        codec_of(payload).decode_add(payload, weight, total_n)
    # Each value is finite, but a hostile one near the largest could make the sum overflow: it is held there.
    return gather.encode(total_n.clamp_(-_LARGEST, _LARGEST))
