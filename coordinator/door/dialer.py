"""Dialling back: can a peer's data plane be reached at the address it gave?  A shell, driven by the server.

The server hands over (peer, session, address, key) and collects verdicts.  A completed CURVE handshake is the proof:
whoever answers at that address holds the peer's session key.  Nothing is sent over the connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.coordinator.door.hello_check import is_address
from farflung.protocol.messages import Message, Probe, Probed, Refuse
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


# ---- prober ------------------------------------------------------------------------------------------------
# What a stranger may measure at the door: the way here and back, and whether it can be dialled.
#
# Called by the server with each `probe` of `farflung doctor`; a shell around the dialer. Bounded: all
# strangers together move so many bytes a second, and nobody is dialled but the caller itself, at the address
# its connection comes from.

BYTES_PER_S = 4 << 20
BURST_BYTES = 24 << 20
DIALS_AT_ONCE = 8
KEY_BYTES = 32
_NOBODY = ""  # the peer of a Target: a stranger's attempt is no member's


class Caller(NamedTuple):
    routing_id: bytes
    host: str  # where its connection comes from
    endpoint: str = ""  # the same with the port


class Prober:
    """`answer(routing id, message)` sends."""

    def __init__(self, dialer: Dialer, answer: Callable[[bytes, Message], None]) -> None:
        self._dialer = dialer
        self._answer = answer
        self._left_bytes = float(BURST_BYTES)
        self._filled_at = 0.0
        self._waiting: dict[bytes, Probed] = {}  # by routing id: said when the attempt has ended

    def on_probe(self, caller: Caller, probe: Probe, now: float) -> None:
        asked, host = caller.routing_id, caller.host
        if not self._may_move(len(probe.padding) + probe.want, now):
            busy = "others are measuring at the moment; try again in some seconds"
            self._answer(asked, Refuse(code="busy", reason=busy, retry_after_s=5.0))
            return
        probed = Probed(
            came_from=host[:128],
            wall_s=time.time(),
            padding=bytes(probe.want),
            dialled="",
            port=int(caller.endpoint.rpartition(":")[2] or 0),
        )
        if not probe.address:
            self._answer(asked, probed)
        elif len(probe.key) != KEY_BYTES or not _is_at(probe.address, host):
            self._say(
                asked,
                probed,
                f"not tried: your connection comes from {host.removeprefix('::ffff:') or 'elsewhere'}",
            )
        elif len(self._waiting) >= DIALS_AT_ONCE or asked in self._waiting:
            self._say(asked, probed, "not tried: too many ask at once")
        else:
            self._waiting[asked] = probed
            self._dialer.dial(Target(_NOBODY, asked, probe.address, probe.key))

    def on_verdict(self, target: Target, reached: bool) -> bool:
        """True if the attempt was a stranger's."""
        probed = self._waiting.pop(target.session, None) if target.peer == _NOBODY else None
        if probed is not None:
            self._say(target.session, probed, "yes" if reached else "no")
        return target.peer == _NOBODY

    def _say(self, caller: bytes, probed: Probed, dialled: str) -> None:
        self._answer(caller, msgspec.structs.replace(probed, dialled=dialled[:200]))

    def _may_move(self, size: int, now: float) -> bool:
        filled = self._left_bytes + (now - self._filled_at) * BYTES_PER_S
        self._left_bytes, self._filled_at = min(float(BURST_BYTES), filled), now
        if size > self._left_bytes:
            return False
        self._left_bytes -= size
        return True


def _is_at(address: str, host: str) -> bool:
    """Is that a port of this very host?  IPv4 callers of a socket for both appear as ::ffff:1.2.3.4."""
    named = address.rpartition(":")[0].strip("[]")
    return is_address(address) and bool(host) and named == host.removeprefix("::ffff:")
