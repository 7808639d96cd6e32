"""One column of token ids in a parquet file, as the bare integers that a row can be found in.

Owns: what pyarrow is asked for, and what it says when a file is not what was expected.
Called by: token_shards.py, once for each file and machine: the integers go into the shared cache.
Must not know: where a file lies, caches, leases.

A sample is an element of the column that is a list of exactly `length` ids; a column of plain integers is one row of
tokens after the other, as a .bin file is.  pyarrow is imported when the first parquet file is met: nothing else needs
it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np

from farflung.protocol.errors import StoreError, UserError

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
