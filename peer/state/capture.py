"""The chunks of a fragment as they are at one version, copied beside the training.

The state changes only in the arithmetic.  There a chunk is copied just before it changes, or alone, between other
jobs, when the writer of a checkpoint gets to it.  So nobody waits for the store, and a slow one costs
memory: at most one more copy of the state.  Called by checkpoint_thread.py.  Must not know what becomes of the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from farflung.peer.worker import Submit, nothing
from farflung.protocol.errors import FarflungError


class GivenUp(FarflungError):
    """The checkpoint is not wanted any more."""


class Capture:
    """`read` gives a chunk's bytes; `submit` runs a job in the arithmetic, while nothing else is done there."""

    def __init__(self, chunks: range, read: Callable[[int], bytes], submit: Submit) -> None:
        self.wanted = set(chunks)  # touched in the arithmetic only
        self._read, self._submit = read, submit
        self._ready: dict[int, bytes] = {}
        self._news = threading.Condition()
        self._dropped = False

    def copy(self, chunk: int) -> None:
        """In the arithmetic; of several chunks at once."""
        if chunk not in self.wanted:
            return
        self.wanted.discard(chunk)
        raw = self._read(chunk)
        with self._news:
            self._ready[chunk] = raw
            self._news.notify_all()

    def take(self, chunk: int) -> bytes:
        """In the writing thread."""
        with self._news:
            copied = chunk in self._ready
        if not copied:
            self._submit(lambda: self.copy(chunk), nothing)
        with self._news:
            self._news.wait_for(lambda: self._dropped or chunk in self._ready)
            if self._dropped:
                raise GivenUp("given up")
            return self._ready.pop(chunk)

    def skip(self, chunks: range) -> None:
        """In the writing thread: nobody needs a copy of these any more."""
        self._submit(lambda: self.wanted.difference_update(chunks), nothing)
        with self._news:
            for chunk in chunks:
                self._ready.pop(chunk, None)

    def drop(self) -> None:
        """From any thread: what was copied is freed, and who waits for a chunk gives up."""
        with self._news:
            self._dropped = True
            self._ready.clear()
            self._news.notify_all()

    @property
    def dropped(self) -> bool:
        return self._dropped

    @property
    def over(self) -> bool:
        return self._dropped or not self.wanted
