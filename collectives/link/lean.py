"""A connection between two peers without ZeroMQ: plain TCP, every frame sealed by AES-256-GCM (sealed_records.py).

Made by `LeanSide`, owned by a line (peer_connections.py); zmq_link.py reads and writes what is ready.  libzmq's
encryption is calculated, this one is in the processor: a byte costs half.  Nothing is copied but by sealing and
opening: the kernel takes what was sealed in pieces, and writes what comes in where it is opened.

Who may lie: nobody but the contact, since what anybody else says does not open, and ends the connection.  The contact
may claim any length; memory is taken for one that is allowed.  Must not know rounds, limits or other connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from farflung.collectives.link.frame_queue import QueuedFrame
from farflung.collectives.link.peer_connections import Bearer, ConnectionKind
from farflung.collectives.link.sealed_records import (
    HALF_BYTES,
    HEAD_BYTES,
    HELLO_BYTES,
    TAG_BYTES,
    TICKET_BYTES,
    BadRecord,
    Grant,
    SealedDirections,
    answer,
    check_answer,
    check_hello,
    grant_of,
    hello,
    opened_header,
    sealed_frame,
    sealed_payload_bytes,
    ticket_in,
    ways_of,
)
from farflung.collectives.link.tcp_counts import TcpCounts, our_name
from farflung.protocol.frames import Payload
from farflung.protocol.limits import BULK_SLACK_BYTES, HANDSHAKE_S
from farflung.protocol.process.networks import network_of
from farflung.protocol.process.sockets import tuned

WAITING_BYTES_MOST = 256 * 1024  # sealed, and not taken by the kernel: then no further frame is
PIECES_AT_ONCE = 64
_AT_ONCE = struct.pack("ii", 1, 0)
WAKE_BYTES = 128 * 1024  # of a frame that comes in: less is not worth a turn


class Watch:
    """Which sockets can be read, or written, behind two descriptors that a poller looks at."""

    def __init__(self) -> None:
        self.reading, self.writing = selectors.DefaultSelector(), selectors.DefaultSelector()

    def read(self, each: socket.socket, owner: object) -> None:
        self.reading.register(each, selectors.EVENT_READ, owner)

    def reads(self, each: socket.socket) -> bool:
        return each.fileno() in self.reading.get_map()

    def write(self, each: socket.socket, owner: object, wanted: bool) -> None:
        stands = each.fileno() in self.writing.get_map()
        if wanted and not stands:
            self.writing.register(each, selectors.EVENT_WRITE, owner)
        elif stands and not wanted:
            self.writing.unregister(each)

    def forget(self, each: socket.socket) -> None:
        for selector in (self.reading, self.writing):
            if each.fileno() in selector.get_map():
                selector.unregister(each)

    def close(self) -> None:
        self.reading.close()
        self.writing.close()


@dataclass(kw_only=True, eq=False)
class Lean(Bearer):
    peer: str
    socket: socket.socket
    watch: Watch
    ways: SealedDirections
    payload_most: int
    ticket: bytes  # of one that we dialled, until it is answered
    until: float  # it stands by then, or never
    _has_said_hello: bool = False
    _out: deque[memoryview] = field(default_factory=deque)
    _out_bytes: int = 0
    _head: bytearray = field(default_factory=lambda: bytearray(HEAD_BYTES))
    _header: bytes | None = None  # of the frame whose payload comes in
    _sealed: bytearray = field(default_factory=bytearray)
    _wanted: int = HEAD_BYTES  # bytes of what comes in: the head, or the payload
    _got: int = 0
    _wakes_at: int = 1
    _is_idle: bool = True  # since it was listened to last

    def read_news(self) -> bool:
        return False  # nothing needs to be shown over it: its ticket said whose it is

    def listen(self, now: float) -> None:
        super().listen(now)
        if self._is_idle and self._header is None:
            self._sealed = bytearray()  # of the largest frame so far; of many connections few bring something
        self._is_idle = True

    # ---- out -------------------------------------------------------------------------------------------------

    def offer(self, item: QueuedFrame) -> bool:
        if not self.up or self._out_bytes >= WAITING_BYTES_MOST:
            return False
        if self.ways.out.is_spent:
            self.end()  # another one comes, with another key
            return False
        pieces = sealed_frame(item.header, item.payload, self.ways.out)
        self.on_the_way.take(item.header, sum(map(len, pieces)), item.kind, item)
        self._say(pieces)
        return True

    def on_room(self) -> None:
        """The kernel takes more, or has connected."""
        if not self.ticket or self._has_said_hello:
            self.push()
        elif self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.end()
        else:
            self._has_said_hello, self._wanted = True, TAG_BYTES
            self.watch.read(self.socket, self)
            self._say([hello(self.ticket, self.ways.out)])

    def confirm(self, ticket: bytes) -> None:
        """It was dialled to us, and the hello was good."""
        self.up = True
        self._say([answer(ticket, self.ways.out)])

    def _say(self, pieces: list[bytes]) -> None:
        self._out.extend(map(memoryview, pieces))
        self._out_bytes += sum(map(len, pieces))
        self.push()

    def push(self) -> None:
        """As much as the kernel takes."""
        while self._out and not self.is_over:
            try:
                left = self.socket.sendmsg([self._out[n] for n in range(min(PIECES_AT_ONCE, len(self._out)))])
            except BlockingIOError:
                break
            except OSError:
                self.end()
                return
            self._out_bytes -= left
            while self._out and left >= len(self._out[0]):
                left -= len(self._out.popleft())
            if left:
                self._out[0] = self._out[0][left:]
        if not self.is_over:
            self.watch.write(self.socket, self, bool(self._out))

    # ---- in --------------------------------------------------------------------------------------------------

    def receive(self) -> tuple[bytes, bytes] | None:
        """The next frame, header and payload, once all of it is there."""
        try:
            while not self.is_over and self._fill():
                self._got = 0
                if self.ticket:
                    self._answered()
                elif (frame := self._step()) is not None:
                    return frame
        except BadRecord:
            self.end()
        return None

    def _answered(self) -> None:
        check_answer(bytes(self._head[:TAG_BYTES]), self.ticket, self.ways.back)
        self.up, self.ticket, self._wanted = True, b"", HEAD_BYTES

    def _step(self) -> tuple[bytes, bytes] | None:
        """A head or a payload is whole."""
        if self._header is not None:
            header, self._header = self._header, None
            payload = self.ways.back.open(memoryview(self._sealed)[: self._wanted])
            self._wanted = HEAD_BYTES
            return header, payload
        self._header = opened_header(self._head, self.ways.back)  # before anything else in it is believed
        self._wanted = sealed_payload_bytes(self._head)
        if self._wanted > self.payload_most + TAG_BYTES:
            raise BadRecord
        if not self._wanted:
            header, self._header, self._wanted = self._header, None, HEAD_BYTES
            return header, b""
        if len(self._sealed) < self._wanted:
            self._sealed = bytearray(self._wanted)
        return None

    def _fill(self) -> bool:
        """Whether all that is wanted is there."""
        whole = memoryview(self._head if self._header is None else self._sealed)
        while self._got < self._wanted:
            try:
                came = self.socket.recv_into(whole[self._got : self._wanted])
            except BlockingIOError:
                self._wake_at(min(WAKE_BYTES, self._wanted - self._got))
                return False
            except OSError:
                came = 0
            if not came:
                self.end()
                return False
            self._got += came
            self._is_idle = False
        return True

    def _wake_at(self, size: int) -> None:
        if size != self._wakes_at:
            self._wakes_at = size
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def has_failed(self, now: float) -> bool:
        return self.is_over or (not self.up and now > self.until)

    # ---- its end ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing comes or goes any more; whoever owns it closes it."""
        if not self.is_over:
            self.up, self.is_over = False, True
            self.watch.forget(self.socket)

    def close(self) -> None:
        if self.socket.fileno() < 0:
            return  # its number may be another's by now
        self.end()
        self.tcp.forget(self.descriptor)
        if self.is_abrupt:  # or the kernel would go on with what it holds
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.socket.close()


# ---- lean side ---------------------------------------------------------------------------------------------
# How lean connections come to be: who asks, who grants, who knocks at the port.
#
# Owned by zmq_link.py, which shows it what the two sides say to each other about it over ZeroMQ. A lean
# connection stands beside one that was dialled; where there is no way to the port, as behind a firewall that
# lets only the other one through, all stays as it was, and attempts become rare.
#
# Who may lie: anybody may knock at the port, and is hung up on who does not know a ticket and the secret that
# belongs to it; so many may stand there at once, few of one network (port.py), and for a few seconds. A
# contact may ask without end: a few of its tickets are kept. It may name any port of the address at which it
# is reached, and then that one is told a ticket and no secret. Must not know rounds, limits, or which frame
# goes over which connection.

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
