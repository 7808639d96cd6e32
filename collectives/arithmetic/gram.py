"""The dot products of all contributions to one chunk: what norms and directions are judged by (P9).

Called at a chunk's owner through the Weigh effect.  Their sums over all chunks give the exact norms and cosines of
whole contributions.  Nothing here needs equal bits on all machines: the coordinator decides once, by what owners
tell it, and everybody merges with the weights that it decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from farflung.compression.codec import codec_of
from farflung.compression.native import Products, compiled_for, fp32_dots
from farflung.compression.payload import HEADER_BYTES, check_header
from farflung.compression.scratch import from_bytes, scratch
from farflung.protocol.frames import Payload

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
