"""Tokenised shards as a data set, read at random: .bin files of raw integers, .npy arrays, a column of parquet files.

Called by users, who give it to `run.batches`, and for the data that a run's manifest names.  Must not know leases or
models.

Files on a disk are mapped, not read: what is not leased costs neither memory nor disk, and workers share one page
cache.  Files elsewhere are fetched once for all trainers of the machine, if all of them fit into its cache; otherwise
only the rows that are leased are asked for, which no cache would make fewer: each is read once.  Of parquet, in which
no row can be found alone, the column goes into the cache as bare integers.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import Dataset

from farflung.peer.data.data_files import FILES_MOST, DataFile, DataFiles, NoRoom, Options, SharedCache
from farflung.peer.data.text_lines import TextPath
from farflung.peer.settings import default_cache, own_config
from farflung.protocol.caps import si
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.host_memory import available_bytes

# ---- parquet column ----------------------------------------------------------------------------------------
# One column of token ids in a parquet file, as the bare integers that a row can be found in.
#
# Owns: what pyarrow is asked for, and what it says when a file is not what was expected. Called
# once for each file and machine: the integers go into the shared cache. Must not know: where
# a file lies, caches, leases.
#
# A sample is an element of the column that is a list of exactly `length` ids; a column of plain integers is
# one row of tokens after the other, as a .bin file is. pyarrow is imported when the first parquet file is
# met: nothing else needs it.

ROWS_AT_ONCE = 4096


class ParquetColumn(NamedTuple):
    dtype: str  # numpy's, the lowest byte first
    tokens: int


def column_of(file: IO[bytes], url: str, name: str, length: int) -> ParquetColumn:
    """What its head says; the values are not read."""
    pa = _pyarrow(url)
    with _told(pa, url):
        opened = pa.parquet.ParquetFile(file)
        schema, rows = opened.schema_arrow, opened.metadata.num_rows
    if name not in schema.names:
        raise UserError(f"{url}: no column {name!r}; it has {', '.join(schema.names[:20])}: say column=")
    kind = schema.field(name).type
    is_list = _is_list(pa, kind)
    value = kind.value_type if is_list else kind
    if not pa.types.is_integer(value):
        raise UserError(f"{url}: column {name!r} is {kind}; expected integers, or lists of {length} of them")
    if pa.types.is_fixed_size_list(kind) and kind.list_size != length:
        raise UserError(f"{url}: the rows of {name!r} have {kind.list_size} tokens, expected {length}")
    dtype = np.dtype(value.to_pandas_dtype()).newbyteorder("<").str
    return ParquetColumn(dtype, rows * length if is_list else rows)


def integers(file: IO[bytes], url: str, name: str, length: int, dtype: str) -> Iterator[bytes]:
    """All of the column, a few thousand rows at a time; UserError for the first row that has another length."""
    pa = _pyarrow(url)
    with _told(pa, url):
        batches = pa.parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE, columns=[name])
    row = 0
    while True:
        with _told(pa, url):
            batch = next(batches, None)
        if batch is None:
            return
        column = batch.column(0)
        if column.null_count:
            where = row + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise UserError(f"{url}: row {where} of {name!r} is empty")
        if _is_list(pa, column.type):
            counts = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False))
            if (wrong := np.flatnonzero(counts != length)).size:
                first = int(wrong[0])
                raise UserError(
                    f"{url}: row {row + first} of {name!r} has {counts[first]} tokens, expected {length} in every row; "
                    "cut the texts into rows of one length first"
                )
            column = column.flatten()
        row += len(batch)
        yield np.asarray(column.to_numpy(zero_copy_only=False)).astype(dtype, copy=False).tobytes()


def _is_list(pa: Any, kind: Any) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _pyarrow(url: str) -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise UserError(f"{url}: parquet needs pyarrow: pip install 'farflung[parquet]'") from None


@contextmanager
def _told(pa: Any, url: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise UserError(f"{url}: cannot be read as parquet: {first}") from None
    except OSError as error:
        raise StoreError(f"{url}: {next(iter(str(error).splitlines()), 'cannot be read')}") from None


# ---- token shards ------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

INTEGERS = ("uint8", "uint16", "int16", "uint32", "int32", "int64")
NPY_HEAD_BYTES = 4096  # far more than the head of a row of integers has
MAPPED_MOST = 256  # each holds a file open, of which a process may have about a thousand
ID_BYTES = 8  # of a token in a row
AT_ONCE = 8  # of files whose heads are read, or which are fetched

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Shard:
    file: DataFile
    dtype: str
    offset: int  # of the first token in the file; in the cache's entry, where it is decoded, 0
    tokens: int
    decoded: bool = False  # of the cache's entry alone

    @property
    def width(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def cached_bytes(self) -> int:
        return self.tokens * self.width if self.decoded else self.file.size_bytes


class TokenShards(Dataset[Tensor]):
    """Rows of `length` token ids [length], int64, out of one file or several; what is left at a file's end is not used.

    `paths`: files, folders, or names with stars in them, here or at any URL of fsspec (s3://, https://, ...).  `dtype`
    is that of .bin files, which have nothing but integers in them, the lowest byte first ("uint16" for vocabularies up
    to 65,536, "uint32" above); `column` that of parquet files.  `storage_options`: for the file system of fsspec.
    Every peer needs the same files in the same order.
    """

    def __init__(
        self,
        paths: TextPath | Iterable[TextPath],
        length: int,
        dtype: str = "uint16",
        column: str = "input_ids",
        storage_options: Options | None = None,
    ) -> None:
        listed: list[TextPath] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        places = [os.fspath(path) for path in listed]
        self._begin(places, length, dtype, column, DataFiles(storage_options or {}))

    @classmethod
    def of_run(cls, manifest: Manifest, own_place: str = "") -> TokenShards:
        """What [data] of the run's manifest names.  `own_place`: where this peer has it, on its own word."""
        data = manifest.data
        if data.source in ("", "python-stdlib") and not own_place:
            raise UserError(
                f"[data] source of run '{manifest.run.name}' names no token shards: give run.batches a data set"
            )
        places, files = ([own_place], DataFiles({})) if own_place else (_places(data.source), DataFiles(None))
        return cls._named(manifest, places, files)

    @classmethod
    def held_out_of_run(cls, manifest: Manifest) -> TokenShards:
        """What [eval] names: of the form of [data]."""
        return cls._named(manifest, _places(manifest.eval.source), DataFiles(None))

    @classmethod
    def _named(cls, manifest: Manifest, places: list[str], files: DataFiles) -> TokenShards:
        _refuse_large_batches(manifest)
        made = cls.__new__(cls)
        made._begin(places, manifest.row_tokens, manifest.data.dtype, manifest.data.column, files)
        return made

    def _begin(self, places: list[str], length: int, dtype: str, column: str, files: DataFiles) -> None:
        if length < 1:
            raise UserError(f"TokenShards: length must be at least 1, found {length}")
        if dtype not in INTEGERS:
            raise UserError(f"TokenShards: dtype must be one of {', '.join(INTEGERS)}, found {dtype!r}")
        self.paths, self.length, self.dtype, self.column = places, length, dtype, column
        self._files = files
        own = own_config({})
        self._cache = SharedCache(default_cache(), own.cache_limit)
        self._maps: OrderedDict[int, Any] = OrderedDict()
        self._given_up = False
        found = [each for place in places for each in files.find(place)]
        if len(found) > FILES_MOST:
            raise UserError(f"TokenShards: {len(found)} files in all, at most {FILES_MOST} are taken")
        self._shards = self._side_by_side(self._measured, found)
        # So many rows lie before shard 0, 1, 2, ...
        self._before = [0, *accumulate(shard.tokens // length for shard in self._shards)]
        if not self._before[-1]:
            raise UserError(f"TokenShards: no row of {length} tokens in {', '.join(places) or 'no file'}")
        self._fetch()

    # ---- what is in a file

    def _measured(self, file: DataFile) -> Shard:
        if file.ending == ".parquet":
            with self._files.open(file) as opened:
                dtype, tokens = column_of(opened, file.url, self.column, self.length)
            return Shard(file, dtype, 0, tokens, decoded=True)
        if file.ending == ".npy":
            first = self._files.read([(file, 0, min(NPY_HEAD_BYTES, file.size_bytes))])[0]
            return self._measured_npy(file, first)
        raw = np.dtype(self.dtype).newbyteorder("<")
        if not file.size_bytes:
            raise UserError(f"{file.url}: empty")
        if file.size_bytes % raw.itemsize:
            raise UserError(
                f"{file.url}: {file.size_bytes} bytes are no whole number of {self.dtype} tokens; say dtype="
            )
        return Shard(file, raw.str, 0, file.size_bytes // raw.itemsize)

    def _measured_npy(self, file: DataFile, first: bytes) -> Shard:
        head = io.BytesIO(first)
        try:
            version = np.lib.format.read_magic(head)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read(head)
        except ValueError as error:
            raise UserError(f"{file.url}: cannot read as .npy: {str(error).splitlines()[0]}") from None
        if dtype.kind not in "ui" or len(shape) not in (1, 2):
            raise UserError(
                f"{file.url}: expected integers in one row, or in rows of {self.length}, found {dtype} of shape "
                f"{list(shape)}"
            )
        if len(shape) == 2 and shape[1] != self.length:
            raise UserError(f"{file.url}: its rows have {shape[1]} tokens, expected {self.length}")
        tokens = int(np.prod(shape, dtype=np.int64))
        if head.tell() + tokens * dtype.itemsize != file.size_bytes:
            raise UserError(
                f"{file.url}: damaged: {file.size_bytes} bytes do not hold {tokens} tokens of {dtype}"
            )
        return Shard(file, dtype.str, head.tell(), tokens)

    # ---- the cache

    def _fetch(self) -> None:
        """What the cache can take whole is there before the run is joined: nobody waits for a file in a step."""
        wanted = [
            number for number, shard in enumerate(self._shards) if shard.decoded or not shard.file.is_local
        ]
        total = sum(self._shards[number].cached_bytes for number in wanted)
        self._by_rows = frozenset[int]()
        if not wanted:
            return
        limit = self._cache.limit_bytes
        must = sum(self._shards[number].cached_bytes for number in wanted if self._shards[number].decoded)
        if must > limit:
            raise UserError(
                f"TokenShards: the column {self.column!r} of these parquet files has {must / 1e6:.1f} MB of integers, "
                f"and the cache of shards on this disk may have {limit / 1e6:.1f} MB: raise cache_limit (docs/data.md)"
            )
        if total > limit:
            self._by_rows = frozenset(number for number in wanted if not self._shards[number].decoded)
            log.info("%.1f MB of shards, more than the cache may have: row by row", total / 1e6)
            wanted = [number for number in wanted if number not in self._by_rows]
        log.info("%d shards, %.1f MB: in %s, or fetched now", len(wanted), total / 1e6, self._cache.folder)
        self._side_by_side(self._mapped, wanted)

    def _opened(self, number: int) -> BinaryIO | None:
        shard = self._shards[number]
        if shard.file.is_local and not shard.decoded:
            return open(shard.file.path, "rb")
        return self._entry(number)

    def _entry(self, number: int) -> BinaryIO | None:
        """Named by what is in it: a file that was written again is another one.  None: there is no room for it."""
        shard = self._shards[number]
        file, made_by = shard.file, f"{self.column} {self.length}" if shard.decoded else ""
        name = blake3(f"{file.url}\n{file.mark}\n{file.size_bytes}\n{made_by}".encode()).hexdigest(length=16)
        plain = PurePosixPath(file.path).name[-60:] + (".tokens" if shard.decoded else "")
        readable = "".join(c if c.isalnum() or c in "._" else "-" for c in plain)
        try:
            return self._cache.open(f"{name}-{readable}", shard.cached_bytes, self._bytes_of(shard))
        except NoRoom as error:
            if shard.decoded:
                raise UserError(f"{file.url}: {error}") from None
            log.info("%s: %s: row by row", file.url, error)
            self._by_rows |= {number}
            return None

    def _bytes_of(self, shard: Shard) -> Callable[[], Iterable[bytes]]:
        def decoded() -> Iterable[bytes]:
            with self._files.open(shard.file) as opened:
                yield from integers(opened, shard.file.url, self.column, self.length, shard.dtype)

        def wanted_still() -> Iterable[bytes]:
            for piece in decoded() if shard.decoded else self._files.pieces(shard.file):
                if self._given_up:
                    raise StoreError(f"{shard.file.url}: not fetched to its end")
                yield piece

        return wanted_still

    def _side_by_side(self, act: Callable[[T], R], each_of: Sequence[T]) -> list[R]:
        """In their order.  The threads are gone when it returns: workers are forked from a process that has none."""
        if len(each_of) < 2:
            return [act(one) for one in each_of]
        with ThreadPoolExecutor(min(AT_ONCE, len(each_of))) as pool:
            try:
                return list(pool.map(act, each_of))
            except BaseException:  # the outermost loop over files: after Ctrl-C nobody waits for the others
                self._given_up = True
                raise

    # ---- rows

    def __len__(self) -> int:
        return self._before[-1]

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        rows = np.empty((len(indices), self.length), np.int64)
        elsewhere: list[tuple[int, Shard, int]] = []
        for place, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"row {index} is outside [0, {len(self)})")
            number = bisect_right(self._before, index) - 1
            start = (index - self._before[number]) * self.length
            tokens = None if number in self._by_rows else self._mapped(number)
            if tokens is None:
                elsewhere.append((place, self._shards[number], start))
            else:
                rows[place] = tokens[start : start + self.length]
        if elsewhere:
            self._read_rows(elsewhere, rows)
        return list(torch.from_numpy(rows).unbind(0))

    def _read_rows(self, wanted: list[tuple[int, Shard, int]], rows: Any) -> None:
        """All at the same time: each is a request, whose answer is about as far away as that of the others."""
        ranges = [
            (
                shard.file,
                shard.offset + start * shard.width,
                shard.offset + (start + self.length) * shard.width,
            )
            for _, shard, start in wanted
        ]
        for (place, shard, _), raw in zip(wanted, self._files.read(ranges), strict=True):
            rows[place] = np.frombuffer(raw, shard.dtype)

    def _mapped(self, number: int) -> Any:
        """None: it is not in the cache, which is full of what others use."""
        found = self._maps.get(number)
        if found is not None:
            self._maps.move_to_end(number)
            return found
        shard = self._shards[number]
        try:
            opened = self._opened(number)
            if opened is None:
                return None
            with opened as file:
                # The mapping has a descriptor of its own, and with it the cache's lock.
                found = np.memmap(file, shard.dtype, "r", shard.offset, (shard.tokens,))
        except OSError as error:
            raise UserError(f"{shard.file.url}: cannot read: {error.strerror or error}") from None
        self._maps[number] = found
        if len(self._maps) > MAPPED_MOST:
            self._maps.popitem(last=False)
        return found

    def __getstate__(self) -> dict[str, object]:
        """A worker maps the files anew; a copy of their contents would be sent otherwise."""
        return self.__dict__ | {"_maps": OrderedDict()}


def _places(source: str | tuple[str, ...]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _refuse_large_batches(manifest: Manifest) -> None:
    """Before any file is looked for: the numbers are those of a stranger."""
    rows = manifest.pipeline.micro if manifest.pipeline.batch else manifest.data.batch
    need, free = rows * manifest.row_tokens * ID_BYTES, available_bytes()
    if need > free > 0:
        raise UserError(
            f"run '{manifest.run.name}' does not fit this machine: {rows} rows of {manifest.row_tokens} tokens, which "
            f"it takes at once ([data] batch, length), are {si(need, 'B')}; {si(free, 'B')} are free"
        )
