"""A coordinator's door that says one thing to whoever comes, and a port at which nobody is.

For what happens before a peer is let in: who needs a run takes a real coordinator.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import zmq

from farflung.protocol import messages
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import PROTOCOL_VERSION
from farflung.protocol.messages import Challenge, Message
from farflung.protocol.process.sockets import curve_raw, curve_server

CHALLENGE = Challenge(nonce=bytes(32), run_id=bytes(16), manifest=b"{}", protocol=PROTOCOL_VERSION)
PUBLIC, SECRET = zmq.curve_keypair()


@contextlib.contextmanager
def door(answer: Message | None) -> Iterator[JoinUrl]:
    """That of a coordinator, on a free port of this machine.  None: it hears everything and says nothing."""
    context: zmq.Context[zmq.SyncSocket] = zmq.Context()
    there, over = context.socket(zmq.ROUTER), threading.Event()
    for option, value in curve_server(SECRET).items():
        there.setsockopt(option, value)
    port = there.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while not over.is_set():
            if there.poll(10):
                caller, _ = there.recv_multipart()
                if answer is not None:
                    there.send_multipart([caller, messages.encode(answer)])
        context.destroy(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield JoinUrl("127.0.0.1", port, "demo", curve_raw(PUBLIC))
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def nobody() -> Iterator[JoinUrl]:
    """A port of this machine at which nobody listens, and at which nobody else begins to meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield JoinUrl("127.0.0.1", taken.getsockname()[1], "demo", curve_raw(PUBLIC))
