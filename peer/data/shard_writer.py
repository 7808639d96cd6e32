"""Text to token shards: what `farflung data prepare` writes, and where it goes on after it was stopped.

Owns: which documents there are in a file, which of them are held out, and the files that ids are written to.  A shard
is written aside and gets its name when it is whole; after each one a small file says how far it is, so whoever stops it
loses minutes.  The tokenizer is the caller's: it maps texts to ids.  Must not know the command line or manifests.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from farflung.protocol.errors import UserError

SHARD_TOKENS = 100_000_000
STATE = "prepared.json"
HELD_OUT = "held_out.bin"
ENDINGS = (".txt", ".jsonl", ".parquet")
PIECE_CHARS = 64 * 1024  # of a longer text: a document each, up to the end of a line
LONG_BYTES = 1 << 20  # of such a file
BATCH_CHARS = 4 << 20  # of documents that are encoded at once

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class ShardRecipe:
    """All that decides what the shards hold: another one needs another folder."""

    files: tuple[tuple[str, int], ...]  # name and bytes
    tokenizer: str  # its hash
    vocab: int
    end: int  # the id that ends a document
    held_out: float  # the share of documents that is not for training

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab <= 1 << 16 else "uint32"


@dataclass
class Written:
    """How far it is, and what there is until then."""

    file: int = 0  # the first one that is not done,
    document: int = 0  # and of this one so many documents are
    shards: list[int] = field(default_factory=list)  # tokens of each
    held_out: int = 0  # tokens
    text_bytes: int = 0
    done: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.shards)

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, self.tokens + self.held_out)


class ShardWriter:
    def __init__(self, folder: Path, recipe: ShardRecipe, shard_tokens: int = SHARD_TOKENS) -> None:
        """UserError where the folder holds what was made by another recipe."""
        self.folder, self.recipe, self._shard_tokens = folder, recipe, shard_tokens
        self.written = self._known()
        self._pending: list[np.ndarray[Any, Any]] = []
        self._pending_tokens = 0

    def _known(self) -> Written:
        state = self.folder / STATE
        try:
            found = json.loads(state.read_text(encoding="utf-8"))
            recipe, written = found["recipe"], Written(**found["written"])
        except FileNotFoundError:
            # Stopped before the first shard it left nothing but what it wrote aside.
            others = [path for path in _in(self.folder) if not path.name.endswith(".part")]
            if others:
                raise UserError(f"{self.folder}: not empty; name a new folder") from None
            return Written()
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{state}: not readable; remove the folder, or name another one") from None
        if recipe != json.loads(json.dumps(asdict(self.recipe))):
            raise UserError(
                f"{self.folder}: made from other files, or with another tokenizer or --held-out; name a new folder"
            )
        return written

    def run(self, paths: Sequence[Path], encode: Encode, tell: Callable[[Written], None]) -> Written:
        """`paths`: the recipe's files.  `tell`: called after each batch."""
        written, held_out = self.written, self._held_out_so_far()
        if written.done:
            return written
        self.folder.mkdir(parents=True, exist_ok=True)
        with held_out.open("r+b" if held_out.exists() else "w+b") as aside:
            # What came after the last whole shard is made again.
            aside.truncate(written.held_out * np.dtype(self.recipe.dtype).itemsize)
            aside.seek(0, os.SEEK_END)
            for number in range(written.file, len(paths)):
                written.file = number
                for batch in batches(documents(paths[number]), written.document):
                    for text, ids in zip(batch, encode(batch), strict=True):
                        self._add(text, [*ids, self.recipe.end], aside)
                    written.document += len(batch)
                    if self._pending_tokens >= self._shard_tokens:
                        aside.flush()
                        os.fsync(aside.fileno())
                        self._write_shard()
                    tell(written)
                written.document = 0
            written.file = len(paths)
            aside.flush()
            os.fsync(aside.fileno())
        if self._pending_tokens:
            self._write_shard()
        if not written.shards or not written.held_out:
            raise UserError(
                f"too little text: {written.tokens:,} tokens to train on and {written.held_out:,} held out; give more "
                "files, or a larger --held-out"
            )
        held_out.replace(self.folder / HELD_OUT)
        written.done = True
        self._save()
        return written

    def _held_out_so_far(self) -> Path:
        return self.folder / f".{HELD_OUT}.part"

    def _add(self, text: str, ids: Sequence[int], held_out: Any) -> None:
        raw, array = text.encode(), np.array(ids, dtype=np.uint32)
        if int(array.max()) >= self.recipe.vocab:
            raise UserError(f"the tokenizer gave id {array.max()}, and its vocabulary is {self.recipe.vocab}")
        array = array.astype(np.dtype(self.recipe.dtype).newbyteorder("<"))
        self.written.text_bytes += len(raw)
        if _chance(raw) < self.recipe.held_out:
            held_out.write(array.tobytes())
            self.written.held_out += len(array)
        else:
            self._pending.append(array)
            self._pending_tokens += len(array)

    def _write_shard(self) -> None:
        """Whole documents: a shard is a little longer than asked for."""
        name = f"train-{len(self.written.shards):05d}.bin"
        part = self.folder / f".{name}.part"
        with part.open("wb") as file:
            for array in self._pending:
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / name)
        self.written.shards.append(self._pending_tokens)
        self._pending, self._pending_tokens = [], 0
        self._save()

    def _save(self) -> None:
        part = self.folder / f".{STATE}.part"
        content = {"recipe": asdict(self.recipe), "written": asdict(self.written)}
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        part.replace(self.folder / STATE)


def _in(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []


def _chance(raw: bytes) -> float:
    """0..1, of a document by its content: the same one is held out in each preparation, and never trained on twice."""
    return int.from_bytes(blake3(raw).digest(length=6), "little") / 2**48


def batches(texts: Iterator[str], skip: int) -> Iterator[list[str]]:
    """Without the first `skip`."""
    batch: list[str] = []
    chars = 0
    for text in islice(texts, skip, None):
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


# ---- documents ---------------------------------------------------------------------------------------------


def documents(path: Path) -> Iterator[str]:
    """A .txt file, or pieces of a long one; the `text` of each line of .jsonl; the column `text` of .parquet."""
    try:
        if path.suffix == ".jsonl":
            yield from _of_lines(path)
        elif path.suffix == ".parquet":
            yield from _of_rows(path)
        else:
            yield from _of_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None


def _of_text(path: Path) -> Iterator[str]:
    is_long = path.stat().st_size > LONG_BYTES
    piece: list[str] = []
    chars = 0
    with path.open(encoding="utf-8") as file:
        while line := file.readline(PIECE_CHARS):
            piece.append(line)
            chars += len(line)
            if is_long and chars >= PIECE_CHARS:
                yield "".join(piece)
                piece, chars = [], 0
    if (text := "".join(piece)).strip():
        yield text


def _of_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f'{path}, line {number}: expected an object with a "text"') from None
            if isinstance(text, str) and text.strip():
                yield text


def _of_rows(path: Path) -> Iterator[str]:
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow: pip install 'farflung[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise UserError(
                f'{path}: expected a column "text", found {", ".join(file.schema_arrow.names[:8])}'
            )
        for rows in file.iter_batches(1024, columns=["text"]):
            yield from (text for text in rows.column(0).to_pylist() if isinstance(text, str) and text.strip())
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: no parquet file: {str(error).splitlines()[0]}") from None
