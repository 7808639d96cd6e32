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
from torch.utils.dlpack import from_dlpack

from farflung.compression.payload import MAX_ELEMENTS, NonFinite

# In fp32 values.  Steps over whole values go tile by tile: the 512 KB of scratch stay in a 1 MB second-level cache, the
# input and the codes stream through it.  Steps over one number for each block are too short for that; they take a
# span at once, whose 4 MB are still in the third-level cache when the tiles come back to them.
_CPU_TILE, _CPU_SPAN = 1 << 17, 1 << 20
# A GPU wants few and large launches; this only bounds the scratch (64 MB each).
_DEVICE_SPAN = 1 << 24

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
    return _CPU_TILE if device.type == "cpu" else _DEVICE_SPAN


def span_length(device: torch.device) -> int:
    return _CPU_SPAN if device.type == "cpu" else _DEVICE_SPAN


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


def split(values_rb: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tile by tile the parts of tensors with as many rows.

    All views in one call for each tensor: a slice from Python costs as much as an operation on a tile.
    """
    step = max(1, tile_length(values_rb.device) // values_rb.shape[1])
    return zip(*(torch.split(each, step) for each in (values_rb, *others)), strict=True)


def work_for(values_rb: Tensor) -> Tensor:
    """fp32 scratch for the tiles of `split(values_rb)`; the same memory at each call."""
    block = values_rb.shape[1]
    rows = min(len(values_rb), max(1, tile_length(values_rb.device) // block))
    return scratch("work", rows * block, torch.float32, values_rb.device).view(rows, block)


def fitting(work_tb: Tensor, tile_tb: Tensor) -> Tensor:
    """All of `work_tb`, but for a last tile that is shorter.  A slice costs µs, so none is made in vain."""
    return work_tb if len(work_tb) == len(tile_tb) else work_tb[: len(tile_tb)]


def row_peaks(values_rb: Tensor, peaks_r: Tensor) -> None:
    """The largest magnitude of each row; NaN if one of its values is."""
    work_rb = work_for(values_rb)
    for tile_tb, peaks_t in split(values_rb, peaks_r):
        magnitudes_tb = fitting(work_rb, tile_tb)
        torch.abs(tile_tb, out=magnitudes_tb)
        torch.amax(magnitudes_tb, 1, out=peaks_t)


def fp32_rows(flat_n: Tensor, block: int) -> Iterator[tuple[Tensor, int]]:
    """(fp32 [rows, block], values that count in the last row) span by span.

    The rest that fills no block comes last, alone, padded with zeros.
    """
    whole = flat_n.numel() // block * block
    for start, stop in spans(whole, span_length(flat_n.device) // block * block):
        part = flat_n[start:stop]
        if part.dtype != torch.float32:
            part = scratch("input", stop - start, torch.float32, flat_n.device).copy_(part)
        yield part.view(-1, block), block
    if whole < flat_n.numel():
        padded = scratch("padded", block, torch.float32, flat_n.device).zero_()
        padded[: flat_n.numel() - whole].copy_(flat_n[whole:])
        yield padded.view(1, block), flat_n.numel() - whole


def from_bytes(part: NDArray[np.generic], device: torch.device) -> Tensor:
    """u8 [bytes], to be read only: on a CPU it is the frame's own memory, which may be a `bytes` object."""
    try:
        shared = from_dlpack(part.view(np.uint8))
    except BufferError:  # a numpy that lends no read-only memory
        shared = torch.from_numpy(part.view(np.uint8).copy())
    return shared.to(device)


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
