"""Answers libzmq's question at every new CURVE connection of its context: may this key come in?  (ZAP, RFC 27)

Called by the loops of the coordinator and of a peer's data plane, each with a handler for its own context.
Must not know what a key stands for: a domain's policy says yes or no.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from farflung.protocol.process.sockets import INPROC, opened

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
