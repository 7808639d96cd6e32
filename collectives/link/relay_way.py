"""One way over a relay: this peer's connection to it, and the local socket by which libzmq uses that.

Owned by a line (peer_connections.py) of zmq_link.py, which looks at it in each of its turns.  It asks the relay for
its ticket's pair (SOCKS5), waits there until the other side has come, and then passes bytes between the relay and a
local socket that libzmq connects to.  libzmq speaks SOCKS itself, but 4.3.5 ends the whole process where a socket is
closed after a proxy refused it (it takes a descriptor out of its epoll twice), and a relay must not have that in its
hands.

The relay may lie about everything: what comes from it is CURVE's, from end to end, and read by libzmq alone.  Must not
know peers, keys or frames.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from enum import StrEnum

from farflung.collectives.link.link import Relayed
from farflung.protocol.process.descriptors import Pipe

ASKS_WITHIN_S = 10.0  # for a connection to the relay, and its first word
# It hangs up by itself on whoever waits too long; this is for one that vanished.
WAITS_S = 90.0
PUMPS_PER_TURN = 8
_GREETING = b"\x05\x01\x00"
_CHOSEN = b"\x05\x00"
_ANSWER_BYTES = 10


class RelayState(StrEnum):
    CONNECTING = "connecting"
    GREETED = "greeted"
    WAITING = "waiting"  # it has shown its ticket
    JOINED = "joined"
    OVER = "over"


class RelayWay:
    def __init__(self, way: Relayed, now: float) -> None:
        self.way = way
        self.stand = RelayState.CONNECTING
        self.why_over = ""
        self._since = now
        self._heard = b""
        self._local: socket.socket | None = None
        self._pipes: tuple[Pipe, Pipe] | None = None  # from the relay, to the relay
        host, _, port = way.relay.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._remote = socket.socket(family, socket.SOCK_STREAM)
        self._remote.setblocking(False)
        self._remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        name = f"farflung-{secrets.token_hex(16)}"
        self._listener.bind(f"\0{name}")
        self._listener.listen(1)
        self.endpoint = f"ipc://@{name}"  # for libzmq, once both sides are joined
        try:
            self._remote.connect((host, int(port)))
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            self._end(f"no way to the relay at {way.relay}: {error}")

    @property
    def descriptor(self) -> int:
        """Of the connection to the relay."""
        return self._remote.fileno()

    def sockets(self) -> Iterator[tuple[int, int]]:
        """What to poll, and for what."""
        if self.stand == RelayState.OVER:
            return
        if self.stand == RelayState.CONNECTING:
            yield self.descriptor, select.POLLOUT
        elif self._pipes is None or self._local is None:
            yield self.descriptor, select.POLLIN
            if self.stand == RelayState.JOINED:
                yield self._listener.fileno(), select.POLLIN
        else:
            from_relay, to_relay = self._pipes
            for descriptor, pipe, other in (
                (self.descriptor, from_relay, to_relay),
                (self._local.fileno(), to_relay, from_relay),
            ):
                events = (0 if pipe.inside else select.POLLIN) | (select.POLLOUT if other.inside else 0)
                if events:
                    yield descriptor, events

    def turn(self, now: float) -> None:
        """Whatever can be done without waiting."""
        if self.stand in (RelayState.CONNECTING, RelayState.GREETED, RelayState.WAITING):
            self._ask(now)
        if self.stand == RelayState.JOINED and self._local is None:
            self._let_in()
        if self._pipes is not None and self._local is not None:
            self._pass(self._local, *self._pipes)

    def close(self) -> None:
        self._end("closed")

    # ---- until both sides are there ----------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        if self.stand == RelayState.CONNECTING:
            self._connected()
        patience_s = WAITS_S if self.stand == RelayState.WAITING else ASKS_WITHIN_S
        if self.stand == RelayState.OVER:
            return
        if now - self._since >= patience_s:
            self._end("the relay said nothing")
            return
        wanted = _ANSWER_BYTES if self.stand == RelayState.WAITING else len(_CHOSEN)
        try:
            # Not one byte more than its answer: what comes next is for libzmq.
            came = self._remote.recv(wanted - len(self._heard))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"the relay: {error.strerror}")
            return
        self._heard += came
        if not came:
            self._end("the relay hung up")
        elif len(self._heard) == wanted:
            self._on_answer(now)

    def _connected(self) -> None:
        if not _is_writable(self._remote):
            return
        error = self._remote.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(f"no way to the relay at {self.way.relay}: {os.strerror(error)}")
        else:
            self._say(_GREETING, RelayState.GREETED)

    def _on_answer(self, now: float) -> None:
        heard, self._heard, self._since = self._heard, b"", now
        if self.stand == RelayState.GREETED and heard == _CHOSEN:
            name = self.way.ticket.encode("ascii", "replace")
            self._say(b"\x05\x01\x00\x03" + bytes((len(name),)) + name + b"\x00\x01", RelayState.WAITING)
        elif self.stand == RelayState.WAITING and heard[:2] == b"\x05\x00":
            self.stand = RelayState.JOINED
        else:
            self._end("the relay did not take the ticket")

    def _say(self, word: bytes, then: RelayState) -> None:
        try:
            sent = self._remote.send(word)  # into an empty buffer
        except OSError as error:
            self._end(f"the relay: {error.strerror}")
            return
        if sent == len(word):
            self.stand = then
        else:
            self._end("the relay takes nothing")

    # ---- then --------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        try:
            local, _ = self._listener.accept()
        except OSError:
            return
        if _user_of(local) != os.getuid():
            local.close()  # of this machine, and not us
            return
        local.setblocking(False)
        try:
            self._pipes = Pipe(), Pipe()
        except OSError as error:
            local.close()
            self._end(f"no descriptors left: {error.strerror}")
            return
        self._local = local
        self._listener.close()

    def _pass(self, local: socket.socket, from_relay: Pipe, to_relay: Pipe) -> None:
        for _ in range(PUMPS_PER_TURN):
            moved = 0
            for pipe, source, target in ((from_relay, self._remote, local), (to_relay, local, self._remote)):
                size = 0 if pipe.inside else pipe.fill(source.fileno())
                if size is None or not pipe.drain(target.fileno()):
                    self._end("the other side hung up")
                    return
                moved += size
            if not moved:
                return

    def _end(self, why: str) -> None:
        if self.stand == RelayState.OVER:
            return
        self.stand, self.why_over = RelayState.OVER, why
        for each in (self._remote, self._listener, self._local):
            if each is not None:
                each.close()
        for pipe in self._pipes or ():
            pipe.close()
        self._pipes = self._local = None


def _is_writable(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLOUT)
    return bool(poller.poll(0))


def _user_of(connection: socket.socket) -> int:
    """Who is at the other end of a local socket."""
    form = struct.Struct("=iII")
    _, user, _ = form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return int(user)
