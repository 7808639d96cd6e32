"""Several writers of one checkpoint: each takes the next file that nobody else is writing, until all are there.

Used by a peer's checkpoint writer.  Peers that share a place hold the same state, bit by bit, so it does not matter who
writes which file; the one with most time writes most.  The folder itself is all that they have in common:

    chunks-00000.WRITER.claim    somebody began this file
    chunks-00000.safetensors     it is whole
    chunks-00000.json            and this is its hash: a note for whoever writes the manifest

A claim is no lock.  When nothing has appeared for a while, whoever waits writes what is missing: a file that two write
is the same file.  A note counts only for the chunks that the reader itself would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from farflung.checkpoints.checkpoint_manifest import (
    MANIFEST_NAME,
    Hex32,
    ShardFile,
    ShardHash,
    Text,
    chunk_hash,
    shard_header,
    shard_name,
)
from farflung.checkpoints.files import Folder
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.errors import CheckpointError
from farflung.protocol.outer_numbers import StateForm
from farflung.protocol.round_words import Count

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
