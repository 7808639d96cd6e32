"""Checkpoints in a folder at any URL: written whole or not at all, checked when read, the oldest removed.

Called by the agent's checkpoint thread and by the command line.  Each checkpoint is a folder of its own, written by
all who share the URL (parts.py); its manifest is written last.  Several runs may share the URL too.
Must not know rounds, peers or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from msgspec import Struct

from farflung.checkpoints.archive import ENDING as ARCHIVE
from farflung.checkpoints.checkpoint_manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    CheckpointManifest,
    Hex32,
    Saved,
    ShardFile,
    ShardHash,
    Text,
    canonical,
    chunk_hash,
    outdated,
    parse,
    shard_header,
    shard_name,
)
from farflung.checkpoints.files import Folder
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import CheckpointError, StoreError
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.process import failpoints
from farflung.protocol.round_words import Count

# ---- parts -------------------------------------------------------------------------------------------------
# Several writers of one checkpoint: each takes the next file that nobody else is writing, until all are
# there.
#
# Used by a peer's checkpoint writer. Peers that share a place hold the same state, bit by bit, so it does not
# matter who writes which file; the one with most time writes most. The folder itself is all that they have in
# common:
#
#     chunks-00000.WRITER.claim    somebody began this file
#     chunks-00000.safetensors     it is whole
#     chunks-00000.json            and this is its hash: a note for whoever writes the manifest
#
# A claim is no lock. When nothing has appeared for a while, whoever waits writes what is missing: a file that
# two write is the same file. A note counts only for the chunks that the reader itself would have written.

TAKE_OVER_S = 30.0  # no file of anybody has appeared for so long
LOOK_S = 0.5
NOTE_BYTES_MAX = 4096


class PartsNote(Struct, frozen=True, forbid_unknown_fields=True):
    size_bytes: Count
    blake3: Hex32
    chunks: Hex32  # root of the hashes of the chunks in it
    writer: Text


@dataclass(frozen=True)
class PartFile:
    """One file: its chunks, what they must hash to, and how to get them.  `done`: somebody has written it."""

    first: int
    hashes: tuple[str, ...]
    take: Callable[[int], bytes]
    done: Callable[[range], None]

    @property
    def name(self) -> str:
        return shard_name(self.first)

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]

    @property
    def chunks(self) -> range:
        return range(self.first, self.first + len(self.hashes))


class Parts:
    def __init__(self, files: Folder, folder: str, writer: str, form: StateForm) -> None:
        self.folder = folder
        self.shards: list[ShardFile] = []
        self._files, self._writer, self._form = files, writer, form
        self._missing: list[PartFile] = []

    # ---- writing -------------------------------------------------------------------------------------------

    def add(self, parts: list[PartFile]) -> None:
        """Write of these what nobody else has begun."""
        # Everybody begins elsewhere.
        self._missing += sorted(parts, key=lambda part: hash_bytes(f"{self._writer} {part.name}".encode()))
        while (part := self._unclaimed()) is not None:
            self._write(part)

    def finish(self, pause: Callable[[float], None]) -> bool:
        """Wait for the others' files, and write them if nobody does.  False: another has published them already.

        `pause` waits so many seconds, and raises when the checkpoint is not wanted any more.
        """
        waited_s, seen = 0.0, -1
        while self._missing:
            there = self._look()
            if MANIFEST_NAME in there:
                return False
            if len(there) != seen:
                waited_s, seen = 0.0, len(there)
            elif waited_s >= TAKE_OVER_S:
                while self._missing:
                    self._write(self._missing[0])
                    self._look()
            if self._missing:
                pause(LOOK_S)
                waited_s += LOOK_S
        there = self._files.files(self.folder)
        gone = [file.name for file in self.shards if there.get(file.name) != file.size_bytes]
        if gone:
            raise CheckpointError(f"{self.folder}/{gone[0]}: gone again")
        return MANIFEST_NAME not in there

    def clear(self) -> None:
        """This peer gives up: what it wrote goes, so that a full disk gets room again; others' files stay."""
        there = self._files.files(self.folder)
        mine = {name.partition(".")[0] for name in there if name.endswith(f".{self._writer}.claim")}
        if MANIFEST_NAME not in there:
            self._files.remove_files(self.folder, [name for name in there if name.partition(".")[0] in mine])

    # ---- who writes what -----------------------------------------------------------------------------------

    def _unclaimed(self) -> PartFile | None:
        there = self._look()
        claimed = {name.partition(".")[0] for name in there if self._is_of_another(name)}
        return next((part for part in self._missing if part.stem not in claimed), None)

    def _is_of_another(self, name: str) -> bool:
        return name.endswith(".claim") and not name.endswith(f".{self._writer}.claim")

    def _look(self) -> dict[str, int]:
        """What lies there; files of others that are whole are taken for written."""
        there = self._files.files(self.folder)
        for part in list(self._missing):
            if part.name in there and f"{part.stem}.json" in there:
                self._take_over(part, there[part.name])
        return there

    def _take_over(self, part: PartFile, size_bytes: int) -> None:
        raw = self._files.read(self.folder, f"{part.stem}.json", NOTE_BYTES_MAX)
        try:
            note = msgspec.json.decode(raw, type=PartsNote)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # it is written anew
        if note.size_bytes == size_bytes and note.chunks == _root(part):
            self._have(part, note)

    def _have(self, part: PartFile, note: PartsNote) -> None:
        self._missing.remove(part)
        count = len(part.hashes)
        self.shards.append(ShardFile(part.name, part.first, count, note.size_bytes, note.blake3, note.writer))
        part.done(part.chunks)

    # ---- one file ------------------------------------------------------------------------------------------

    def _write(self, part: PartFile) -> None:
        self._files.write(self.folder, f"{part.stem}.{self._writer}.claim", [b""])
        seen = ShardHash()

        def pieces() -> Iterator[bytes]:
            yield seen.update(shard_header(part.first, len(part.hashes), self._form))
            for chunk, expected in zip(part.chunks, part.hashes, strict=True):
                raw = part.take(chunk)
                if chunk_hash(raw) != expected:
                    raise CheckpointError(f"the copy of chunk {chunk} is not the state that was confirmed")
                yield seen.update(raw)

        self._files.write(self.folder, part.name, pieces())
        note = PartsNote(seen.bytes, seen.hex(), _root(part), self._writer)
        self._files.write(self.folder, f"{part.stem}.json", [msgspec.json.encode(note)])
        self._have(part, note)


