"""Text to token shards: what `farflung data prepare` writes, and where it goes on after it was stopped.

Owns: which documents there are in a file, which of them are held out, and the files that ids are written to.  A file is
written aside and gets its name when it is whole; after each shard a small file says how far it is, so whoever stops it
loses minutes, and ends with the same bytes.  The tokenizer is the caller's: it maps texts to ids.  Must not know the
command line or manifests.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from farflung.protocol.errors import UserError
from farflung.protocol.process.own_files import sync_folder

SHARD_TOKENS = 100_000_000
STATE = "prepared.json"
# In a folder of its own: OUT/*.bin is what a run trains on, and must not have it.
HELD_OUT = "held_out/held_out.bin"
ENDINGS = (".txt", ".jsonl", ".parquet")
PIECE_CHARS = 64 * 1024  # of a longer text: a document each, up to the end of a line
LONG_BYTES = 1 << 20  # of such a file
BATCH_CHARS = 4 << 20  # of documents that are encoded at once
LOOKED_AT_BYTES = 64 * 1024  # at both ends of a file, to know it again

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class ShardRecipe:
    """All that decides what the shards hold: another one needs another folder."""

    files: tuple[tuple[str, int, str], ...]  # name, bytes, and a hash of both ends
    tokenizer: str  # its hash
    vocab: int
    end: int  # the id that ends a document
    held_out: float  # the share of documents that is not for training

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab <= 1 << 16 else "uint32"

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize


def known_again(path: Path) -> tuple[str, int, str]:
    """A file, as a recipe has it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(LOOKED_AT_BYTES)
        file.seek(max(0, size - LOOKED_AT_BYTES))
        return path.name, size, blake3(first + file.read(LOOKED_AT_BYTES)).hexdigest()[:32]


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
        """UserError where the folder holds what was made by another recipe, or something else."""
        self.folder, self.recipe, self._shard_tokens = folder, recipe, shard_tokens
        self.written = self._known()
        self._pending = 0  # tokens of the shard that is written

    def _known(self) -> Written:
        state = self.folder / STATE
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder}: expected a folder after the texts, found a file")
        try:
            found = json.loads(state.read_text(encoding="utf-8"))
            recipe, written = found["recipe"], Written(**found["written"])
        except (FileNotFoundError, NotADirectoryError):
            files = (path for path in self.folder.rglob("*") if path.is_file())
            if not all(path.name.endswith(".part") for path in files):  # it was stopped as it began
                raise UserError(f"{self.folder}: not empty; name a new folder") from None
            return Written()
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{state}: not readable; name a new folder") from None
        if recipe != json.loads(json.dumps(asdict(self.recipe))):
            told = "made from other files, or with another tokenizer, --end or --held-out"
            raise UserError(f"{self.folder}: {told}; name a new folder")
        return written

    def run(self, paths: Sequence[Path], encode: Encode, tell: Callable[[Written], None]) -> Written:
        """`paths`: the recipe's files.  `tell`: called after each batch."""
        try:
            return self._run(paths, encode, tell)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot write: {error.strerror or error}") from None

    def _run(self, paths: Sequence[Path], encode: Encode, tell: Callable[[Written], None]) -> Written:
        written = self.written
        if written.done or self._lacks_its_name(len(paths)):
            return self._finish()
        (self.folder / HELD_OUT).parent.mkdir(parents=True, exist_ok=True)
        with self._alone(), self._held_out() as held_out:
            self._save()  # whose folder this is
            shard = self._next_shard()
            for number in range(written.file, len(paths)):
                written.file = number
                for batch in batches(documents(paths[number]), written.document):
                    for text, ids in zip(batch, encode(batch), strict=True):
                        self._add(text, [*ids, self.recipe.end], shard, held_out)
                    written.document += len(batch)
                    if self._pending >= self._shard_tokens:
                        _settle(held_out)
                        self._end_shard(shard)
                        shard = self._next_shard()
                    tell(written)
                written.document = 0
            written.file = len(paths)
            _settle(held_out)
            self._end_shard(shard)
        if not written.shards or not written.held_out:
            raise UserError(
                f"too little text: {written.tokens:,} tokens to train on and {written.held_out:,} held out; give more "
                "files, or a larger --held-out, and a new folder"
            )
        self._named(HELD_OUT)
        return self._finish()

    def _lacks_its_name(self, files: int) -> bool:
        """It was stopped when all was written, and nothing but the word for that was missing."""
        held_out, due = self.folder / HELD_OUT, self.written.held_out * self.recipe.token_bytes
        return self.written.file == files and held_out.exists() and held_out.stat().st_size == due > 0

    def _finish(self) -> Written:
        if not self.written.done:
            self.written.done = True
            self._save()
        return self.written

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """UserError where another process writes here."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = "another data prepare writes there; wait for its end"
                raise UserError(f"{self.folder}: {told}") from None
            yield
        finally:
            os.close(folder)

    # ---- files -------------------------------------------------------------------------------------------------

    def _aside(self, name: str) -> Path:
        path = self.folder / name
        return path.with_name(f".{path.name}.part")

    def _named(self, name: str) -> None:
        """What was written aside, and lies on the disk, is there under its name also after a power cut."""
        path = self.folder / name
        self._aside(name).replace(path)
        sync_folder(path.parent)

    def _held_out(self) -> BinaryIO:
        """What came after the last whole shard is made once more."""
        aside, due = self._aside(HELD_OUT), self.written.held_out * self.recipe.token_bytes
        there = aside.stat().st_size if aside.exists() else 0
        if there < due:
            raise UserError(f"{aside}: {there} bytes of at least {due} that were written; name a new folder")
        file = aside.open("r+b" if aside.exists() else "w+b")
        file.truncate(due)
        file.seek(due)
        return file

    @property
    def _name(self) -> str:
        return f"train-{len(self.written.shards):05d}.bin"

    def _next_shard(self) -> BinaryIO:
        return self._aside(self._name).open("wb")

    def _add(self, text: str, ids: Sequence[int], shard: BinaryIO, held_out: BinaryIO) -> None:
        raw, array = text.encode(), np.array(ids, dtype=np.uint32)
        if int(array.max()) >= self.recipe.vocab:
            raise UserError(f"the tokenizer gave id {array.max()}, and its vocabulary is {self.recipe.vocab}")
        self.written.text_bytes += len(raw)
        is_held_out = _chance(raw) < self.recipe.held_out
        (held_out if is_held_out else shard).write(
            array.astype(np.dtype(self.recipe.dtype).newbyteorder("<")).data
        )
        self.written.held_out += len(array) * is_held_out
        self._pending += len(array) * (not is_held_out)

    def _end_shard(self, shard: BinaryIO) -> None:
        """Whole documents: a shard is a little longer than asked for."""
        _settle(shard)
        shard.close()
        if self._pending:
            self._named(self._name)
            self.written.shards.append(self._pending)
            self._pending = 0
        else:
            self._aside(self._name).unlink()
        self._save()

    def _save(self) -> None:
        with self._aside(STATE).open("wb") as file:
            content = {"recipe": asdict(self.recipe), "written": asdict(self.written)}
            file.write(json.dumps(content, indent=2).encode() + b"\n")
            _settle(file)
        self._named(STATE)


def _settle(file: BinaryIO) -> None:
    """It is on the disk."""
    file.flush()
    os.fsync(file.fileno())


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
    kind = {".jsonl": _of_lines, ".parquet": _of_rows}.get(path.suffix, _of_text)
    try:
        for text in kind(path):
            if text.strip():
                # Half of a pair of surrogates, as crawled JSON has it, is no character.
                yield text.encode("utf-8", "replace").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None


def _of_text(path: Path) -> Iterator[str]:
    is_long = path.stat().st_size > LONG_BYTES
    piece: list[str] = []
    chars = 0
    with path.open(encoding="utf-8-sig") as file:
        while line := file.readline(PIECE_CHARS):
            piece.append(line)
            chars += len(line)
            if is_long and chars >= PIECE_CHARS:
                yield "".join(piece)
                piece, chars = [], 0
    yield "".join(piece)


def _of_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f'{path}, line {number}: expected an object with a "text"') from None
            if isinstance(text, str):
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
            yield from (text for text in rows.column(0).to_pylist() if isinstance(text, str))
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: no parquet file: {str(error).splitlines()[0]}") from None
