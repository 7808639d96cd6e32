"""Dialling back: can a peer's data plane be reached at the address it gave?  A shell, driven by the server.

The server hands over (peer, session, address, key) and collects verdicts.  A completed CURVE handshake is the proof:
whoever answers at that address holds the peer's session key.  Nothing is sent over the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.protocol.process.sockets import ONE_ATTEMPT, Keys, Socket, curve_client, opened

DIAL_S = 3.0  # no handshake within this: it can't be dialled
# What ends the one attempt before that: a refused connection, or one that ends before hands were shaken.
_OVER = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
AT_ONCE = 64  # the others wait their turn: a crowd at the door must not open a crowd of sockets


@dataclass(frozen=True, slots=True)
class Target:
    peer: str
    session: bytes
    address: str
    key: bytes  # CURVE public key that must answer there


@dataclass(frozen=True, slots=True)
class _Dial:
    target: Target
    socket: Socket
    monitor: Socket
    until: float


class Dialer:
    def __init__(
        self,
        context: zmq.Context[Socket],
        keys: Keys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: the coordinator's own, z85: a peer lets in nobody else whom it was not told of."""
        self._context = context
        self._keys = keys
        self._clock = clock
        self._queue: list[Target] = []
        self._open: list[_Dial] = []

    def dial(self, target: Target) -> None:
        self._queue.append(target)

    def verdicts(self) -> Iterator[tuple[Target, bool]]:
        """Attempts that ended since the last call, then the next ones are begun."""
        now, still = self._clock(), []
        for attempt in self._open:
            seen = _first_event(attempt.monitor)
            if seen or now >= attempt.until:
                self._end(attempt)
                yield attempt.target, seen == zmq.EVENT_HANDSHAKE_SUCCEEDED
            else:
                still.append(attempt)
        self._open = still
        while self._queue and len(self._open) < AT_ONCE:
            target = self._queue.pop(0)
            begun = self._begin(target, now)
            if begun is None:
                yield target, False
            else:
                self._open.append(begun)

    def close(self) -> None:
        for attempt in self._open:
            self._end(attempt)
        self._open.clear()

    def _begin(self, target: Target, now: float) -> _Dial | None:
        socket = opened(self._context, zmq.DEALER, ONE_ATTEMPT, curve_client(self._keys, target.key))
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _OVER)
        attempt = _Dial(target, socket, monitor, now + DIAL_S)
        try:
            socket.connect(f"tcp://{target.address}")
        except zmq.ZMQError:  # not an address after all
            self._end(attempt)
            return None
        return attempt

    @staticmethod
    def _end(attempt: _Dial) -> None:
        attempt.socket.disable_monitor()
        attempt.monitor.close(linger=0)
        attempt.socket.close(linger=0)


def _first_event(monitor: Socket) -> int:
    """0: nothing has come of the attempt yet."""
    if not monitor.poll(0):
        return 0
    return int(parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"])
