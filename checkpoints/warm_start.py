"""What a run begins with, where `[start] from` names it: values of the model, and its momentum, if asked.

Called by the founder's agent, and by peers that would rather read than be sent it; and by `farflung init --start`,
which says how it is written into run.toml.  Every value comes by the name of its tensor, so that chunks of another
size, stages cut elsewhere and other fragments do no harm.  It is checked by the pinned hash and by the run's model: who
reads it with success has the same version 0 as everybody, to the bit.  Must not know rounds or peers.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from farflung.checkpoints.checkpoint_manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    CheckpointManifest,
    Saved,
    parse,
)
from farflung.checkpoints.files import Folder
from farflung.checkpoints.store import Store
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import CheckpointError, UserError
from farflung.protocol.manifest import StartSection
from farflung.protocol.model_schema import Fragment, ModelSchema, TensorSpec
from farflung.protocol.outer_numbers import MOMENTUM_PARTS

# ---- tensor file -------------------------------------------------------------------------------------------
# A file of tensors by name (safetensors), read once from its beginning to its end, as it may come over a
# line.
#
# Nothing in the file is executed; its head is bounded, and checked before any value
# is read. What was read is that file only once the last value has come: then its hash has been compared. Must
# not know models.

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


# ---- warm start --------------------------------------------------------------------------------------------

PARAMS, MOMENTUM = 0, 1  # parts of a state
OTHERS_BYTES_MOST = 1 << 30  # of buffers of integers, such as masks


@dataclass(frozen=True)
class Cells:
    """Values in a part of the state that is held: the first of them is so many behind the first that is held."""

    part: int
    at: int
    values: Fp32


def beginning(
    start: StartSection, model: ModelSchema, held: Sequence[Fragment], as_nobody: bool = True
) -> Iterator[Cells]:
    """`held`: fragments that follow on each other.  What is not told is zero.  `as_nobody`: the run has named it, and
    not this machine's owner.

    CheckpointError or UserError: nobody can begin with it; StoreError: it can't be read now.  Nothing of it counts
    before the last value has come.
    """
    parts = 2 if start.momentum == "keep" else 1
    size, first, last = model.chunk_elements, held[0].first, held[-1]
    window = range(first * size, (last.first + last.count) * size)
    places = {spec.name: (spec, at) for spec, at in model.places()}
    for part, found in _values_of(start, model, parts, as_nobody):
        spec, begins = places.get(found.name, (None, 0))
        if spec is None or (part != PARAMS and spec.kind != "param"):
            continue
        at = begins + found.first
        skipped = max(0, window.start - at)
        values = found.values[skipped : max(0, window.stop - at)]
        if len(values):
            yield Cells(part, at + skipped - window.start, values)


def _values_of(
    start: StartSection, model: ModelSchema, parts: int, as_nobody: bool
) -> Iterator[tuple[int, Values]]:
    if not start.is_file:
        yield from _of_checkpoint(start, model, parts, as_nobody)
        return
    names = dict[str, str]()  # in the file, where a tied tensor lies there under its other name only

    def check(stored: Mapping[str, Stored]) -> None:
        there = {each.name: each.shape for each in stored.values() if each.can_learn}
        entries = {spec.name for spec, _ in model.places()}
        for alias, of in model.aliases.items():
            if of in entries and of not in there and alias in there:
                there[of] = there.pop(alias)
                names[alias] = of
        refuse_misfit(start.source, model, there)
        others = sum(each.stop - each.start for each in stored.values() if not each.can_learn)
        if others > OTHERS_BYTES_MOST:  # they are read for the hash alone
            raise UserError(
                f"{start.source}: {others} bytes of it are integers, at most {OTHERS_BYTES_MOST} are read"
            )

    for found in TensorFile(start.source, start.hash, as_nobody).read(check):
        yield PARAMS, Values(names.get(found.name, found.name), found.first, found.values)


def refuse_misfit(where: str, model: ModelSchema, there: Mapping[str, Sequence[int]]) -> None:
    """UserError with the first tensor that the run's model lacks, or has in another shape, or that is not there."""
    entries = {spec.name: spec for spec, _ in model.places()}
    fixed = {spec.name for spec in model.tensors if spec.kind == "frozen"}
    for name, spec in entries.items():
        if name not in there:
            raise UserError(f"{where}: it has no tensor {name!r}, which the run's model has")
        if tuple(there[name]) != spec.shape:
            raise UserError(
                f"{where}: {name!r} is {list(there[name])} there, {list(spec.shape)} in the run's model"
            )
    others = sorted(there.keys() - entries.keys() - fixed - model.aliases.keys())
    if others:
        raise UserError(f"{where}: {others[0]!r} is no tensor of the run's model")


