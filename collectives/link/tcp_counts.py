"""What the kernel knows of the TCP connections behind the data plane: bytes that really crossed the line.

Owned by zmq_link.py and peer_connections.py, which pass on the news of their sockets' monitors.  A frame that a
socket took is not yet sent, and may wait for seconds in buffers; a frame that was read may have arrived long before.
What the other side acknowledged, and what arrived here, the kernel counts for each connection.  It tells so on Linux;
elsewhere `is_known` is false.  Through the same descriptors the kernel is told to pace what it sends: a chunk that
may pass as a whole would otherwise fill the queue of a slow line at once.  Must not know peers, frames or why there
is a pace.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import zmq

OPENED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED
NEWS = OPENED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
# struct tcp_info of linux/tcp.h: snd_mss, unacked, sacked, bytes_acked, bytes_received, notsent_bytes
_FIELDS = struct.Struct("=16xI4xII88xQQ8xI")
_SO_MAX_PACING_RATE = 47  # of Linux; bytes per second, all ones for none
_UNPACED = 0xFFFF_FFFF
_SLOWEST_PACE = 1000
# libzmq's news of a descriptor that is closed may come late, and the number be another socket's by then.
_OURS = 1 << 30
LOOK_EVERY_S = 0.01


class TcpTraffic(NamedTuple):
    sent: int  # and acknowledged, also what the other side holds beyond a gap
    received: int
    waiting: int  # in the kernel's queues, because the line takes no more at once
    flying: int  # segments that left and were not acknowledged yet
    beyond_gap: int = 0  # bytes that are there, and can't be read before others that are not

    @property
    def arrived(self) -> int:
        return self.sent - self.beyond_gap


NOTHING = TcpTraffic(0, 0, 0, 0)


class TcpCounts:
    """The connections of one or several ZeroMQ sockets, by their file descriptors."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._open: dict[int, socket.socket] = {}
        self._last: dict[int, TcpTraffic] = {}  # of each, when it was read last
        self._totals = NOTHING
        self._clock, self._looked_at = clock, -math.inf
        self._pace = _UNPACED
        self.is_known = sys.platform == "linux"

    def on_news(self, event: int, descriptor: int) -> None:
        """An event of a socket's monitor, and its value."""
        if event & OPENED:
            self._watch(descriptor, descriptor)
        elif event & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED):
            self.forget(descriptor)

    def watch(self, connection: socket.socket) -> int:
        """One that is not ZeroMQ's; the number by which it is known here until it is forgotten."""
        self._watch(connection.fileno(), our_name(connection))
        return our_name(connection)

    def _watch(self, descriptor: int, name: int) -> None:
        if not self.is_known:
            return
        self.forget(name)
        try:
            # A descriptor of our own: the number may belong to something else by the time we look.
            watched = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return  # closed already
        if _read(watched) is None:
            watched.close()
        else:
            self._open[name], self._last[name] = watched, NOTHING
            if self._pace != _UNPACED:
                _set_pace(watched, self._pace)

    def far_end(self, descriptor: int) -> str:
        """The address, in numbers, to which this connection leads; "" if that is not known."""
        watched = self._open.get(descriptor)
        if watched is None:
            return ""
        try:
            with socket.socket(fileno=os.dup(watched.fileno())) as line:  # which asks for the family
                return str(line.getpeername()[0]).removeprefix("::ffff:")
        except OSError:
            return ""

    def pace(self, bytes_per_s: float | None) -> None:
        """Each connection sends at most so fast."""
        wanted = (
            _UNPACED if bytes_per_s is None else min(_UNPACED - 1, max(_SLOWEST_PACE, round(bytes_per_s)))
        )
        if wanted != self._pace:
            self._pace = wanted
            for each in self._open.values():
                _set_pace(each, wanted)

    @property
    def totals(self) -> TcpTraffic:
        """Since the beginning, connections that are gone included; at most LOOK_EVERY_S old.  It is asked for with
        every frame, and to read every connection each time would cost more than the frames."""
        if self._clock() - self._looked_at >= LOOK_EVERY_S:
            self.look()
        return self._totals

    def look(self) -> None:
        """At all of them now."""
        self._looked_at = self._clock()
        for name in self._open:
            self.of(name)

    def of(self, name: int) -> TcpTraffic:
        """Of one connection; nothing where it is gone, or not known."""
        watched = self._open.get(name)
        if watched is None:
            return NOTHING
        crossed = _read(watched) or NOTHING
        self._count(name, crossed)
        return crossed

    def waiting_beside(self, names: set[int]) -> int:
        """On all other connections, now."""
        return sum(self.of(name).waiting for name in self._open if name not in names)

    def _count(self, name: int, now: TcpTraffic) -> None:
        before, self._last[name] = self._last[name], now
        self._totals = TcpTraffic(
            *(whole - old + new for whole, old, new in zip(self._totals, before, now, strict=True))
        )

    def close(self) -> None:
        for descriptor in list(self._open):
            self.forget(descriptor)

    def forget(self, name: int) -> None:
        watched = self._open.get(name)
        if watched is not None:
            last = self.of(name)
            self._count(name, TcpTraffic(last.sent, last.received, 0, 0))  # what waited there waits no more
            del self._open[name], self._last[name]
            watched.close()


def our_name(connection: socket.socket) -> int:
    """By which one is known that is not ZeroMQ's."""
    return _OURS + connection.fileno()


def is_ours(name: int) -> bool:
    return name >= _OURS


def _set_pace(watched: socket.socket, bytes_per_s: int) -> None:
    # It may be closed by now, and then there is nothing to pace.
    with contextlib.suppress(OSError):
        watched.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", bytes_per_s))


def _read(watched: socket.socket) -> TcpTraffic | None:
    try:
        raw = watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FIELDS.size)
    except OSError:
        return None  # no TCP, or no such kernel
    if len(raw) != _FIELDS.size:
        return None
    segment_bytes, flying, beyond_gap, acknowledged, received, waiting = _FIELDS.unpack(raw)
    # Without them, a lost packet would look like a line that stops, and then carries twice what it can.
    beyond = segment_bytes * beyond_gap
    return TcpTraffic(acknowledged + beyond, received, waiting, flying, beyond)


# ---- of which peers bytes come in, also while no frame is whole yet -----------------------------------
#
# Where the kernel does not tell what arrived, nobody ever has news.


NEWS_BYTES = 16384  # since the last news: more than questions, pings and acknowledgments come to


class Counts(Protocol):
    def of(self, descriptor: int) -> TcpTraffic: ...


class Incoming:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._peer_of: dict[int, str] = {}
        self._received: dict[int, int] = {}  # bytes that were told already

    def came_over(self, descriptor: int, peer: str) -> None:
        """The same number may be another connection's by now, of another peer."""
        if self._peer_of.get(descriptor) != peer:
            self._peer_of[descriptor] = peer
            self._received.pop(descriptor, None)

    def take_peers_heard(self) -> set[str]:
        """Peers of which bytes came in since they were named last."""
        added: dict[str, int] = {}
        now: dict[int, int] = {}
        for descriptor, peer in list(self._peer_of.items()):
            crossed = self._counts.of(descriptor)
            told = self._received.setdefault(descriptor, crossed.received)
            if crossed == NOTHING or crossed.received < told:  # closed, or opened anew
                del self._peer_of[descriptor], self._received[descriptor]
                continue
            now[descriptor] = crossed.received
            added[peer] = added.get(peer, 0) + crossed.received - told
        named = {peer for peer, size in added.items() if size >= NEWS_BYTES}
        self._received |= {d: size for d, size in now.items() if self._peer_of[d] in named}
        return named
