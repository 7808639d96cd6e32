"""What one peer contributes to one round, on its way from a slot into payloads.

Made by the outer state; done in the threads of the agent's arithmetic, or in one.  `begin` comes before everything and
`end` after it; between them `some` may be called by several threads at once, in any order: no two of its calls touch
the same values.  Must not know who the payloads are for.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from torch import Tensor

from farflung.compression.codec import ErrorFeedback, NonFinite, beta_of, codec_named
from farflung.peer.machine.effects import Encode
from farflung.protocol.frames import Payload

# ---- sent file ---------------------------------------------------------------------------------------------
# What this peer contributes, encoded, in a file without a name: it is kept for audits, and hardly ever read
# again.
#
# Owned by the outer state, in the arithmetic, whose threads put each encoded chunk here; whoever sends or
# keeps it has a view of the file. So it is the kernel's cache, which gives the memory back when it is wanted,
# and not this process's. A disk that takes no more costs memory, and no round: what can't be written stays
# where it was encoded. Must not know rounds, commits, or for how long anybody keeps what.
#
# A contribution has one place in the file, and a place is used again once nobody holds a view of it.

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


# ---- delta encoder -----------------------------------------------------------------------------------------

CHUNKS_AT_ONCE = 4  # encoded before they are sent: more would keep the line waiting, fewer cost more turns

# Index within the fragment -> payload, and why the whole of it can't be contributed, or "".
Encoded = tuple[dict[int, Payload], str]


@dataclass(frozen=True)
class DeltaSource:
    """Of a fragment."""

    delta_n: Tensor
    elements: int  # of a chunk
    first: int  # the number of its first value in the model, for people
    feedback: Callable[[], ErrorFeedback | None]
    read: Callable[[Tensor], None]  # is told which part of `delta_n` is not needed any more, as it goes


class Encoding:
    def __init__(self, source: DeltaSource, effect: Encode, sent: SentFile) -> None:
        self._source, self._effect, self._sent = source, effect, sent
        self._codec = codec_named(effect.codec)
        self._feedback: ErrorFeedback | None = None
        self._is_spoilt = False
        self._is_told = False  # why nothing can be contributed
        self.firsts = range(0, len(effect.order), CHUNKS_AT_ONCE)  # what `some` is to be called with

    def begin(self) -> None:
        source, effect = self._source, self._effect
        feedback = source.feedback()
        beta = beta_of(effect.codec)
        if beta is None and feedback is not None and feedback.residual is None:
            feedback = None  # nothing coarse was ever sent: the memory for what it loses is not taken
        if feedback is not None:
            feedback.open(source.delta_n, 1.0 if beta is None else beta)
            source.read(source.delta_n)
        self._feedback = feedback
        self._sent.begin(len(effect.order) * self._codec.payload_bytes(source.elements))

    def some(self, first: int) -> Encoded:
        """The chunks at these places of the order."""
        size, payloads = self._source.elements, dict[int, Payload]()
        for index in self._effect.order[first : first + CHUNKS_AT_ONCE]:
            part_n = self._source.delta_n[index * size : (index + 1) * size]
            try:
                if self._feedback is not None:
                    payloads[index] = self._feedback.encode(self._codec, index * size, size, self._sent.put)
                else:
                    payloads[index] = self._sent.put(self._codec.encode_here(part_n))
                    self._source.read(part_n)
            except NonFinite as error:
                self._is_spoilt = True
                element = self._source.first + index * size + error.index
                return {}, f"element {element} of the pseudo-gradient is {error.value}"
        return payloads, ""

    def is_wanted(self, made: Encoded) -> bool:
        """Of what `some` made, in the order of `firsts`: nothing comes after a problem."""
        wanted = not self._is_told
        self._is_told = self._is_told or bool(made[1])
        return wanted

    def end(self) -> None:
        """What a coarse codec lost is spoilt by what is not finite."""
        if self._is_spoilt and self._feedback is not None:
            self._feedback.reset()
