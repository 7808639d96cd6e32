"""Checkpoints in a folder at any URL: written whole or not at all, checked when read, the oldest removed.

Called by the agent's checkpoint thread and by the command line.  Each checkpoint is a folder of its own, written by
all who share the URL (parts.py); its manifest is written last.  Several runs may share the URL too.
Must not know rounds, peers or tensors.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from farflung.checkpoints.archive import ENDING as ARCHIVE
from farflung.checkpoints.checkpoint_manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_NAME,
    CheckpointManifest,
    ShardHash,
    canonical,
    chunk_hash,
    parse,
    shard_header,
)
from farflung.checkpoints.files import Folder
from farflung.checkpoints.parts import Parts
from farflung.checkpoints.stages import Saved, outdated
from farflung.protocol.errors import CheckpointError, StoreError
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.process import failpoints


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

    def sweep(self, run_id: str, writer: str) -> None:
        """Remove what this writer alone had begun when it was killed or gave up."""
        for folder in self.list_saved(run_id).unfinished:
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
