"""A file of tensors by name (safetensors), read once from its beginning to its end, as it may come over a line.

Called by warm_start.py.  Nothing in the file is executed; its head is bounded, and checked before any value is read.
What was read is that file only once the last value has come: then its hash has been compared.  Must not know models.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from farflung.checkpoints.files import Folder
from farflung.protocol.errors import CheckpointError

HEAD_BYTES_MAX = 64 << 20
PIECE_BYTES = 8 << 20  # a multiple of every size of a value
VALUE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
}  # by the file's names: those that a model can learn in
OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
Fp32 = NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """One tensor, as the head of the file describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # in the body of the file
    stop: int

    @property
    def can_learn(self) -> bool:
        return self.dtype in VALUE_BYTES


@dataclass(frozen=True)
class Values:
    """Some of a tensor's values, one after the other, from the one with this number on."""

    name: str
    first: int
    values: Fp32


class TensorFile:
    """`url`: of the file; `expected`: its blake3 in hexadecimal digits, empty where it is to be found out; `as_nobody`:
    a run has named it, and not this machine's owner."""

    def __init__(self, url: str, expected: str = "", as_nobody: bool = False) -> None:
        path, mark, query = url.partition("?")
        place, _, name = path.rpartition("/")
        self._folder, self._name = Folder(place or "/", as_nobody), name + mark + query
        self._url, self._expected = url, expected

    def hash(self) -> str:
        """Of all of it."""
        hasher, ended = blake3(), False
        sizes = itertools.takewhile(lambda _: not ended, itertools.repeat(PIECE_BYTES))
        for piece in self._folder.pieces("", self._name, sizes):
            hasher.update(piece)
            ended = not piece
        return hasher.hexdigest()

    def read(self, check: Callable[[Mapping[str, Stored]], None]) -> Iterator[Values]:
        """`check` is told what is in it before any value is read, and raises what is wrong with that."""
        hasher, due = blake3(), list[int]()
        pieces = self._folder.pieces("", self._name, iter(due.pop, None))  # as long as it is asked for one

        def take(size: int) -> bytes:
            piece = b""
            while len(piece) < size:  # some places give less than they are asked for
                due.append(size - len(piece))
                if not (part := next(pieces)):
                    raise CheckpointError(f"{self._url}: it ends before all of it has come")
                piece += part
            hasher.update(piece)
            return piece

        length = int.from_bytes(take(8), "little")
        if not 2 <= length <= HEAD_BYTES_MAX:
            raise CheckpointError(f"{self._url}: not a safetensors file")
        stored = self._head(take(length))
        check({each.name: each for each in stored})
        for each in stored:
            yield from self._values(each, take)
        due.append(1)
        if next(pieces):
            raise CheckpointError(f"{self._url}: longer than its head says")
        if hasher.hexdigest() != self._expected:
            raise CheckpointError(
                f"{self._url}: its hash is {hasher.hexdigest()}, and [start] hash in run.toml is {self._expected}: "
                "it is another file than the host named"
            )

    def _head(self, raw: bytes) -> list[Stored]:
        """In the order of the file; each tensor begins where the one before it ends."""
        try:
            table = json.loads(raw)
            rows = sorted(
                (_stored(name, row) for name, row in table.items() if name != "__metadata__"),
                key=lambda each: (each.start, each.stop),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{self._url}: not a safetensors file: its head is damaged") from None
        at = 0
        for row in rows:
            each = VALUE_BYTES.get(row.dtype, OTHER_BYTES.get(row.dtype))
            fits = each is None or row.stop - row.start == math.prod(row.shape) * each
            if row.start != at or row.stop < at or min(row.shape, default=0) < 0 or not fits:
                raise CheckpointError(
                    f"{self._url}: not a safetensors file: {row.name!r} lies where it can't"
                )
            at = row.stop
        return rows

    def _values(self, stored: Stored, take: Callable[[int], bytes]) -> Iterator[Values]:
        first = 0
        for at in range(stored.start, stored.stop, PIECE_BYTES):
            raw = take(min(PIECE_BYTES, stored.stop - at))
            if not stored.can_learn:
                continue
            values = as_fp32(raw, stored.dtype)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{self._url}: {stored.name!r} has values that are no numbers")
            yield Values(stored.name, first, values)
            first += len(values)


def _stored(name: str, row: dict[str, Any]) -> Stored:
    start, stop = row["data_offsets"]
    shape = tuple(row["shape"])
    if not all(isinstance(each, int) for each in (start, stop, *shape)) or not isinstance(row["dtype"], str):
        raise ValueError("no numbers")
    return Stored(name, row["dtype"], shape, start, stop)


def as_fp32(raw: bytes, dtype: str) -> Fp32:
    """Rounded where fp32 is less: to nearest even, as everywhere."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    names = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    with np.errstate(over="ignore"):  # what leaves fp32 is no number there, which is looked for
        return np.frombuffer(raw, names[dtype]).astype(np.float32)