def _root(part: PartFile) -> str:
    return root_of(bytes.fromhex(each) for each in part.hashes).hex()


# ---- store -------------------------------------------------------------------------------------------------


@dataclass
class CheckpointListing:
    complete: list[Saved] = field(default_factory=list)  # newest first
    problems: list[str] = field(default_factory=list)  # of what looked like a checkpoint and is none: named
    unfinished: list[str] = field(default_factory=list)  # folders without a manifest


class Store:
    def __init__(self, url: str, as_nobody: bool = False) -> None:
        self.files = Folder(url, as_nobody)
        self.url = url

    # ---- looking -----------------------------------------------------------------------------------------

    def list_saved(self, run_id: str = "") -> CheckpointListing:
        """All checkpoints, or those of one run.  Contents are not read: `chunks` and `problems_of` check them."""
        found = CheckpointListing()
        for folder in self.files.folders():
            if not folder.startswith(run_id[:8]):
                continue
            sizes = self.files.files(folder)
            if MANIFEST_NAME not in sizes:
                found.unfinished.append(folder)
                continue
            try:
                found.complete.append(self._open(folder, sizes, run_id))
            except (CheckpointError, StoreError) as error:
                found.problems.append(str(error))
        found.complete.sort(key=lambda saved: (*saved.manifest.age, saved.folder), reverse=True)
        return found

    def _open(self, folder: str, sizes: dict[str, int], run_id: str) -> Saved:
        where = f"{self.url.rstrip('/')}/{folder}/"
        raw = self.files.read(folder, MANIFEST_NAME, MANIFEST_BYTES_MAX + 1)
        manifest = parse(raw, where + MANIFEST_NAME)
        if run_id and manifest.run_id != run_id:
            raise CheckpointError(
                f"{where}{MANIFEST_NAME}: of another run ({manifest.run}, {manifest.run_id[:8]})"
            )
        for file in manifest.files:
            if file.name not in sizes:
                raise CheckpointError(f"{where}{file.name}: missing")
            if sizes[file.name] != file.size_bytes:
                raise CheckpointError(
                    f"{where}{file.name}: {sizes[file.name]} bytes, expected {file.size_bytes}"
                )
        return Saved(folder, manifest)

    def chunks(self, saved: Saved, wanted: Container[int] | None = None) -> Iterator[tuple[int, bytes]]:
        """(chunk, its parameters and moments), each checked; CheckpointError at the first that is not as it was.

        `wanted`: only these chunks; files that have none of them are not read."""
        manifest, hashes = saved.manifest, saved.manifest.chunk_hashes
        for file in manifest.files:
            inside = range(file.first, file.first + file.count)
            if wanted is not None and not any(chunk in wanted for chunk in inside):
                continue
            header = shard_header(file.first, file.count, manifest.form)
            where = f"{self.url.rstrip('/')}/{saved.folder}/{file.name}"
            pieces = self.files.pieces(
                saved.folder, file.name, [len(header)] + [manifest.form.size_bytes] * file.count
            )
            if next(pieces) != header:
                raise CheckpointError(f"{where}: its head is damaged")
            for chunk, piece in enumerate(pieces, file.first):
                if wanted is not None and chunk not in wanted:
                    continue
                if chunk_hash(piece) != hashes[chunk]:
                    raise CheckpointError(f"{where}: chunk {chunk} is damaged")
                yield chunk, piece

    def problems_of(self, saved: Saved) -> list[str]:
        """Read everything; what is wrong, file by file."""
        problems = []
        for file in saved.manifest.files:
            seen = ShardHash()
            try:
                sizes = [min(16 << 20, file.size_bytes - at) for at in range(0, file.size_bytes, 16 << 20)]
                for piece in self.files.pieces(saved.folder, file.name, sizes):
                    seen.update(piece)
                if seen.hex() != file.blake3:
                    problems.append(f"{self.url.rstrip('/')}/{saved.folder}/{file.name}: damaged")
            except StoreError as error:
                problems.append(str(error))
        if problems:
            return problems
        try:  # the chunks' hashes too: they are what the run's digests are made of
            for _ in self.chunks(saved):
                pass
        except (CheckpointError, StoreError) as error:
            problems.append(str(error))
        return problems

    # ---- changing ----------------------------------------------------------------------------------------

    def draft(
        self, run_id: str, era: int, version: int, writer: str, form: StateForm, stage: int | None = None
    ) -> CheckpointDraft:
        """Peers that share this place, and hold the same stage if there are any, write into one folder."""
        of_stage = "" if stage is None else f"-s{stage:02d}"
        folder = f"{run_id[:8]}-e{era:04d}-v{version:08d}{of_stage}"
        return CheckpointDraft(self.files, Parts(self.files, folder, writer, form))

    def retain(self, run_id: str, keep: int) -> None:
        """Remove what is older than the newest `keep` versions of this run (stages.py); the newest whole one always
        stays."""
        complete = self.list_saved(run_id).complete
        for saved in outdated(complete, keep, run_id[:8] + ARCHIVE in self.files.folders()):
            failpoints.hit("checkpoint.before_remove")
            self.files.remove(saved.folder, MANIFEST_NAME)

        # A peer that still writes an older one is too late.
        newest: dict[str, tuple[int, int]] = {}
        for found in (_named(saved.folder) for saved in reversed(complete)):
            newest |= {} if found is None else {found.of_stage: found.age}
        for folder in self.list_saved(run_id).unfinished:
            named = _named(folder)
            if named is not None and named.of_stage in newest and named.age < newest[named.of_stage]:
                self.files.remove(folder, MANIFEST_NAME)

    def sweep(self, run_id: str, writer: str, before: tuple[int, int]) -> None:
        """Remove what this writer alone had begun when it was killed or gave up, of versions before (era, version).

        Of the one that it begins now others may write the rest at this moment, and publish what it would remove.
        """
        for folder in self.list_saved(run_id).unfinished:
            named = _named(folder)
            if named is None or named.age >= before:
                continue
            writers = {name.split(".")[1] for name in self.files.files(folder) if name.endswith(".claim")}
            if writers <= {writer} and (writers or folder.endswith(f"-{writer}")):
                self.files.remove(folder, MANIFEST_NAME)


class _Named(NamedTuple):
    age: tuple[int, int]
    of_stage: str  # empty: of a model in one piece


def _named(folder: str) -> _Named | None:
    found = re.match(r"[0-9a-f]{8}-e(\d+)-v(\d+)(-s\d+)?", folder)
    return _Named((int(found[1]), int(found[2])), found[3] or "") if found else None


class CheckpointDraft:
    """A checkpoint that is being written.  It does not exist until `publish`."""

    def __init__(self, files: Folder, parts: Parts) -> None:
        self.folder, self.parts = parts.folder, parts
        self._files = files

    def publish(self, manifest: CheckpointManifest) -> None:
        """`manifest`: signed.  Checked as a reader will check it, so that nothing unreadable is ever published."""
        failpoints.hit("checkpoint.before_manifest")
        raw = canonical(manifest)
        parse(raw, f"{self.folder}/{MANIFEST_NAME}")
        self._files.write(self.folder, MANIFEST_NAME, [raw])
