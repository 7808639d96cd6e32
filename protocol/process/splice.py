"""A pipe of the kernel between two connections: bytes go through it by splice(2) and never through our memory.

Used by the relay, between its guests, and by a peer's data plane, between libzmq and a relay.  Linux only.  Must not
know what passes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os

# For both directions of 128 pairs that is what Linux lets one user have without asking, 64 MB.
PIPE_BYTES = 256 * 1024
_FLAGS = 1 | 2  # SPLICE_F_MOVE | SPLICE_F_NONBLOCK


class Pipe:
    """One direction.  Nothing is read before what was read last has left, so `fill` never finds the pipe full."""

    def __init__(self) -> None:
        """OSError where there are no descriptors left."""
        self._reads, self._writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.inside = 0
        with contextlib.suppress(OSError):  # more than this user may have: then it is smaller
            fcntl.fcntl(self._writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def fill(self, source: int, most_bytes: int = PIPE_BYTES) -> int | None:
        """How many bytes came from this connection; 0 for none just now, None if it is over or broken."""
        try:
            self.inside = os.splice(source, self._writes, most_bytes, flags=_FLAGS)
        except OSError as error:
            return 0 if error.errno == errno.EAGAIN else None
        return self.inside or None

    def drain(self, target: int) -> bool:
        """As much as this connection takes; False if it is broken."""
        while self.inside:
            try:
                self.inside -= os.splice(self._reads, target, self.inside, flags=_FLAGS)
            except OSError as error:
                return error.errno == errno.EAGAIN
        return True

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)
