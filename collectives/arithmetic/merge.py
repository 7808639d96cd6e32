"""The owner's sum: the weighted mean of one chunk, in fp32, in fixed member order, encoded once.

Called through the Merge effect.  Every operation is elementary and separately rounded, so that a second
owner, on other hardware, ends with identical bytes (P1).  Knows nothing of who the members are.

Here too: how long a result is, where a batch's gradient is clipped, by the same rule (the Measure effect).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farflung.compression.codec import Codec, codec_of
from farflung.compression.scratch import scratch
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


def square_length(elements: int, payload: Payload) -> float:
    """The sum of the squares of a result's values: of the decoded ones, which are what everybody applies.

    The square of an fp32 number is exact in fp64, and none of these leaves it.  Halves are added to each other, element
    by element, until one is left: so the order is written down, and every machine has the same bits.
    """
    values_n = scratch("length", elements, torch.float32, torch.device("cpu"))
    squares_n = codec_of(payload).decode(payload, elements, values_n).double()
    squares_n.mul_(squares_n)
    while (count := squares_n.numel()) > 1:
        half = count // 2
        sums_n = squares_n[:half] + squares_n[half : 2 * half]
        if count % 2:
            sums_n[0] += squares_n[-1]
        squares_n = sums_n
    return float(squares_n.item())
