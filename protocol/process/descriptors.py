"""Connections by their file descriptors: whose they are, how one is ended, and how many this process may hold.

Used where libzmq holds the connections and tells only their numbers: at the coordinator's sockets and at a peer's port.
Must not know keys, messages or who may stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

from farflung.protocol.join_url import Address
from farflung.protocol.process.networks import network_of

# Of a process that holds others' connections, for all else: those of 64 peers that are dialled, and its files.
OTHER_DESCRIPTORS = 320
ROOM_MOST = 1 << 20


def room_for_connections() -> int:
    """So many one process may hold open for others: it needs descriptors for all else that it does, too."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ROOM_MOST if most == resource.RLIM_INFINITY else min(most, ROOM_MOST)
    return max(most - OTHER_DESCRIPTORS, most // 2)


@contextlib.contextmanager
def lent(descriptor: int) -> Iterator[socket.socket]:
    """libzmq's socket.  No copy is made: where descriptors have run out there is none, and just then lines are cut."""
    line = socket.socket(fileno=descriptor)
    try:
        yield line
    finally:
        line.detach()


def end(descriptor: int, port: int) -> None:
    """libzmq has no word for that: it finds that the other side hung up.  `port`: at which it was taken, since the
    number may be something else's by now."""
    try:
        with lent(descriptor) as line:
            if line.getsockname()[1] == port:
                line.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError):
        pass  # it has just ended by itself, which is what was wanted


def endpoint_of(descriptor: int) -> str:
    """HOST:PORT of the other end of a connection."""
    try:
        with lent(descriptor) as line:
            host, port, *_ = line.getpeername()
    except (OSError, ValueError):
        return ""  # it has gone again
    return str(Address(plain_host(str(host)), port))


def network_at(descriptor: int) -> str:
    """Of the other end of a connection (networks.py)."""
    return network_of(endpoint_of(descriptor).rpartition(":")[0].strip("[]"))


def plain_host(address: str) -> str:
    """IPv4 callers of a socket for both appear as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:").partition("%")[0]


# ---- splice ------------------------------------------------------------------------------------------------
# A pipe of the kernel between two connections: bytes go through it by splice(2) and never through our memory.
#
# Used by the relay, between its guests, and by a peer's data plane, between libzmq and a relay. Linux only.
# Must not know what passes.

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
