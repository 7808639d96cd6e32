"""One peer as the data plane reaches it: what waits for it, and the connections over which it can leave.

Owned by collectives/link/zmq_link.py, which opens the sockets and says which peer a frame came from.  A line knows
sockets and bytes, and nothing of rounds, contacts or keys.

A line may have several connections: those that we opened, and those that the other side opened (routes of our own
ROUTER).  Any of them will do, since frames carry all that is needed to place them and may arrive in any order.  But a
route is used only where nothing that we opened brings anything away: a frame that was given to the slower of two
connections comes last, and a round waits for its last frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.collectives.link.frame_queue import ENCRYPTION_BYTES, Backlog, OnTheWay, QueuedFrame, Rank
from farflung.collectives.link.link import Appointment, Relayed
from farflung.collectives.link.relay_way import RelayWay
from farflung.collectives.link.stalled_streams import Speed, StalledStreams
from farflung.collectives.link.tcp_counts import NEWS, NOTHING, OPENED, TcpCounts, TcpTraffic
from farflung.protocol.frames import Frame, FrameKind, Kind, Payload
from farflung.protocol.process.sockets import Socket
from farflung.protocol.round_words import Contact

HELP_AFTER_S = 1.0  # what we opened took nothing for so long: routes take it too
STANDS_AFTER_S = 0.5  # nothing was acknowledged for so long: what it holds delays nobody else's bytes
RESTS_AFTER_S = 0.1  # nothing left for so long, and the kernel has nothing: all has arrived
LISTEN_EVERY_S = 1.0  # at least, or it was not the line that was silent but we who slept
COPIED_BELOW_BYTES = 65536  # copying so little is cheaper than keeping a reference alive across threads


_SHAKEN = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED_AGAIN_S, REFUSED_AGAIN_MOST_S = 0.25, 2.0  # who was not let in dials again; longer each time


class ConnectionKind(StrEnum):
    """How a connection was made."""

    DIALLED = "dialled"
    RELAYED = "relayed"
    PUNCHED = "punched"  # both sides connected to each other
    LEAN = "lean"  # beside one that was dialled, without ZeroMQ: see lean.py


@dataclass(kw_only=True)
class Bearer:
    """A connection, of whatever kind: what the kernel knows of it, and what it took and has not brought there yet."""

    tcp: TcpCounts
    over: ConnectionKind = ConnectionKind.DIALLED
    up: bool = False  # connected, and the other side proved its key
    descriptor: int = -1  # of the TCP connection
    carried_by: int = -1  # where that is not libzmq's own: see relay_way.py
    is_over: bool = False  # it ended, or never came to be
    is_abrupt: bool = False  # it leaves nothing behind when it is closed
    silent_since: float | None = None  # what left is not acknowledged: that end may be cut off
    on_the_way: OnTheWay = field(default_factory=OnTheWay)
    speed: Speed = field(default_factory=Speed)
    _crossed: TcpTraffic = NOTHING
    _moved_at: float = float("-inf")
    _still: tuple[int, int] = (
        0,
        0,
    )  # bytes acknowledged, bytes taken: since then neither grew, and nothing flies
    _still_since: float = float("-inf")
    _listened_at: float = float("-inf")

    def read_news(self) -> bool:
        """True if it came up just now, and is to be greeted."""
        raise NotImplementedError

    def has_failed(self, now: float) -> bool:
        """It ended, or should stand by now."""
        return self.is_over

    def offer(self, item: QueuedFrame) -> bool:
        """False where it has no room for this frame now."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def listen(self, now: float) -> None:
        """A cut line breaks no connection for a long time: the kernel sends again and again, and hears nothing."""
        before, self._crossed = self._crossed, self.tcp.of(self.descriptor)
        self.on_the_way.on_tick(self._crossed.arrived, self._rests(now))
        self.speed.feed(now, max(0, self._crossed.sent - before.sent), self.held_bytes > 0)
        if self._crossed.sent != before.sent or not self.held_bytes:
            self._moved_at = now
        asleep, self._listened_at = now - self._listened_at > LISTEN_EVERY_S, now
        if asleep or not self._crossed.flying or self._crossed.sent != before.sent:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now

    def _rests(self, now: float) -> bool:
        """A kernel that has nothing may be about to get it: libzmq's thread waits for a core, too."""
        still = self._crossed.sent, self.on_the_way.taken_bytes
        if self._crossed.flying or self._crossed.waiting or still != self._still:
            self._still, self._still_since = still, now
        return now - self._still_since >= RESTS_AFTER_S

    @property
    def held_bytes(self) -> int:
        """That had not arrived when it was listened to."""
        return self.on_the_way.unacknowledged(self._crossed.sent)

    def left(self) -> list[QueuedFrame]:
        """What it took and did not bring there, if it can be given up."""
        return self.on_the_way.left(self.tcp.of(self.descriptor).arrived)

    @property
    def waits(self) -> bool:
        """More than the line takes at once, when it was listened to."""
        return self._crossed.waiting > 0

    def unacknowledged_bytes(self, now: float) -> int:
        """Handed to it, in its queues or on its way; 0 where nobody can tell, or where nothing moves any more."""
        if not self.up or now - self._moved_at > STANDS_AFTER_S:
            return 0
        crossed = self.tcp.of(self.descriptor)
        return self.on_the_way.unacknowledged(crossed.sent) if crossed != NOTHING else 0

    def brings_contributions(self, now: float) -> bool:
        """By what was seen when it was listened to; False where nothing moves any more."""
        moves = self.up and now - self._moved_at <= STANDS_AFTER_S and self._crossed != NOTHING
        return moves and self.on_the_way.has_contributions(self._crossed.sent)

    def carries(self, header: bytes) -> bool:
        """It took this frame, and the frame has not arrived."""
        if not self.up or not self.on_the_way.may_have(header):
            return False
        crossed = self.tcp.of(self.descriptor)
        return crossed != NOTHING and self.on_the_way.has(header, crossed.arrived)


