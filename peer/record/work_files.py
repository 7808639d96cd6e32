"""A span of inner steps on disk: what it began with, what was read, and what came of it.  `farflung verify` re-does it.

Written by the trainer (peer/trainer/recording.py), and by the agent, which knows what was sent of it
(peer/state/recorded_sending.py); read by the trainer that re-does it and by the stand-in for its agent.  One folder for
a span, named by the trainer's count of steps at its end:

    step-00000480/work.json            which run, model, samples and rates
                  before.safetensors   model, optimizer, unmerged work and random numbers as the span began
                  after.safetensors    the pseudo-gradient that was frozen at its end
                  sent-f00.msgpack     the signed list of what was sent of fragment 0, and in which codec
                  residual-f00.safetensors   what an earlier round's codec had lost, where that is added

Nothing in it is executed or unpickled.  Must not know models, optimizers, or how a pseudo-gradient is encoded.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process import own_files
from farflung.protocol.signed_words import Said

FORMAT = 1
KEPT = 2  # spans: the newest, and the one whose contribution may still be on its way
HEAD_BYTES_MAX = 64 << 20
_HEAD, _BEFORE, _AFTER = "work.json", "before.safetensors", "after.safetensors"
_NAME = re.compile(r"step-\d{8,}")

# For a trainer: which span it is to take again, and "SIZE SEED": by how much of their size gradients are moved then.
REDO_VARIABLE, ROUNDING_VARIABLE = "FARFLUNG_REDO", "FARFLUNG_REDO_ROUNDING"
Number = int | float | bool | None
Rates = dict[str, Number | tuple[Number, ...]]  # of one parameter group: lr, betas, ...
Samples = tuple[int, int, int]  # (epoch, from, to), in the order of the run


class Placed(Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor, which lies in the file under the key of its place."""

    order: tuple[
        int, ...
    ] = ()  # its dimensions by how far apart their values lay; empty: the first is the farthest


class Nothing(Struct, frozen=True, forbid_unknown_fields=True, tag="empty"):
    """An empty list."""


Leaf = Number | str | Placed | Nothing


class Several(Struct, frozen=True, forbid_unknown_fields=True, tag="list"):
    """The key of each is that of the list, a slash, and its number."""

    of: tuple[Leaf, ...]


class Known(Struct, frozen=True, forbid_unknown_fields=True, tag="object"):
    """An object of a kind that the reader has a name for: nothing else is made.  Keys are as in a list, by name."""

    kind: str
    of: dict[str, Leaf]


Form = Leaf | Several | Known


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """One optimizer step."""

    samples: tuple[Samples, ...]
    rates: tuple[Rates, ...]  # of each parameter group
    batches: tuple[int, ...] = ()  # the samples of each of its batches; empty: each span is a batch

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self.batches or tuple(stop - start for _, start, stop in self.samples)


class WorkHead(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int = FORMAT
    manifest: bytes
    name: str  # of the peer
    model: ModelSchema
    versions: tuple[int, ...]  # of each fragment, as it was loaded last
    steps: tuple[Step, ...]
    epoch_samples: int
    data: bytes  # the fingerprint of the data set; empty: it had none
    optimizer: dict[str, Number]  # what its state has besides tensors, by "parameter.name"
    more: dict[str, Form] = {}  # what is neither a tensor nor a number
    on_host: tuple[str, ...]  # tensors of its state that do not lie where their parameter lies
    random: dict[str, Number]  # what the states of random numbers have besides tensors
    threads: int
    software: str
    device: str


class SentOf(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was sent of the pseudo-gradient of one fragment."""

    format: int = FORMAT
    run_id: bytes
    fragment: int
    codec: str
    said: Said


def folder_of(place: Path, step: int) -> Path:
    return place / f"step-{step:08d}"


def write_work(
    place: Path, step: int, head: WorkHead, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> None:
    """A folder with all of it appears at once, and the oldest ones go.  StoreError."""
    target = folder_of(place, step)
    aside = place / f".{target.name}.{secrets.token_hex(4)}"
    try:
        own_files.made_folder(aside)
        (aside / _HEAD).write_bytes(msgspec.json.encode(head))
        save_file(dict(before), aside / _BEFORE)
        save_file(dict(after), aside / _AFTER)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        for old in works_in(place)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{target}: the work is not recorded: {error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_sent(place: Path, step: int, sent: SentOf, residual: Tensor | None) -> None:
    """Beside the work, if that is there; of several rounds that it was sent in the last one counts.  StoreError."""
    folder, number = folder_of(place, step), sent.fragment
    if not folder.is_dir():
        return
    try:
        _residual(folder, number).unlink(missing_ok=True)
        if residual is not None:
            save_file({"residual": residual}, _residual(folder, number))
        (folder / f"sent-f{number:02d}.msgpack").write_bytes(msgspec.msgpack.encode(sent))
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{folder}: what was sent is not recorded: {error}") from None


def works_in(place: Path) -> list[Path]:
    """The oldest first."""
    found = [each for each in place.iterdir() if _NAME.fullmatch(each.name)] if place.is_dir() else []
    return sorted(found, key=lambda each: (each.stat().st_mtime_ns, each.name))


class Work:
    """One folder, to be read.  UserError for whatever is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of a span, or one with spans in it, of which the newest that was sent counts."""
        spans = works_in(folder)
        sent = [each for each in spans if any(each.glob("sent-f*.msgpack"))]
        self.folder = folder if not spans else (sent or spans)[-1]
        path = self.folder / _HEAD
        if not path.is_file():
            raise UserError(
                f"{folder}: no recorded work there; farflung join --record FOLDER keeps some at every freeze"
            )
        try:
            self.head = msgspec.json.decode(path.read_bytes()[:HEAD_BYTES_MAX], type=WorkHead)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: damaged: {error}") from None
        if self.head.format != FORMAT:
            raise UserError(f"{path}: its format is {self.head.format}, this farflung reads {FORMAT}")

    def before(self) -> dict[str, Tensor]:
        return _tensors(self.folder / _BEFORE)

    def delta(self) -> Tensor:
        """The pseudo-gradient of the whole model, flat."""
        elements = self.head.model.chunk_count * self.head.model.chunk_elements
        found = _tensors(self.folder / _AFTER).get("delta")
        if found is None or found.shape != (elements,):
            raise UserError(f"{self.folder / _AFTER}: it has no pseudo-gradient of {elements} values")
        return found

    def sent(self) -> list[tuple[SentOf, Tensor | None]]:
        """Of each fragment that was sent: that, and what was added to it."""
        found: list[tuple[SentOf, Tensor | None]] = []
        for path in sorted(self.folder.glob("sent-f*.msgpack")):
            try:
                sent = msgspec.msgpack.decode(path.read_bytes(), type=SentOf)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: damaged: {error}") from None
            rest = _residual(self.folder, sent.fragment)
            found.append((sent, _tensors(rest).get("residual") if rest.exists() else None))
        return found


def _residual(folder: Path, fragment: int) -> Path:
    return folder / f"residual-f{fragment:02d}.safetensors"


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
