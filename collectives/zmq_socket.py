"""One socket of the data plane with all its options: encryption, and bounds on what it may hold.

Called by zmq_link.py, which binds or connects it.  Must not know peers, lines or frames.
"""

from __future__ import annotations

import zmq

from farflung.collectives.limits import BULK_SLACK_BYTES

BYTES_IN_SOCKET = 1024 * 1024  # per connection and direction, in frames of the largest size, but ...
LEAST_FRAMES, MOST_FRAMES = 2, 64  # ... at least and at most so many
CAPPED_RECEIVE_BYTES = 128 * 1024

Socket = zmq.Socket[bytes]


def bulk_socket(
    context: zmq.Context[Socket], kind: int, keys: tuple[bytes, bytes], payload_max: int, capped: bool
) -> Socket:
    """`keys`: CURVE public and secret key, z85.  `capped`: received at a limited rate."""
    socket = context.socket(kind)
    socket.curve_publickey, socket.curve_secretkey = keys
    frames = min(MOST_FRAMES, max(LEAST_FRAMES, BYTES_IN_SOCKET // max(1, payload_max)))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, frames)
    # Under a cap, what has arrived unread is what the cap did not hold back: as little as possible.  But with 1 a
    # ROUTER of libzmq 4.3.5 never receives anything from those whom a ZAP handler let in.
    socket.setsockopt(zmq.RCVHWM, LEAST_FRAMES if capped else frames)
    if capped:
        socket.setsockopt(zmq.RCVBUF, CAPPED_RECEIVE_BYTES)
    socket.setsockopt(zmq.MAXMSGSIZE, payload_max + BULK_SLACK_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # No ZMTP heartbeats: libzmq 4.3.5 aborts the whole process when a heartbeat is due on a connection that
    # broke while its receive queue was full.  The kernel's keepalive and our own beats find the dead.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 200)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
