"""The owner's sum: the weighted mean of one chunk, in fp32, in fixed member order, encoded once.

Called through the Merge effect.  Every operation is elementary and separately rounded, so that a second
owner, on other hardware, ends with identical bytes (P1).  Knows nothing of who the members are.

Here too: how long a result is, where a batch's gradient is clipped, by the same rule (the Measure effect).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from farflung.compression.codec import Codec, codec_of
from farflung.compression.native import Products, compiled_for, fp32_dots, from_bytes, scratch
from farflung.compression.plain_codecs import HEADER_BYTES, Floats, check_header
from farflung.protocol.extensions import MERGE_RULE, loaded
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import POLICIES

_LARGEST = torch.finfo(torch.float32).max


MergeRule = Callable[[Floats, Floats], Floats]


def rule_of(policy: str) -> MergeRule | None:
    """None: the weighted mean, which is the rule of our own policies."""
    rule: MergeRule | None = None if policy in POLICIES else loaded(MERGE_RULE, policy)
    return rule


def merged_chunk(
    gather: Codec,
    elements: int,
    payloads: Sequence[Payload],
    weights: Sequence[float],
    *,
    rule: MergeRule | None = None,
) -> bytes:
    """encode(sum_i w_i * decode(x_i)); the weights sum to 1 and are exactly representable in fp32.

    Each payload says in which codec it is, and was checked against what the plan gives its sender.
    """
    if rule is not None:
        return gather.encode(_by_rule(rule, elements, payloads, weights))
    total_n = scratch("merge", elements, torch.float32, torch.device("cpu")).zero_()
    for payload, weight in zip(payloads, weights, strict=True):
        # Two roundings on purpose: multiply, then add.  `add(alpha=...)` may fuse them on some machines.
        codec_of(payload).decode_add(payload, weight, total_n)
    # Each value is finite, but a hostile one near the largest could make the sum overflow: it is held there.
    return gather.encode(total_n.clamp_(-_LARGEST, _LARGEST))


@np.errstate(all="ignore")  # what hostile values make of it has the same bits everywhere
def _by_rule(rule: MergeRule, elements: int, payloads: Sequence[Payload], weights: Sequence[float]) -> Tensor:
    """Of an installed package, which sees all contributions to the chunk at once, decoded."""
    values_mn = torch.empty(len(payloads), elements, dtype=torch.float32)
    for row_n, payload in zip(values_mn, payloads, strict=True):
        codec_of(payload).decode(payload, elements, row_n)
    merged_n = np.ascontiguousarray(rule(values_mn.numpy(), np.asarray(weights, np.float32)), np.float32)
    return torch.nan_to_num(torch.from_numpy(merged_n), nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


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


# The dot products of all contributions to one chunk: what norms and directions are judged by (P9).
#
# Called at a chunk's owner through the Weigh effect.  Their sums over all chunks give the exact norms and cosines of
# whole contributions.  Nothing here needs equal bits on all machines: the coordinator decides once, by what owners
# tell it, and everybody merges with the weights that it decided.

_TILE = 4096  # values: sums this short are precise enough in fp32
_CPU = torch.device("cpu")


def dot_products(elements: int, payloads: Sequence[Payload]) -> tuple[float, ...]:
    """The upper triangle, row by row, of <x_i, x_j> over decoded values.  Each payload was checked."""
    found = _compiled(elements, payloads)
    if found is None or not np.isfinite(found).all():
        # Each value is finite, but the square of a hostile one need not be, in fp32.
        found = _by_torch(elements, payloads)
    return tuple(found.tolist())


def _compiled(elements: int, payloads: Sequence[Payload]) -> Products | None:
    """In one pass that decodes into the fastest memory; None where there is no such pass."""
    codec = codec_of(payloads[0])
    if any(codec_of(payload) is not codec for payload in payloads):
        return None
    for payload in payloads:  # what is read below depends on the length, and on nothing else in them
        check_header(payload, codec.format, elements, codec.payload_bytes(elements))
    if codec.name == "fp32":
        return fp32_dots(payloads, elements)
    compiled = compiled_for(codec)
    return compiled.dots(payloads, elements) if compiled is not None else None


def _by_torch(elements: int, payloads: Sequence[Payload]) -> Products:
    count = len(payloads)
    values_mn = scratch("gram", count * elements, torch.float32, _CPU).view(count, elements)
    for row_n, payload in zip(values_mn, payloads, strict=True):
        _decode(payload, row_n)
    total_mm = _products(values_mn)
    if not bool(torch.isfinite(total_mm).all()):
        total_mm = _products(values_mn.double())
    rows, columns = torch.triu_indices(count, count)
    return total_mm[rows, columns].numpy()


def _decode(payload: Payload, out_n: Tensor) -> None:
    codec = codec_of(payload)
    # Only copied: what is not finite shows in the products, and so at the coordinator.
    if codec.name == "fp32":
        check_header(payload, codec.format, out_n.numel(), codec.payload_bytes(out_n.numel()))
        out_n.copy_(from_bytes(np.frombuffer(payload, np.uint8, -1, HEADER_BYTES), _CPU).view(torch.float32))
    else:
        codec.decode(payload, out_n.numel(), out_n)


def _products(values_mn: Tensor) -> Tensor:
    """fp64 [m, m]: tile by tile in the precision of the values, summed in fp64."""
    count, elements = values_mn.shape
    whole = elements // _TILE * _TILE
    rest_mr = values_mn[:, whole:]
    total_mm = (rest_mr @ rest_mr.T).double()
    if whole:
        tiles_kmt = values_mn[:, :whole].view(count, -1, _TILE).transpose(0, 1)
        total_mm += torch.bmm(tiles_kmt, tiles_kmt.transpose(1, 2)).sum(0, dtype=torch.float64)
    return total_mm
