"""One socket of the data plane with all its options: encryption, and bounds on what it may hold.

Called by zmq_link.py, which binds or connects it.  Must not know peers, lines or frames.
"""

from __future__ import annotations

import zmq

from farflung.protocol.limits import BULK_SLACK_BYTES

BYTES_IN_SOCKET = 1024 * 1024  # per connection and direction, in frames of the largest size, but ...
LEAST_FRAMES, MOST_FRAMES = 2, 64  # ... at least and at most so many
# Of what a limit on the download lets through: the window of a line with a round trip of so long, and not more, since
# what waits unread has crossed the line already.  Of a high limit Linux's own buffers (6 MB) are under a second, and
# few may ask for so much.
CAPPED_RECEIVE_S, CAPPED_RECEIVE_LEAST_BYTES = 0.2, 128 * 1024
HIGH_LIMIT_BYTES_PER_S = 6_250_000  # 50 Mbit/s

Socket = zmq.Socket[bytes]


def bulk_socket(
    context: zmq.Context[Socket],
    kind: int,
    keys: tuple[bytes, bytes],
    payload_max: int,
    download_bytes_per_s: float | None,
) -> Socket:
    """`keys`: CURVE public and secret key, z85.  `download_bytes_per_s`: the limit on what is received."""
    socket = context.socket(kind)
    socket.curve_publickey, socket.curve_secretkey = keys
    frames = min(MOST_FRAMES, max(LEAST_FRAMES, BYTES_IN_SOCKET // max(1, payload_max)))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, frames)
    # Under a cap, what has arrived unread is what the cap did not hold back: as little as possible.  But with 1 a
    # ROUTER of libzmq 4.3.5 never receives anything from those whom a ZAP handler let in.
    socket.setsockopt(zmq.RCVHWM, frames if download_bytes_per_s is None else LEAST_FRAMES)
    if download_bytes_per_s is not None and download_bytes_per_s < HIGH_LIMIT_BYTES_PER_S:
        window_bytes = int(CAPPED_RECEIVE_S * download_bytes_per_s)
        socket.setsockopt(zmq.RCVBUF, max(CAPPED_RECEIVE_LEAST_BYTES, window_bytes))
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