@dataclass
class ZmqConnection(Bearer):
    """One of ZeroMQ's that we opened."""

    socket: Socket
    monitor: Socket
    is_refused: bool = (
        False  # the other side does not know this peer yet, or no more; libzmq does not dial again
    )

    @staticmethod
    def watched(
        socket: Socket, tcp: TcpCounts, over: ConnectionKind = ConnectionKind.DIALLED
    ) -> ZmqConnection:
        """Before `socket.connect`: its news are then complete."""
        monitor = socket.get_monitor_socket(_SHAKEN | zmq.EVENT_HANDSHAKE_FAILED_AUTH | NEWS)
        return ZmqConnection(socket, monitor, tcp=tcp, over=over)

    def read_news(self) -> bool:
        was_up = self.up
        while self.monitor.poll(0):
            news = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            self.tcp.on_news(news["event"], news["value"])
            if news["event"] & OPENED:
                self.descriptor = news["value"] if self.carried_by < 0 else self.carried_by
                self.on_the_way.forget()
                self.is_over = False
            else:
                self.up = news["event"] == _SHAKEN
                self.is_over = not self.up
                self.is_refused |= news["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        return self.up and not was_up

    def offer(self, item: QueuedFrame) -> bool:
        if not _offer(self.socket, [item.header, item.payload]):
            return False
        self.on_the_way.take(item.header, item.size + ENCRYPTION_BYTES, item.kind)
        return True

    def close(self) -> None:
        self.tcp.forget(self.descriptor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


@dataclass
class DialRefused:
    """When to dial somebody again who lets in nobody that the coordinator has not told it of: it hears of a newcomer a
    moment after the newcomer hears of it."""

    again_at: float = 0.0
    pause_s: float = REFUSED_AGAIN_S

    def note(self, now: float) -> None:
        self.again_at, self.pause_s = now + self.pause_s, min(REFUSED_AGAIN_MOST_S, 2 * self.pause_s)


@dataclass
class PeerConnections:
    contact: Contact
    opened: list[Bearer] = field(default_factory=list)
    accepted: list[Bearer] = field(default_factory=list)  # lean ones that the other side opened
    routes: list[bytes] = field(default_factory=list)
    undialable: bool = False  # its address can't be used
    refused: DialRefused = field(default_factory=DialRefused)
    way: Relayed | None = None  # over a relay
    relay_way: RelayWay | None = None  # that way, as it is taken now
    again_at: float = 0.0  # not before that another attempt is made
    pause_s: float = 0.0  # after the next one that comes to nothing
    in_vain: tuple[Relayed, float] | None = None  # which way brought it to nobody, and since when
    retires_at: float | None = None  # that way is told no more: what is on it may still come
    appointment: Appointment | None = None
    tries: int = 0  # of this appointment
    try_until: float = 0.0  # of the newest one
    sent_bytes: int = 0
    served_no: int = 0  # which frame of all lines was its last one
    # Since then no connection took what waits.  What a cap holds back is nobody's fault and does not count.
    stuck_since: float | None = None
    refused_since: float | None = None  # by what we opened
    wanted: int = 1  # connections
    waiting: Backlog = field(default_factory=Backlog)
    tails: StalledStreams = field(default_factory=StalledStreams)
    _turn: int = 0

    @property
    def waits(self) -> bool:
        return bool(len(self.waiting))

    @property
    def is_up(self) -> bool:
        return bool(self.routes or self.accepted) or any(connection.up for connection in self.opened)

    def needs_routes(self, now: float) -> bool:
        """Nothing that we opened takes what waits."""
        slow = self.refused_since is not None and now - self.refused_since >= HELP_AFTER_S
        return slow or not any(connection.up for connection in self.opened)

    def unreached_since(self) -> float | None:
        """Since then something is on its way to the other side and no connection brings it there."""
        if self.stuck_since is not None and not self.is_up:
            return self.stuck_since
        silent = [each.silent_since for each in self._usable]
        if not silent or None in silent:
            return None
        return max(since for since in silent if since is not None)

    def leaves_next(self, kind: FrameKind) -> bool:
        """Of what is large: a frame of this kind is the next one."""
        first = self.waiting.first(Rank.BULK)
        return first is not None and first.kind == kind

    def brings_contributions(self, now: float) -> bool:
        """They leave, or are on their way."""
        wait = self.leaves_next(Kind.CONTRIBUTION) and self.is_up
        return wait or any(each.brings_contributions(now) for each in (*self.opened, *self.accepted))

    def put(self, frame: Frame) -> None:
        header = frame.header.pack()
        if not any(each.carries(header) for each in (*self.opened, *self.accepted)):
            self.waiting.put(header, frame)

    def forget_rounds_before(self, round_no: int) -> None:
        self.waiting.forget_rounds_before(round_no)
        if not self.waits:
            self.stuck_since = self.refused_since = None

    def send_one(self, router: Socket | None, now: float, rank: Rank) -> int:
        """Hand the oldest frame of this rank to whichever connection has room.  Its bytes; 0 if none has."""
        item = self.waiting.first(rank)
        if item is None:
            return 0
        if self._over_opened(item):
            self.refused_since = None
        else:
            self.refused_since = now if self.refused_since is None else self.refused_since
            if not (self.needs_routes(now) and self._over_theirs(router, item)):
                self.stuck_since = now if self.stuck_since is None else self.stuck_since
                return 0
        self.waiting.drop_first(rank)
        self.stuck_since = None
        self.refused_since = self.refused_since if self.waits else None
        self.sent_bytes += item.size
        return item.size

    def drop_refused(self, now: float) -> None:
        """Those that we dialled and that were not let in: they end here, and are dialled again later."""
        dialled = [each for each in self.over(ConnectionKind.DIALLED) if isinstance(each, ZmqConnection)]
        refused = [each for each in dialled if each.is_refused]
        for each in refused:
            each.close()
            self.opened.remove(each)
        if refused:
            self.refused.note(now)
        elif any(each.up for each in dialled):
            self.refused.pause_s = REFUSED_AGAIN_S

    def over(self, how: ConnectionKind) -> list[Bearer]:
        return [each for each in self.opened if each.over == how]

    @property
    def is_punched(self) -> bool:
        return any(each.up for each in self.over(ConnectionKind.PUNCHED))

    @property
    def dialled(self) -> list[Bearer]:
        """Those that carry what goes to somebody who can be dialled: lean ones, once one stands."""
        lean = [each for each in self.over(ConnectionKind.LEAN) if each.up]
        return lean or [each for each in self.opened if each.over != ConnectionKind.LEAN]

    @property
    def _usable(self) -> list[Bearer]:
        """Of those two ways the one that the coordinator tells: it changes over between rounds."""
        if self.relay_way is None:
            return self.dialled
        relayed = [each for each in self.over(ConnectionKind.RELAYED) if each.up]
        others = [each for each in self.opened if each.up and each.over != ConnectionKind.RELAYED]
        return (relayed or others) if self.retires_at is None else (others or relayed)

    def _over_opened(self, item: QueuedFrame) -> bool:
        usable = self._usable
        if item.crossing:
            # Over the first that has room: what overtakes another microbatch is added up before it.
            return any(each.offer(item) for each in usable)
        for _ in usable:
            # In turn, so that all of them are kept busy when more than one is needed.
            self._turn = (self._turn + 1) % len(usable)
            if usable[self._turn].offer(item):
                return True
        return False

    def _over_theirs(self, router: Socket | None, item: QueuedFrame) -> bool:
        """Over a connection that the other side opened."""
        if any(each.offer(item) for each in self.accepted):
            return True
        if router is None:
            return False
        for route in list(self.routes):
            try:
                if _offer(router, [route, item.header, item.payload]):
                    self.routes.append(self.routes.pop(self.routes.index(route)))  # the others are next
                    return True
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.routes.remove(route)  # that connection is gone; the other side will open another
        return False

    def give_up(self, fallen: Bearer) -> None:
        """What it did not bring there goes over another one, at once."""
        self.waiting.put_back(fallen.left())
        self.opened.remove(fallen)
        fallen.is_abrupt = True
        fallen.close()

    def hang_up(self) -> None:
        """Also what the other side opened."""
        self.close()
        for each in self.accepted:
            each.close()
        self.accepted.clear()
        self.routes.clear()

    def close(self, *ways: ConnectionKind) -> None:
        """Those made in these ways; without any: all."""
        for connection in self.opened:
            if not ways or connection.over in ways:
                connection.close()
        self.opened = [each for each in self.opened if ways and each.over not in ways]
        if self.relay_way is not None and (not ways or ConnectionKind.RELAYED in ways):
            self.relay_way.close()
            self.relay_way, self.retires_at = None, None


def _offer(socket: Socket, parts: list[Payload]) -> bool:
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
        return False
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=len(parts[-1]) < COPIED_BELOW_BYTES)
    except zmq.Again:
        return False
    return True
