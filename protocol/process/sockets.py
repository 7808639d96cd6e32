"""The options of every ZeroMQ socket of farflung, by what the socket is for, and how a CURVE key is written for it.

Called by whoever opens a socket; binding and connecting are its own business.  Must not know whose key it is, or what
is said over the socket.

No socket has ZMTP heartbeats: libzmq 4.3.5 aborts the whole process when a heartbeat is due on a connection that broke
while its receive queue was full.  The kernel's keepalive and our own beats find the dead.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable, Mapping

import zmq
from zmq.utils import z85

from farflung.protocol.limits import BULK_SLACK_BYTES, CONTROL_FRAME_BYTES, HANDSHAKE_S

Socket = zmq.Socket[bytes]
Keys = tuple[bytes, bytes]  # a CURVE public key and its secret, in base 85
Options = Mapping[int, int | bytes]


def take_all_descriptors() -> None:
    """As many connections as the system lets this process have: of each it takes two or more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# What a connection has taken goes over no other one any more, and one that got slow would hold seconds of it.
_UNSENT_BYTES = 256 * 1024


def opened(context: zmq.Context[Socket], kind: int, *presets: Options) -> Socket:
    socket = context.socket(kind)
    for preset in presets:
        for option, value in preset.items():
            socket.setsockopt(option, value)
    return socket


def end_abruptly(descriptor: int) -> None:
    """A TCP connection that leaves nothing behind when it is closed.  One from a chosen port would else keep that port
    from the same other end for a minute."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # it has gone already


def tuned(line: socket.socket, receive_buffer: int) -> None:
    """A socket of the data plane that is not ZeroMQ's, as those of ZeroMQ are.  `receive_buffer`: bytes; 0: any."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system has all of them.
    for name, value in (
        ("TCP_KEEPIDLE", _KEPT_ALIVE[zmq.TCP_KEEPALIVE_IDLE]),
        ("TCP_KEEPINTVL", _KEPT_ALIVE[zmq.TCP_KEEPALIVE_INTVL]),
        ("TCP_KEEPCNT", _KEPT_ALIVE[zmq.TCP_KEEPALIVE_CNT]),
        ("TCP_USER_TIMEOUT", _DEAD_CONNECTION_MS),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
    ):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if receive_buffer:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)


# ---- keys: base 85 is how libzmq wants them --------------------------------------------------------------------------


def curve_text(raw: bytes) -> bytes:
    """A key of 32 bytes in base 85."""
    return bytes(z85.encode(raw))


def curve_raw(text: bytes) -> bytes:
    """The 32 bytes of a key in base 85."""
    return bytes(z85.decode(text))


def curve_client(keys: Keys, server_key: bytes) -> Options:
    """`server_key`: the 32 bytes of the key that must answer."""
    public, secret = keys
    return {
        zmq.CURVE_PUBLICKEY: public,
        zmq.CURVE_SECRETKEY: secret,
        zmq.CURVE_SERVERKEY: curve_text(server_key),
    }


def curve_server(secret: bytes, zap_domain: bytes = b"") -> Options:
    """`zap_domain`: whose policy says who may come in; without one everybody may."""
    options: dict[int, int | bytes] = {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret}
    return options | {zmq.ZAP_DOMAIN: zap_domain} if zap_domain else options


# ---- presets ---------------------------------------------------------------------------------------------------------

_DEAD_CONNECTION_MS = 10_000  # nothing was acknowledged for so long
# Encryption adds bytes to a message; what is far over is cut unread.
_CONTROL_MESSAGE: Options = {zmq.MAXMSGSIZE: CONTROL_FRAME_BYTES + 4096}
_HANDSHAKE: Options = {zmq.HANDSHAKE_IVL: round(1000 * HANDSHAKE_S)}
_KEPT_ALIVE: Options = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: _DEAD_CONNECTION_MS,
}

# A caller that forgets, when it hangs up, what was not delivered.
CLIENT: Options = {zmq.LINGER: 0, zmq.IPV6: 1}

# A caller that asks the coordinator's door something and is no member.
STRANGER: Options = {**CLIENT, **_CONTROL_MESSAGE, **_HANDSHAKE, zmq.RECONNECT_IVL: 200}

# A peer's connection to its coordinator.
CONTROL_CLIENT: Options = {
    **STRANGER,
    zmq.SNDHWM: 256,  # a hash list and progress for each of many fragments
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_MAXRT: _DEAD_CONNECTION_MS,
}

# A peer's connection to the coordinator's door, which it dials for as long as nobody is there.  After a cut of the line
# TCP itself would try again after 1, 2, 4, 8 and 16 seconds; what was said to nobody is forgotten (ControlLink).
CONTACT_TRY_MS = 1000
DOOR_CLIENT: Options = {
    **STRANGER,
    zmq.IMMEDIATE: 1,
    zmq.CONNECT_TIMEOUT: CONTACT_TRY_MS,
    zmq.TCP_MAXRT: _DEAD_CONNECTION_MS,
}

# One attempt to connect and no second one.
ONE_ATTEMPT: Options = {**CLIENT, zmq.RECONNECT_IVL: -1}

# Where the coordinator listens: for strangers, and for its members.
CONTROL_SERVER: Options = {
    **CLIENT,
    **_CONTROL_MESSAGE,
    **_HANDSHAKE,
    # Which member is dead is the machine's word, from the beats, by the manifest's dead_after_s; this finds
    # connections.
    **_KEPT_ALIVE,
    zmq.SNDHWM: 256,  # of a ROUTER: for each connection; a tick, and a plan and a decision for each fragment
    zmq.RCVHWM: 64,
    zmq.ROUTER_MANDATORY: 1,  # say so instead of losing an answer silently
    zmq.BACKLOG: 1024,  # after a restart all peers come back at once
}

