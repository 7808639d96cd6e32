"""How lean connections (lean.py) come to be: who asks, who grants, who knocks at the port.

Owned by zmq_link.py, which shows it what the two sides say to each other about it over ZeroMQ.  A lean connection
stands beside one that was dialled; where there is no way to the port, as behind a firewall that lets only the other
one through, all stays as it was, and attempts become rare.

Who may lie: anybody may knock at the port, and is hung up on who does not know a ticket and the secret that belongs to
it; so many may stand there at once, few of one network (port.py), and for a few seconds.  A contact may ask without
end: a few of its tickets are kept.  It may name any port of the address at which it is reached, and then that one is
told a ticket and no secret.  Must not know rounds, limits, or which frame goes over which connection.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from farflung.collectives.link.lean import Lean, Watch
from farflung.collectives.link.peer_connections import ConnectionKind
from farflung.collectives.link.sealed_records import (
    HALF_BYTES,
    HELLO_BYTES,
    TICKET_BYTES,
    BadRecord,
    Grant,
    SealedDirections,
    check_hello,
    grant_of,
    ticket_in,
    ways_of,
)
from farflung.collectives.link.tcp_counts import TcpCounts, our_name
from farflung.protocol.frames import Payload
from farflung.protocol.limits import BULK_SLACK_BYTES, HANDSHAKE_S
from farflung.protocol.process.networks import network_of
from farflung.protocol.process.sockets import tuned

STRANGERS_PER_TURN = 64
TICKETS_OF_A_PEER = 4
# The port for lean connections comes so much after the other one, where its owner chose that.
PORTS_AFTER = 1000
LEAST_PORT = 1024  # whatever a contact says
AGAIN_S, AGAIN_MOST_S = 1.0, 300.0  # after an attempt that came to nothing; longer each time


@dataclass(eq=False)
class _Stranger:
    line: int  # its name at the port
    socket: socket.socket
    until: float
    heard: bytes = b""


@dataclass
class _Ticket:
    peer: str
    ways: SealedDirections
    until: float


@dataclass
class _Asking:
    """What this peer asked of one contact."""

    port: int = 0  # where that one takes lean connections, as it said last
    half: bytes = b""  # of the question that is not answered yet
    until: float = 0.0
    again_at: float = 0.0
    pause_s: float = AGAIN_S


class Gate(Protocol):
    """Of port.py: how many may stand at the port."""

    def comes(self, line: int, network: str) -> None: ...

    def ends(self, line: int) -> None: ...


class LeanSide:
    """All that are not made yet, from both sides."""

    def __init__(
        self, key: bytes, tcp: TcpCounts, clock: Callable[[], float], draw: Callable[[int], bytes]
    ) -> None:
        """`key`: this peer's own, as CURVE has it; `draw`: secret random bytes."""
        self._key, self._tcp, self._clock, self._draw = key, tcp, clock, draw
        self.gate: Gate | None = None  # before `listen`
        self.watch = Watch()
        self.port = 0  # where lean connections are taken; 0: nowhere
        self._door: socket.socket | None = None
        self._strangers: dict[int, _Stranger] = {}
        self._let_in_over: dict[int, Lean] = {}
        self._tickets: dict[bytes, _Ticket] = {}
        self._asking: dict[str, _Asking] = {}
        self.payload_most = 0
        self.receive_buffer = 0  # bytes; 0: as the kernel likes

    def expect(self, payload_max: int, receive_buffer: int) -> None:
        self.payload_most, self.receive_buffer = payload_max + BULK_SLACK_BYTES, receive_buffer

    def listen(self, host: str, main_port: int) -> None:
        """At a port that a firewall can be told; where that is taken, at any.  None is no harm."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in (main_port + PORTS_AFTER, 0) if main_port else (0,):
            door = socket.socket(family, socket.SOCK_STREAM)
            try:
                tuned(door, self.receive_buffer)
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                door.bind(("" if host == "*" else host.strip("[]"), port))
                door.listen(STRANGERS_PER_TURN)
            except (OSError, OverflowError):
                door.close()
                continue
            door.setblocking(False)
            self._door, self.port = door, int(door.getsockname()[1])
            self.watch.read(door, None)
            return

    def close(self) -> None:
        for stranger in list(self._strangers.values()):
            self._send_away(stranger)
        if self._door is not None:
            self._door.close()
            self._door, self.port = None, 0
        self._tickets.clear()
        self.watch.close()

    def forget(self, peer: str) -> None:
        self._asking.pop(peer, None)
        self._tickets = {name: each for name, each in self._tickets.items() if each.peer != peer}

    # ---- by whoever dials ------------------------------------------------------------------------------------

    def takes_them(self, peer: str, port: int) -> None:
        self._asking.setdefault(peer, _Asking()).port = port

    def ask(self, peer: str) -> bytes | None:
        """The half of a secret with which to ask for a connection; None: not now, or not that one."""
        asking, now = self._asking.get(peer), self._clock()
        if asking is None or asking.port < LEAST_PORT or now < asking.again_at:
            return None
        asking.half, asking.until = self._draw(HALF_BYTES), now + HANDSHAKE_S
        self.failed(peer)
        return asking.half

    def failed(self, peer: str) -> None:
        """Or will have, unless it stands: the next attempt is later."""
        asking = self._asking.get(peer)
        if asking is not None:
            asking.again_at = self._clock() + asking.pause_s
            asking.pause_s = min(AGAIN_MOST_S, 2 * asking.pause_s)

    def stands(self, peer: str) -> None:
        asking = self._asking.get(peer)
        if asking is not None:
            asking.pause_s, asking.again_at = AGAIN_S, self._clock()

    def dial(self, peer: str, theirs: bytes, host: str, granted: Payload) -> Lean | None:
        """The contact with the key `theirs` answered what was asked: connect, where it is reached already."""
        asking, grant, now = self._asking.get(peer), grant_of(bytes(granted)), self._clock()
        if asking is None or grant is None or not asking.half or now > asking.until or not host:
            return None
        half, asking.half = asking.half, b""
        if grant.port < LEAST_PORT:
            return None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        line = socket.socket(family, socket.SOCK_STREAM)
        try:
            tuned(line, self.receive_buffer)
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                line.connect((host, grant.port))
        except OSError:
            line.close()
            return None
        made = self._lean(peer, line, ways_of(half, grant, self._key, theirs, True), grant.ticket)
        self.watch.write(line, made, True)
        return made

    # ---- by whoever listens ----------------------------------------------------------------------------------

    def grant(self, peer: str, theirs: bytes, half: Payload) -> bytes | None:
        """What to answer to a contact that asks for a connection."""
        if not self.port or len(half) != HALF_BYTES:
            return None
        now = self._clock()
        self._tickets = {name: each for name, each in self._tickets.items() if now <= each.until}
        for oldest in [name for name, each in self._tickets.items() if each.peer == peer][
            : 1 - TICKETS_OF_A_PEER
        ]:
            del self._tickets[oldest]
        grant = Grant(self.port, self._draw(TICKET_BYTES), self._draw(HALF_BYTES))
        ways = ways_of(bytes(half), grant, theirs, self._key, False)
        self._tickets[grant.ticket] = _Ticket(peer, ways, now + HANDSHAKE_S)
        return grant.pack()

    def _let_in(self) -> None:
        assert self._door is not None and self.gate is not None
        for _ in range(STRANGERS_PER_TURN):
            try:
                line, address = self._door.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: they wait outside for a moment
                self.watch.forget(self._door)
                return
            line.setblocking(False)
            stranger = _Stranger(our_name(line), line, self._clock() + HANDSHAKE_S)
            self._strangers[stranger.line] = stranger
            self._let_in_over.pop(stranger.line, None)  # closed already, or its number would not be free
            self.watch.read(line, stranger)
            self.gate.comes(stranger.line, network_of(str(address[0])))

    def cut(self, line: int) -> None:
        """The port's word: others need the room."""
        if line in self._strangers:
            self._send_away(self._strangers[line])
        elif line in self._let_in_over:
            self._let_in_over[line].end()

    def _hear(self, stranger: _Stranger) -> Lean | None:
        """A connection, once the stranger has shown whose it is."""
        try:
            came = stranger.socket.recv(HELLO_BYTES - len(stranger.heard))
        except BlockingIOError:
            return None
        except OSError:
            came = b""
        stranger.heard += came
        if came and len(stranger.heard) < HELLO_BYTES:
            return None
        name = ticket_in(stranger.heard)
        ticket = self._tickets.get(name)
        if not came or ticket is None or self._clock() > ticket.until:
            self._send_away(stranger)
            return None
        try:
            check_hello(stranger.heard, ticket.ways.back)
        except BadRecord:
            del self._tickets[name]  # its count has gone on
            self._send_away(stranger)
            return None
        del self._tickets[name]
        del self._strangers[stranger.line]
        self.watch.forget(stranger.socket)
        made = self._lean(ticket.peer, stranger.socket, ticket.ways, b"")
        self._let_in_over[stranger.line] = made
        self.watch.read(stranger.socket, made)
        made.confirm(name)
        return made

    def _send_away(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.line]
        self.watch.forget(stranger.socket)
        stranger.socket.close()
        if self.gate is not None:
            self.gate.ends(stranger.line)

    def _lean(self, peer: str, line: socket.socket, ways: SealedDirections, ticket: bytes) -> Lean:
        return Lean(
            tcp=self._tcp, over=ConnectionKind.LEAN, descriptor=self._tcp.watch(line), peer=peer, socket=line,
            watch=self.watch, ways=ways, payload_most=self.payload_most, ticket=ticket,
            until=self._clock() + HANDSHAKE_S,
        )  # fmt: skip

    # ---- turns -----------------------------------------------------------------------------------------------

    def write_ready(self) -> None:
        for key, _ in self.watch.writing.select(0) if self.watch.writing.get_map() else ():
            if not key.data.is_over:
                key.data.on_room()

    def read_ready(self) -> Iterator[Lean]:
        """Those of which something came in; new ones among them."""
        for key, _ in self.watch.reading.select(0) if self.watch.reading.get_map() else ():
            if key.data is None:
                self._let_in()
            elif isinstance(key.data, _Stranger):
                if key.data.line in self._strangers and (made := self._hear(key.data)) is not None:
                    yield made
            elif not key.data.is_over:  # by what was done with a frame just before
                yield key.data

    def on_tick(self) -> None:
        now = self._clock()
        for stranger in [each for each in self._strangers.values() if now > each.until]:
            self._send_away(stranger)
        for line in [line for line, each in self._let_in_over.items() if each.is_over]:
            del self._let_in_over[line]
            if self.gate is not None:
                self.gate.ends(line)
        if self._door is not None and not self.watch.reads(self._door):
            self.watch.read(self._door, None)
