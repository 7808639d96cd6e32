"""A connection between two peers without ZeroMQ: plain TCP, every frame sealed by AES-256-GCM (sealed_records.py).

Made by lean_side.py, owned by a line (peer_connections.py); zmq_link.py reads and writes what is ready.  libzmq's
encryption is calculated, this one is in the processor: a byte costs half.  Nothing is copied but by sealing and
opening: the kernel takes what was sealed in pieces, and writes what comes in where it is opened.

Who may lie: nobody but the contact, since what anybody else says does not open, and ends the connection.  The contact
may claim any length; memory is taken for one that is allowed.  Must not know rounds, limits or other connections.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

from farflung.collectives.link.frame_queue import QueuedFrame
from farflung.collectives.link.peer_connections import Bearer
from farflung.collectives.link.sealed_records import (
    HEAD_BYTES,
    TAG_BYTES,
    BadRecord,
    SealedDirections,
    answer,
    check_answer,
    hello,
    opened_header,
    sealed_frame,
    sealed_payload_bytes,
)

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
