"""Asks two ports of the coordinator from where they see one port of this machine: what does its router do?

Called by `farflung doctor`.  The door answers a probe with the caller's port; the relay answers whoever asks it where
it is (coordinator/relay/socks.py).  Both are asked from one local port, as a peer does that meets others.  Judges
nothing.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

import zmq

from farflung.console.doctor.advice import SeenPort
from farflung.peer.line.data_line import both_ends
from farflung.protocol import envelope
from farflung.protocol.errors import FrameError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.messages import Probe, Probed
from farflung.protocol.process.sockets import STRANGER, Options, curve_client, end_abruptly, opened

PATIENCE_S = 3.0
_ASK = b"\x05\x01\x00\x03\x05where\x00\x01"
_GREETING, _CHOSEN = b"\x05\x01\x00", b"\x05\x00"
_HOST_BYTES = {1: 4, 4: 16}  # by the kind of address in a SOCKS5 answer


def look(url: JoinUrl, relay_port: int) -> SeenPort:
    """`relay_port`: 0 where there is none.  OSError where there is no way to the coordinator."""
    _, there = both_ends(url)
    every = "[::]" if ":" in there else "0.0.0.0"
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((every.strip("[]"), 0))
        port = int(kept.getsockname()[1])
        door = _by_door(url, f"tcp://{every}:{port};{there}:{url.port}")
        relay = _by_relay(kept.family, port, (there.strip("[]"), relay_port)) if relay_port else ""
    return SeenPort(port, door, relay)


def _by_door(url: JoinUrl, endpoint: str) -> str:
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    family: Options = {zmq.IPV6: int("[" in endpoint)}
    line = opened(context, zmq.DEALER, STRANGER, family, curve_client(zmq.curve_keypair(), url.key))
    try:
        line.connect(endpoint)
        line.send(envelope.encode(Probe(padding=b"", want=0, address="", key=b"")))
        if not line.poll(round(1000 * PATIENCE_S)):
            return ""
        said = envelope.decode(line.recv(), frozenset({"probed", "refuse"}))
    except (zmq.ZMQError, FrameError):
        return ""
    finally:
        context.destroy(linger=0)
    if not isinstance(said, Probed) or not said.port:
        return ""
    return str(Address(said.came_from.removeprefix("::ffff:"), said.port))


def _by_relay(family: int, port: int, relay: tuple[str, int]) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as line:
        try:
            line.settimeout(PATIENCE_S)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.bind(("", port))
            end_abruptly(line.fileno())
            line.connect(relay)
            line.sendall(_GREETING)
            if line.recv(len(_CHOSEN), socket.MSG_WAITALL) != _CHOSEN:
                return ""
            line.sendall(_ASK)
            head = line.recv(4, socket.MSG_WAITALL)
            size = _HOST_BYTES.get(head[3], 0) if len(head) == 4 else 0
            told = line.recv(size + 2, socket.MSG_WAITALL) if size else b""
        except OSError:
            return ""
    if not size or len(told) != size + 2:
        return ""
    seen_port = int(struct.unpack(">H", told[size:])[0])
    return str(Address(str(ipaddress.ip_address(told[:size])), seen_port)) if seen_port else ""
