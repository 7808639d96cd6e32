"""Working memory of the codecs, taken once per thread; from any tensor to a flat one, and from bytes to tensors.

Called by: the codecs, and what is calculated with them.
Must not know: formats, scales, levels.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from farflung.compression.payload import MAX_ELEMENTS

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


def flat(chunk_n: Tensor) -> Tensor:
    """One dimension, contiguous, without gradient; copied only where it must be."""
    if chunk_n.dtype not in _INPUTS:
        raise ValueError(f"codecs encode fp32, bf16 and fp16, not {chunk_n.dtype}")
    if chunk_n.numel() > MAX_ELEMENTS:
        raise ValueError(f"a chunk of {chunk_n.numel()} values is longer than {MAX_ELEMENTS}")
    return chunk_n.detach().reshape(-1).contiguous()


def from_bytes(part: NDArray[np.generic], device: torch.device) -> Tensor:
    """u8 [bytes], to be read only: on a CPU it is the frame's own memory, which may be a `bytes` object."""
    try:
        shared = from_dlpack(part.view(np.uint8))
    except BufferError:  # a numpy that lends no read-only memory
        shared = torch.from_numpy(part.view(np.uint8).copy())
    return shared.to(device)
