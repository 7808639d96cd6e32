"""Working memory of the codecs: cache-sized tiles, scratch that is taken once per thread, and finite checks.

Owns: how long a tile is, the scratch buffers, the way from any tensor to flat fp32 tiles and from bytes to tensors.
Called by: the codecs.
Must not know: formats, scales, levels.

Torch runs one operation after the other, each over its whole operands.  Over a whole chunk every step would go
through main memory; over a tile of this size the steps after the first find their operands in the second-level
cache, and with `out=` into kept scratch nothing is allocated: five to ten times the speed of the plain form.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.compression.wire import MAX_ELEMENTS, NonFinite

# Of fp32 values.  256 KB leave room in a 1 MB cache for the input, the scratch and the codes of a tile.
_CPU_TILE = 1 << 16
# A GPU wants few and large launches; this only bounds the scratch (64 MB each).
_DEVICE_TILE = 1 << 24

_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}


_scratch = _Scratch()


def scratch(role: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count], with whatever it held before.  One buffer for each role, thread and device."""
    size = count * dtype.itemsize
    buffer = _scratch.buffers.get((role, device))
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(-(-size // 4096) * 4096, dtype=torch.uint8, device=device)
        _scratch.buffers[(role, device)] = buffer
    return buffer[:size].view(dtype)


def tile_length(device: torch.device) -> int:
    return _CPU_TILE if device.type == "cpu" else _DEVICE_TILE


def flat(chunk_n: Tensor) -> Tensor:
    """One dimension, contiguous, without gradient; copied only where it must be."""
    if chunk_n.dtype not in _INPUTS:
        raise ValueError(f"codecs encode fp32, bf16 and fp16, not {chunk_n.dtype}")
    if chunk_n.numel() > MAX_ELEMENTS:
        raise ValueError(f"a chunk of {chunk_n.numel()} values is longer than {MAX_ELEMENTS}")
    return chunk_n.detach().reshape(-1).contiguous()


def spans(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces of `step`, the last one shorter."""
    for start in range(0, count, step):
        yield start, min(start + step, count)


def fp32_rows(flat_n: Tensor, block: int) -> Iterator[tuple[Tensor, int]]:
    """(fp32 [rows, block], values that count in the last row) tile by tile.

    The rest that fills no block comes last, alone, padded with zeros.
    """
    whole = flat_n.numel() // block * block
    step = max(1, tile_length(flat_n.device) // block) * block
    for start, stop in spans(whole, step):
        part = flat_n[start:stop]
        if part.dtype != torch.float32:
            part = scratch("input", stop - start, torch.float32, flat_n.device).copy_(part)
        yield part.view(-1, block), block
    if whole < flat_n.numel():
        padded = scratch("padded", block, torch.float32, flat_n.device).zero_()
        padded[: flat_n.numel() - whole].copy_(flat_n[whole:])
        yield padded.view(1, block), flat_n.numel() - whole


def from_bytes(part: NDArray[np.generic], role: str, device: torch.device) -> Tensor:
    """A writable copy in scratch: torch would warn of a view on a frame's read-only bytes, and rightly."""
    source = part.view(np.uint8)
    copied = scratch(role, source.nbytes, torch.uint8, torch.device("cpu"))
    copied.numpy()[:] = source
    return copied if device.type == "cpu" else copied.to(device)


def to_bytes(header: bytes, *parts: Tensor) -> bytes:
    return b"".join([header, *(part.cpu().view(torch.uint8).numpy().data for part in parts)])


def refuse_non_finite(flat_n: Tensor, peaks: Tensor) -> None:
    """`peaks`: largest magnitudes that cover all of `flat_n`; a maximum is NaN if one of its values is."""
    if peaks.numel() == 0 or bool(torch.isfinite(peaks.amax())):
        return
    index = int(torch.nonzero(~torch.isfinite(flat_n))[0])
    raise NonFinite(index, float(flat_n[index]))


def peaks_of(flat_n: Tensor) -> Tensor:
    """The largest magnitude of each tile [tiles], NaN and infinities included."""
    step = tile_length(flat_n.device)
    peaks = torch.empty(-(-flat_n.numel() // step), dtype=flat_n.dtype, device=flat_n.device)
    for place, (start, stop) in enumerate(spans(flat_n.numel(), step)):
        magnitudes = scratch("magnitudes", stop - start, flat_n.dtype, flat_n.device)
        torch.abs(flat_n[start:stop], out=magnitudes)
        torch.amax(magnitudes, 0, out=peaks[place])
    return peaks
