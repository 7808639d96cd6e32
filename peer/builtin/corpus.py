"""What the built-in model reads: the sources of Python's own standard library as bytes, or the tokens that a run names.

Owns: which files are read, in which order, which of them are held out, and how text is cut into windows.
Called by: the trainer (when the manifest names the built-in data), examples, benchmarks, tests.
Must not know: models, leases, the order of visiting.

Python versions differ in their sources, so two machines may hold different texts.  For a demo that is fine;
where it matters, compare `corpus_digest`.  Line ends are made equal, and generated or site-specific files are
left out, so that the same Python release gives the same text on every system.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import Dataset

from farflung.peer.data.shard_writer import HELD_OUT
from farflung.peer.data.token_shards import TokenShards
from farflung.peer.settings import own_config
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest

DEFAULT_MAX_BYTES = 8 * 1000 * 1000
HOLD_OUT_EVERY = 20

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_SKIPPED_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})
_SKIPPED_PREFIX = "_sysconfigdata"  # generated at build time: compiler flags and local paths


@dataclass(frozen=True, slots=True)
class Corpus:
    """Both texts are shared by all callers of `load_corpus`: read them, do not write to them."""

    train: Tensor  # [N] uint8
    held_out: Tensor  # [M] uint8


class ByteWindows(Dataset[Tensor]):
    """Windows of context + 1 bytes, in the order of the text.

    Each begins at the last byte of the one before, so every byte but the first is predicted once.  The few
    bytes after the last whole window are left out.
    """

    def __init__(self, data: Tensor, context: int) -> None:
        if context < 1:
            raise UserError(f"context must be at least 1, not {context}")
        if data.dim() != 1 or data.numel() <= context:
            raise UserError(f"the text has {data.numel()} bytes: too few for one window of {context + 1}")
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return (self.data.numel() - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        """[context + 1] int64"""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside [0, {len(self)})")
        start = index * self.context
        return self.data[start : start + self.context + 1].to(torch.int64)


class TokenRows(Dataset[Tensor]):
    """Rows of token shards as windows of a model of `vocab` words: ids that it has not are named and refused."""

    def __init__(self, shards: TokenShards, vocab: int, named_in: str = "[data]") -> None:
        """`named_in`: the section of run.toml."""
        self.shards, self.vocab, self._named_in = shards, vocab, named_in

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        rows = self.shards.__getitems__(indices)
        for index, row in zip(indices, rows, strict=True):
            if int(row.max()) >= self.vocab or int(row.min()) < 0:
                wrong = next(each for each in row.tolist() if not 0 <= each < self.vocab)
                raise UserError(
                    f"{self._named_in} source: row {index} has token {wrong}, and [model] vocab is {self.vocab}: these "
                    "shards are for a model with more words, or of another dtype"
                )
        return rows


ANY_TOKEN = 1 << 62  # of a script's model nobody here knows the vocabulary


class Windows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...


def windows_of(manifest: Manifest) -> Windows:
    """[context + 1] tokens each, or as long as [data] length says."""
    if manifest.data.source == "python-stdlib":
        return ByteWindows(load_corpus().train, manifest.model.context)
    return TokenRows(TokenShards.of_run(manifest, own_config({}).data), manifest.model.vocab)


def held_out_bytes(context: int) -> ByteWindows:
    """Of the text that every peer has."""
    return ByteWindows(load_corpus().held_out, context)


def held_out_rows(manifest: Manifest, own_place: str) -> Windows:
    """Of what [eval] names; but of what lies beside the run's data where the owner of this machine has that, too."""
    vocab = manifest.model.vocab if manifest.model.kind else ANY_TOKEN
    beside = Path(own_place, HELD_OUT).parent
    if own_place and beside.is_dir():
        return TokenRows(TokenShards.of_run(manifest, str(beside)), vocab, "[eval]")
    if manifest.eval.source == "python-stdlib":
        return held_out_bytes(manifest.model.context)
    return TokenRows(TokenShards.held_out_of_run(manifest), vocab, "[eval]")


def row_of_window(rows: int, window: int, of: int) -> int:
    """At even distances, from the first to the last: the same each time, so that versions are compared on one text."""
    return (rows - 1) * window // (of - 1)


@lru_cache(maxsize=4)
def load_corpus(max_bytes: int = DEFAULT_MAX_BYTES, folder: str | None = None) -> Corpus:
    """The first `max_bytes` of source text, kept in memory for the next call.

    Of every 20 files the first is held out, so that a small cap leaves something held out too.
    `folder` is read instead of the standard library where given (tests).
    """
    root = Path(folder if folder is not None else sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    left = max_bytes
    for number, path in enumerate(_source_files(root)):
        if left <= 0:
            break
        text = path.read_bytes().replace(b"\r\n", b"\n")[:left]
        left -= len(text)
        shelf = train if number % HOLD_OUT_EVERY else held_out
        shelf += text
    if not train or not held_out:
        raise UserError(
            f"{root} holds too few Python sources within {max_bytes} bytes: this Python may ship its library "
            "without sources, or the cap is too small; use your own data"
        )
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


def corpus_digest(corpus: Corpus) -> str:
    """blake3 in hex of both texts: equal digests mean equal training and held-out bytes."""
    hasher = blake3()
    for text in (corpus.train, corpus.held_out):
        hasher.update(text.numel().to_bytes(8, "little"))
        hasher.update(text.numpy().data)
    return hasher.hexdigest()


def _source_files(root: Path) -> list[Path]:
    """Sorted by relative path with forward slashes: the one order that all systems agree on."""
    found: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and name not in _SKIPPED_FILES and not name.startswith(_SKIPPED_PREFIX):
                path = Path(folder, name)
                found.append((path.relative_to(root).as_posix(), path))
    return [path for _, path in sorted(found)]