# Where the host of a bench collects figures: its last answers may still leave.
REPORTS_BYTES = 64 << 20
REPORTS_SERVER: Options = {zmq.LINGER: 1000, zmq.IPV6: 1, zmq.MAXMSGSIZE: REPORTS_BYTES}

# Within one process.
INPROC: Options = {zmq.LINGER: 0}

# Between the processes of one peer.
LOCAL_CHANNEL: Options = {zmq.LINGER: 0, zmq.RCVHWM: 1000, zmq.SNDHWM: 1000, zmq.MAXMSGSIZE: 4 << 20}


# ---- bulk: the data plane --------------------------------------------------------------------------------------------

BYTES_IN_SOCKET = 1024 * 1024  # per connection and direction, in frames of the largest size, but ...
LEAST_FRAMES, MOST_FRAMES = 2, 64  # ... at least and at most so many
# Of what a limit on the download lets through: the window of a line with a round trip of so long, and not more, since
# what waits unread has crossed the line already.  Of a high limit Linux's own buffers (6 MB) are under a second, and
# few may ask for so much.
CAPPED_RECEIVE_S, CAPPED_RECEIVE_LEAST_BYTES = 0.2, 128 * 1024
HIGH_LIMIT_BYTES_PER_S = 6_250_000  # 50 Mbit/s

# A socket that is not connected takes nothing: it waits in the line.
BULK_CLIENT: Options = {zmq.IMMEDIATE: 1}
# Over a way that its owner makes anew when it is over.
BULK_RELAYED: Options = {zmq.RECONNECT_IVL: -1}
# To somebody who connects to this peer in the same moment: one attempt, which is over before the next one is due.
MEETING_TRY_MS = 900
BULK_MEETING: Options = {zmq.RECONNECT_IVL: -1, zmq.CONNECT_TIMEOUT: MEETING_TRY_MS}
BULK_SERVER: Options = {zmq.ROUTER_HANDOVER: 1, zmq.ROUTER_MANDATORY: 1}


def bulk(payload_max: int, download_bytes_per_s: float | None) -> Options:
    """Of both ends.  `download_bytes_per_s`: the limit on what is received."""
    frames = min(MOST_FRAMES, max(LEAST_FRAMES, BYTES_IN_SOCKET // max(1, payload_max)))
    options: dict[int, int | bytes] = {
        **CLIENT,
        **_HANDSHAKE,
        **_KEPT_ALIVE,
        zmq.SNDHWM: frames,
        # Under a cap, what has arrived unread is what the cap did not hold back: as little as possible.  But with 1 a
        # ROUTER of libzmq 4.3.5 never receives anything from those whom a ZAP handler let in.
        zmq.RCVHWM: frames if download_bytes_per_s is None else LEAST_FRAMES,
        zmq.MAXMSGSIZE: payload_max + BULK_SLACK_BYTES,
        zmq.RECONNECT_IVL: 200,
        zmq.RECONNECT_IVL_MAX: 5000,
    }
    if download_bytes_per_s is not None and download_bytes_per_s < HIGH_LIMIT_BYTES_PER_S:
        window_bytes = int(CAPPED_RECEIVE_S * download_bytes_per_s)
        options[zmq.RCVBUF] = max(CAPPED_RECEIVE_LEAST_BYTES, window_bytes)
    return options


# ---- zap ---------------------------------------------------------------------------------------------------
# Answers libzmq's question at every new CURVE connection of its context: may this key come in? (ZAP, RFC 27)
#
# Called by the loops of the coordinator and of a peer's data plane, each with a handler for its own context.
# Must not know what a key stands for: a domain's policy says yes or no.

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol
ANSWERS_PER_TURN = 256

Policy = Callable[[bytes], bool]


class ZapHandler:
    """Poll `socket`, then call `serve_waiting`.  Must be made before the context binds its first listener.

    The key lets a connection in, and then comes with each of its frames: `frame.get("User-Id")` is its hex.
    A connection that is refused is not tried again by the other side's socket.
    """

    def __init__(self, context: zmq.Context[zmq.SyncSocket]) -> None:
        self._policies: dict[str, Policy] = {}
        self.socket = opened(context, zmq.REP, INPROC)
        self.socket.bind(ENDPOINT)

    def set_policy(self, domain: str, policy: Policy) -> None:
        """Sockets with this ZAP_DOMAIN accept the 32-byte keys that the policy allows; other domains none."""
        self._policies[domain] = policy

    def forget_policy(self, domain: str) -> None:
        """Nobody comes in there any more."""
        self._policies.pop(domain, None)

    def serve_waiting(self) -> None:
        """Answer what has come so far, without waiting; a bounded number, so that the caller's loop goes on."""
        for _ in range(ANSWERS_PER_TURN):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(request))

    def close(self) -> None:
        self.socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, _address, _identity, mechanism, *credentials = request
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        policy = self._policies.get(domain.decode("utf-8", "replace"))
        if len(key) == 32 and policy is not None and policy(key):
            return [version, request_id, b"200", b"", key.hex().encode("ascii"), b""]
        return [version, request_id, b"400", b"not allowed", b"", b""]
