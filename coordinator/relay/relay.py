"""The relay: a process that passes bytes between two peers that can't dial each other.  It cannot read them.

Started by the coordinator (relay_hand.py), which starts it again if it dies.  Peers ask it, by SOCKS5, for the name
that is their ticket (coordinator/reach/relays.py); two with the tickets of one pair are joined.  What passes is CURVE,
from one peer to the other: the relay sees lengths and times, and can delay, damage or drop.

Who may meet is decided by switchboard.py, whose turn it is by turns.py; here are the sockets.  Bytes go through a pipe
of the kernel by splice(2) and never through this process's memory.  A side is read only when what was read before has
left, so that a slow reader holds up its own pair, in buffers of a fixed size.  It dials nobody.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from farflung.coordinator.reach.relays import TicketScope, read
from farflung.coordinator.relay.relay_words import (
    TO_RELAY,
    PairsCounted,
    RelaySettings,
    ToRelay,
    Wanted,
)
from farflung.coordinator.relay.socks import JOINED, NOT_ALLOWED, WHERE, SocksGreeting, seen
from farflung.coordinator.relay.switchboard import Switchboard, Turns
from farflung.protocol.errors import UserError
from farflung.protocol.process.child import Channel, Listening, live, serve_parent
from farflung.protocol.process.descriptors import Pipe
from farflung.protocol.process.networks import network_of

TICK_S = 0.25
TELL_EVERY_S = 0.5
# Of each socket: what passes in so long, so that one pair can fill the rate over a far line, and not more.
BUFFER_S, BUFFER_LEAST_BYTES, BUFFER_MOST_BYTES = 0.1, 128 * 1024, 1024 * 1024
BACKLOG = 64
ACCEPTS_PER_TURN = 16
TURNS_AT_ONCE = 32  # between two looks at the sockets
# A guest that vanished: the kernel asks after so many seconds, and gives up after three answers did not come.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TIMES = 15, 5, 3
TAKES_NOTHING_MS = 120_000  # a side that acknowledges nothing for so long, or leaves no room, is cut off


@dataclass
class _End:
    """One connection."""

    socket: socket.socket
    greeting: SocksGreeting | None = field(default_factory=SocksGreeting)  # None: it has shown its ticket
    other: _End | None = None
    pair: bytes = b""
    pipe: Pipe | None = None  # for what comes from here
    readable: bool = False  # and nobody has read what is there yet
    events: int = select.EPOLLIN

    @property
    def number(self) -> int:
        return self.socket.fileno()

    @property
    def inside(self) -> int:
        """Bytes that came from here and that the other side did not take yet."""
        return self.pipe.inside if self.pipe is not None else 0

    @property
    def has_more(self) -> bool:
        """Something to pass, and the other side took what was passed before."""
        return self.readable and not self.inside


class Relay:
    """`run` returns when the coordinator is gone."""

    def __init__(self, begin: RelaySettings, channel: Channel[ToRelay]) -> None:
        now = time.monotonic()
        self._channel = channel
        self._run = TicketScope(begin.run_id, begin.incarnation, begin.relay)
        self._public = begin.public
        self._board = Switchboard()
        self._turns = Turns(begin.bytes_per_s, now)
        self._ends: dict[int, _End] = {}
        self._pairs: dict[bytes, tuple[_End, _End]] = {}
        self._moved_bytes = self._refused = 0
        self._told_at = self._ticked_at = float("-inf")
        try:
            self._listener = _listener(begin)
        except OSError as error:
            told = f"cannot listen on {begin.host} port {begin.port}: {error.strerror}"
            raise UserError(told) from error
        self._epoll = select.epoll()
        for each in (self._listener, channel.socket):
            self._epoll.register(each.fileno(), select.EPOLLIN)

    def run(self) -> None:
        self._channel.send(Listening(port=self._listener.getsockname()[1]))
        while not self._channel.closed:
            wait_s = self._turns.wait_s(time.monotonic())
            for number, events in self._epoll.poll(TICK_S if wait_s is None else min(TICK_S, wait_s)):
                self._on_event(number, events)
            self._take_turns()
            now = time.monotonic()
            if now - self._ticked_at >= TICK_S:
                self._ticked_at = now
                for each in self._board.over(now):
                    self._close(each)
                self._tell(now)
        self.close()

    def close(self) -> None:
        for number in list(self._ends):
            self._close(number)
        self._listener.close()
        self._epoll.close()

    # ---- connections -------------------------------------------------------------------------------------------

    def _on_event(self, number: int, events: int) -> None:
        if number == self._listener.fileno():
            self._accept()
        elif number == self._channel.socket.fileno():
            self._hear_coordinator()
        elif (end := self._ends.get(number)) is not None:
            if end.greeting is not None:
                self._greet(end, end.greeting)
            elif end.other is None:
                # It has to wait, and there is news: it hung up, or said what it must not say.
                self._close(number)
            else:
                self._on_joined(end, end.other, events)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, address = self._listener.accept()
            except OSError:  # nobody waits, or has gone again, or there are no descriptors left
                return
            connection.setblocking(False)
            end = _End(connection)
            self._ends[end.number] = end
            self._epoll.register(end.number, end.events)
            for each in self._board.comes(end.number, network_of(str(address[0])), time.monotonic()):
                self._close(each)

    def _greet(self, end: _End, greeting: SocksGreeting) -> None:
        try:
            data = end.socket.recv(1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        reply = greeting.feed(data) if data else b""
        if reply and not _sent(end.socket, reply):
            self._close(end.number)
        elif greeting.over or not data:
            self._refused += bool(data)
            self._close(end.number)
        elif greeting.name:
            self._show(end, greeting.name)

    def _show(self, end: _End, name: bytes) -> None:
        if name == WHERE:
            with contextlib.suppress(OSError):  # it has gone again
                host, port, *_ = end.socket.getpeername()
                _sent(end.socket, seen(str(host), int(port)))
            self._close(end.number)
            return
        ticket = read(name, self._run, self._public)
        said = self._board.shows(end.number, ticket, time.monotonic()) if ticket is not None else None
        if ticket is None or said is None or said.why_not:
            self._refused += 1
            _sent(end.socket, NOT_ALLOWED)
            self._close(end.number)
            return
        for each in said.closed:
            self._close(each)
        end.greeting, end.pair = None, ticket.pair
        self._listen_for(end, select.EPOLLIN | select.EPOLLRDHUP)
        other = self._ends.get(said.joined_to) if said.joined_to is not None else None
        if other is not None:
            self._join(end, other)

    def _join(self, end: _End, other: _End) -> None:
        self._pairs[end.pair] = (end, other)
        for mine, theirs in ((end, other), (other, end)):
            mine.other = theirs
            try:
                mine.pipe = Pipe()
            except OSError:
                self._close(end.number)  # no descriptors left: both come again
                return
            self._listen_for(mine, select.EPOLLIN)
        if not (_sent(end.socket, JOINED) and _sent(other.socket, JOINED)):
            self._close(end.number)

    def _close(self, number: int) -> None:
        """With the other side: half a pair is of no use."""
        for each in (number, *self._board.ends(number)):
            end = self._ends.pop(each, None)
            if end is None:
                continue
            if self._pairs.pop(end.pair, None) is not None:
                self._turns.rests(end.pair)
            with contextlib.suppress(OSError):
                self._epoll.unregister(each)
            if end.pipe is not None:
                end.pipe.close()
            end.socket.close()
            if end.other is not None and end.other.other is end:
                end.other.other = None

    def _listen_for(self, end: _End, events: int) -> None:
        if events != end.events:
            end.events = events
            self._epoll.modify(end.number, events)

    # ---- bytes -------------------------------------------------------------------------------------------------

    def _on_joined(self, end: _End, other: _End, events: int) -> None:
        broken = events & (select.EPOLLHUP | select.EPOLLERR)
        if broken or (
            events & select.EPOLLOUT and other.pipe is not None and not other.pipe.drain(end.number)
        ):
            self._close(end.number)
            return
        if events & select.EPOLLIN:
            end.readable = True
        self._await(end, other)
        self._await(other, end)

    def _await(self, end: _End, other: _End) -> None:
        """What to be told of `end` next, and whether it has something to pass."""
        if end.has_more:
            self._turns.wants(end.pair)
        wanted = 0 if end.readable else select.EPOLLIN
        self._listen_for(end, wanted | (select.EPOLLOUT if other.inside else 0))

    def _take_turns(self) -> None:
        for _ in range(TURNS_AT_ONCE):
            turn = self._turns.next(time.monotonic())
            if turn is None:
                return
            one, other = self._pairs[turn.pair]  # who has something to pass is joined
            end, to = (one, other) if one.has_more else (other, one)
            moved = self._pass(end, to, turn.most_bytes)
            if moved is None:
                self._close(end.number)
                continue
            self._turns.took(turn.pair, moved)
            self._pairs[turn.pair] = (to, end)  # the other direction is next
            if not (end.has_more or to.has_more):
                self._turns.rests(turn.pair)
            self._await(end, to)
            self._await(to, end)

    def _pass(self, end: _End, to: _End, most_bytes: int) -> int | None:
        """None: one of them is gone, or `end` has said all."""
        if end.pipe is None:
            return None
        size = end.pipe.fill(end.number, most_bytes)
        if size == 0:
            end.readable = False
        if not size:
            return size
        self._moved_bytes += size
        self._board.moved(end.pair, time.monotonic())
        return size if end.pipe.drain(to.number) else None

    # ---- the coordinator ---------------------------------------------------------------------------------------

    def _hear_coordinator(self) -> None:
        for word in self._channel.receive():
            if isinstance(word, Wanted):
                for each in self._board.want(word.pairs, word.clock_ahead_s):
                    self._close(each)

    def _tell(self, now: float) -> None:
        if now - self._told_at < TELL_EVERY_S:
            return
        board, moved, refused = self._board, self._moved_bytes, self._refused
        said = PairsCounted(
            pairs=board.joined,
            waiting=board.waiting,
            guests=board.guests,
            moved_bytes=moved,
            refused=refused,
        )
        if self._channel.send(said):
            self._told_at = now
            self._moved_bytes -= moved
            self._refused -= refused


def _listener(begin: RelaySettings) -> socket.socket:
    host = "::" if begin.host in ("*", "") else begin.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = _bound(family, host, begin)
    except OSError:
        if host != "::":
            raise
        listener = _bound(socket.AF_INET, "0.0.0.0", begin)  # a machine without IPv6
    return listener


def _bound(family: int, host: str, begin: RelaySettings) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option, value in _of_each_connection(begin.bytes_per_s):
            listener.setsockopt(*option, value)  # those that are accepted have them, too
        listener.bind((host, begin.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _of_each_connection(bytes_per_s: float) -> Iterator[tuple[tuple[int, int], int]]:
    size = int(min(BUFFER_MOST_BYTES, max(BUFFER_LEAST_BYTES, BUFFER_S * bytes_per_s)))
    yield (socket.SOL_SOCKET, socket.SO_RCVBUF), size
    yield (socket.SOL_SOCKET, socket.SO_SNDBUF), size
    yield (socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1
    yield (socket.IPPROTO_TCP, socket.TCP_NODELAY), 1
    yield (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), KEEPALIVE_IDLE_S
    yield (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), KEEPALIVE_EVERY_S
    yield (socket.IPPROTO_TCP, socket.TCP_KEEPCNT), KEEPALIVE_TIMES
    yield (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), TAKES_NOTHING_MS


def _sent(connection: socket.socket, reply: bytes) -> bool:
    """A few bytes into an empty buffer: whoever does not take them is gone."""
    try:
        return connection.send(reply) == len(reply)
    except OSError:
        return False


def serve(end: socket.socket) -> None:
    serve_parent(Channel(end, TO_RELAY), RelaySettings, Relay)


if __name__ == "__main__":
    live(serve)
