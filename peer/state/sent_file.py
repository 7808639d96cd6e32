"""What this peer contributes, encoded, in a file without a name: it is kept for audits, and hardly ever read again.

Owned by the outer state, in the arithmetic, whose threads put each encoded chunk here; whoever sends or keeps it has a
view of the file.  So it is the kernel's cache, which gives the memory back when it is wanted, and not this process's.
A disk that takes no more costs memory, and no round: what can't be written stays where it was encoded.
Must not know rounds, commits, or for how long anybody keeps what.

A contribution has one place in the file, and a place is used again once nobody holds a view of it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from dataclasses import dataclass
from typing import BinaryIO

from farflung.protocol.frames import Payload

PLACES_MOST = 128  # each that is in use costs a file descriptor: what is more stays in memory

log = logging.getLogger("farflung.agent")


@dataclass
class _FilePlace:
    start: int
    size: int
    view: mmap.mmap | None = None

    def is_free(self) -> bool:
        try:
            if self.view is not None:
                self.view.close()
        except BufferError:  # somebody holds a part of it
            return False
        self.view = None
        return True


class SentFile:
    def __init__(self, file: BinaryIO | None) -> None:
        """None: everything stays where it was encoded."""
        self._file = file
        self._places: list[_FilePlace] = []
        self._here: _FilePlace | None = None  # of the contribution that is being encoded
        self._end = 0  # of what is in it
        self._taking = threading.Lock()
        self._is_read = False  # pages of it may be mapped
        self._is_broken = False

    def begin(self, size_bytes: int) -> None:
        """A contribution of so many bytes is encoded next."""
        self.rest()
        self._here, self._end, self._is_read = None, 0, True
        if self._file is None or self._is_broken:
            return
        free = [each for each in self._places if each.is_free() and each.size >= size_bytes]
        try:
            place = min(free, key=lambda each: each.size) if free else self._new(self._file, size_bytes)
            if place is not None:
                view = mmap.mmap(
                    self._file.fileno(), place.size, mmap.MAP_SHARED, mmap.PROT_READ, offset=place.start
                )
                place.view = view
            self._here = place
        except OSError as error:
            self._give_up(error)

    def _new(self, file: BinaryIO, size_bytes: int) -> _FilePlace | None:
        if len(self._places) >= PLACES_MOST or not size_bytes:
            return None
        unit = mmap.ALLOCATIONGRANULARITY
        start = self._places[-1].start + self._places[-1].size if self._places else 0
        place = _FilePlace(start, -(-size_bytes // unit) * unit)
        os.ftruncate(file.fileno(), place.start + place.size)
        self._places.append(place)
        return place

    def put(self, payload: Payload) -> Payload:
        """A chunk of it, of any thread.  What holds the same bytes from now on, wherever they lie."""
        place = self._here
        if self._file is None or place is None or place.view is None:
            return bytes(payload)
        with self._taking:
            first, after = self._end, self._end + len(payload)
            if after > place.size:
                return bytes(payload)
            self._end = after
        try:
            # Written and not stored into memory that is mapped: a full disk is an error then, and not a signal.
            if os.pwrite(self._file.fileno(), payload, place.start + first) != len(payload):
                raise OSError(errno.ENOSPC, "a part of a chunk was not written")
        except OSError as error:
            self._give_up(error)
            return bytes(payload)
        return memoryview(place.view)[first:after]

    def rest(self) -> None:
        """What was sent is hardly read again: its pages are not this process's any more, and come back if they are."""
        if not self._is_read:
            return
        self._is_read = False
        for place in self._places:
            if place.view is not None and hasattr(mmap, "MADV_DONTNEED"):
                place.view.madvise(mmap.MADV_DONTNEED)

    def _give_up(self, error: OSError) -> None:
        self._is_broken, self._here = True, None
        log.warning("what is sent is kept in memory, since the disk takes it no more: %s", error)
