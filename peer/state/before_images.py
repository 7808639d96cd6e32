"""What each chunk of the outer state was before it changed, until it changes again.

Owned by the outer state, in the arithmetic.  A peer whose result others contradict can show from what it was
calculated; and where a run has to go back by one version, each peer that made it has the one before.  The bytes (8 or
12 for each parameter of the fragment) go to a file without a name: they count as the kernel's cache, not as this
process' memory.  The file keeps its room until the process ends, because new pages in every round cost more than the
copy itself, and this stands on the round's way.  A disk that takes no more costs the proof and the way back, and no
round.  Must not know who asks, nor why.
"""

from __future__ import annotations

import errno
import logging
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from farflung.protocol.model_schema import Fragment
from farflung.protocol.process import own_files

VERSION_BYTES = 8

log = logging.getLogger("farflung.agent")


def unnamed_file(folder: Path) -> BinaryIO:
    """It is gone with the process, however that ends.  Without a buffer: what can't be written fails at once."""
    own_files.made_folder(folder)  # a peer's first start
    return tempfile.TemporaryFile(dir=folder, buffering=0)


@dataclass
class _Kept:
    version: int
    hashes: bytes  # of all chunks, at that version
    chunks: set[int] = field(default_factory=set)  # that have changed since


class BeforeImages:
    def __init__(self, file: BinaryIO, state_bytes: int, fragments: Sequence[Fragment]) -> None:
        self._file = file
        self._state_bytes = state_bytes  # of one chunk
        self._fragment_of = {chunk: each.number for each in fragments for chunk in each.chunks}
        self._first = min(self._fragment_of)  # where the file begins
        self._kept: dict[int, _Kept] = {}  # by fragment
        self._keeping = threading.Lock()  # the file has one place at a time

    def begin(self, fragment: int, version: int, hashes: bytes) -> None:
        """From now on what changes in the fragment is kept as it was at this version."""
        self._kept[fragment] = _Kept(version, hashes)

    def keep(self, chunk: int, parts: Sequence[memoryview]) -> None:
        """This chunk is about to change.  Several threads may say so, each of another one."""
        with self._keeping:
            kept = self._kept.get(self._fragment_of[chunk])
            if kept is not None and chunk not in kept.chunks:
                self._write(kept, chunk, parts)

    def _write(self, kept: _Kept, chunk: int, parts: Sequence[memoryview]) -> None:
        try:
            self._file.seek((chunk - self._first) * self._state_bytes)
            for part in parts:
                if self._file.write(part) != part.nbytes:
                    raise OSError(errno.ENOSPC, "a part of a chunk was not written")
            kept.chunks.add(chunk)
        except OSError as error:
            del self._kept[self._fragment_of[chunk]]
            log.warning("what version %d was is not kept, so it can't be shown: %s", kept.version, error)

    def hashes_at(self, fragment: int, version: int) -> bytes | None:
        kept = self._kept.get(fragment)
        return kept.hashes if kept is not None and kept.version == version else None

    def has(self, fragment: int, chunk: int) -> bool:
        """The chunk has changed, and what it was is here."""
        kept = self._kept.get(fragment)
        return kept is not None and chunk in kept.chunks

    def shown(self, fragment: int, chunk: int) -> bytes | None:
        """The version in 8 bytes, then the chunk's state at it."""
        kept = self._kept.get(fragment)
        if kept is None or chunk not in kept.chunks:
            return None
        try:
            with self._keeping:
                self._file.seek((chunk - self._first) * self._state_bytes)
                raw = self._file.read(self._state_bytes)
        except OSError as error:
            log.warning("what version %d was can't be read back: %s", kept.version, error)
            return None
        return kept.version.to_bytes(VERSION_BYTES, "little") + raw if len(raw) == self._state_bytes else None
