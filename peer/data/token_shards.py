"""Tokenised shards as a data set: .bin files of raw integers and .npy arrays, read at random.

Called by users, who give it to `run.batches`.  Must not know leases or models.
Files are mapped, not read: what is not leased costs neither memory nor disk, and workers share one page cache.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from farflung.peer.data.text_lines import TextPath
from farflung.protocol.errors import UserError

INTEGERS = ("uint8", "uint16", "int16", "uint32", "int32", "int64")


class TokenShards(Dataset[Tensor]):
    """Rows of `length` token ids [length], int64, out of one file or several; what is left at a file's end is not used.

    `dtype` is that of .bin files, which have nothing but integers in them, the lowest byte first ("uint16" for
    vocabularies up to 65,536, "uint32" above).  Every peer needs the same files in the same order.
    """

    def __init__(self, paths: TextPath | Iterable[TextPath], length: int, dtype: str = "uint16") -> None:
        if length < 1:
            raise UserError(f"TokenShards: length must be at least 1, found {length}")
        if dtype not in INTEGERS:
            raise UserError(f"TokenShards: dtype must be one of {', '.join(INTEGERS)}, found {dtype!r}")
        listed: list[TextPath] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        self.paths = [os.fspath(path) for path in listed]
        self.length, self.dtype = length, dtype
        self._shards = [self._map(path) for path in self.paths]
        # So many rows lie before shard 0, 1, 2, ...
        self._before = [0, *accumulate(len(shard) // length for shard in self._shards)]
        if not self._before[-1]:
            raise UserError(f"TokenShards: no row of {length} tokens in {', '.join(self.paths) or 'no file'}")

    def _map(self, path: str) -> Any:
        try:
            if path.endswith(".npy"):
                shard = np.lib.format.open_memmap(path, mode="r")  # which unpickles nothing
            else:
                whole = np.dtype(self.dtype).newbyteorder("<")
                shard = np.memmap(path, whole, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot read as {self.dtype} tokens: {error}") from None
        if shard.ndim != 1 or shard.dtype.kind not in "ui":
            raise UserError(
                f"{path}: expected one row of integers, found {shard.dtype} of shape {list(shard.shape)}"
            )
        return shard

    def __len__(self) -> int:
        return self._before[-1]

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} is outside [0, {len(self)})")
        shard = bisect_right(self._before, index) - 1
        start = (index - self._before[shard]) * self.length
        row = self._shards[shard][start : start + self.length]
        return torch.from_numpy(row.astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return [self[index] for index in indices]

    def __getstate__(self) -> dict[str, object]:
        """A worker maps the files anew; a copy of their contents would be sent otherwise."""
        return self.__dict__ | {"_shards": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._shards = [self._map(path) for path in self.paths]
