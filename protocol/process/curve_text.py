"""ZeroMQ's own way to write a CURVE key: base 85, as its sockets want it.

Called by whoever sets up a socket.  Must not know whose key it is.
"""

from __future__ import annotations

from zmq.utils import z85


def raw_of(text: bytes) -> bytes:
    """The 32 bytes of a key in base 85."""
    return bytes(z85.decode(text))


def text_of(raw: bytes) -> bytes:
    return bytes(z85.encode(raw))