# ---- a checkpoint of a run


def _folder_and_name(source: str) -> tuple[str, str]:
    place, _, name = source.rstrip("/").rpartition("/")
    return place or "/", name


def _manifest_at(source: str, as_nobody: bool = False) -> tuple[CheckpointManifest, str]:
    """And its hash.  Read by its name: a web server lists no folders."""
    place, name = _folder_and_name(source)
    raw = Folder(place, as_nobody).read(name, MANIFEST_NAME, MANIFEST_BYTES_MAX + 1)
    manifest = parse(raw, f"{source}/{MANIFEST_NAME}")
    if manifest.is_stage:
        raise UserError(
            f"{source}: one stage of a model; join them with farflung checkpoint export, and begin with that file"
        )
    return manifest, hash_bytes(raw).hex()


def _of_checkpoint(
    start: StartSection, model: ModelSchema, parts: int, as_nobody: bool
) -> Iterator[tuple[int, Values]]:
    source = start.source.rstrip("/")
    manifest, found = _manifest_at(source, as_nobody)
    if found != start.hash:
        raise CheckpointError(
            f"{source}: its hash is {found}, and [start] hash in run.toml is {start.hash}: it is another "
            "checkpoint than the host named"
        )
    saved = manifest.model
    refuse_misfit(source, model, {spec.name: spec.shape for spec, _ in saved.places()})
    if saved.frozen != model.frozen:
        raise UserError(f"{source}: it was trained beside other frozen parameters than the run's model has")
    if parts > 1 and manifest.form.parts != MOMENTUM_PARTS:
        raise UserError(
            f'{source}: [start] momentum = "keep" expects a checkpoint of a run with [outer] step = "nesterov"'
        )
    place, name = _folder_and_name(source)
    read = _ByTensor(saved)
    for chunk, raw in Store(place, as_nobody).chunks(Saved(name, manifest)):
        state = np.frombuffer(raw, "<f4").reshape(manifest.form.parts, -1)
        if not np.isfinite(state[:parts]).all():
            raise CheckpointError(f"{source}: chunk {chunk} has values that are no numbers")
        for part in range(parts):
            for values in read.of_chunk(chunk, state[part]):
                yield part, values


class _ByTensor:
    """Which tensors lie in which chunk."""

    def __init__(self, model: ModelSchema) -> None:
        self._size = model.chunk_elements
        self._places: list[tuple[TensorSpec, int]] = sorted(model.places(), key=lambda each: each[1])
        self._begins = [at for _, at in self._places]

    def of_chunk(self, chunk: int, values: Fp32) -> Iterator[Values]:
        start, stop = chunk * self._size, (chunk + 1) * self._size
        for spec, at in self._places[max(0, bisect_right(self._begins, start) - 1) :]:
            if at >= stop:
                return
            first, end = max(at, start), min(at + prod(spec.shape), stop)
            if first < end:
                yield Values(spec.name, first - at, values[first - start : end - start])


# ---- how it is written into run.toml


def hash_at(source: str) -> str:
    """Of the one file, or of a checkpoint's manifest, which has the hashes of all the rest."""
    if StartSection.model_construct(source=source).is_file:
        return TensorFile(source).hash()
    return _manifest_at(source.rstrip("/"))[1]
