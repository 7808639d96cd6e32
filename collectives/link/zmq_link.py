"""A link (link.py) over ZeroMQ and CURVE, and beside it over lean connections (lean.py).

Made by peer/line/data_line.py; everybody else sees a `Link`.  It knows who may speak (the contacts) and how to reach
them, and nothing of rounds.  Keys, clock and caps are arguments.  It has a ZeroMQ context of its own, whose thread
encrypts: a word to the coordinator must not wait until megabytes for other peers are through.

A peer that can be dialled is dialled, one connection for each direction, or several where one is not enough for the
line (rates.py).  Where both sides take lean connections, bulk goes over these, and ZeroMQ's carries what the two
links have to agree on; as long as none stands, it carries all.  One that cannot be dialled keeps connections to all
who can, and is answered over them.  Two of these connect to each other at one instant, or meet at a relay, as they
are told (undialled.py).  A socket takes only a few frames at a time; the rest waits in its line
(peer_connections.py), as references to bytes that their owner keeps.
"""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import zmq

from farflung.collectives.link.frame_queue import Intake, Rank, Sharing, has_room
from farflung.collectives.link.lean import Lean, LeanSide
from farflung.collectives.link.link import Appointment, FrameCounts, MovedBytes, Pollable, Relayed
from farflung.collectives.link.peer_connections import ConnectionKind, PeerConnections, ZmqConnection
from farflung.collectives.link.port import LINES_OF_CONTACT, ZAP_DOMAIN, Port
from farflung.collectives.link.rates import AtLeast, Pacer, Pings, connections_wanted, streams_wanted
from farflung.collectives.link.stalled_streams import Around
from farflung.collectives.link.tcp_counts import Incoming, TcpCounts
from farflung.collectives.link.undialled import Undialled, domain_of
from farflung.protocol.errors import UserError, Verdict
from farflung.protocol.frames import CORE_KINDS, Frame, Header, Kind, Kinds, Spoiled, with_payload
from farflung.protocol.process.sockets import (
    BULK_CLIENT,
    BULK_SERVER,
    Keys,
    Options,
    Socket,
    ZapHandler,
    bulk,
    curve_client,
    curve_raw,
    curve_server,
    opened,
)
from farflung.protocol.round_words import CROWD, Contact

FRAMES_PER_TURN = 16  # bounded work between two looks at the clock and at the control plane
WIDEN_EVERY_S = 0.5
STALL_S = 20.0  # a connection that takes nothing for so long although it is up is opened anew
UNREACHED_AFTER_S = 2.5
ROUTES_AGAIN_S = 0.005
ROOM_AGAIN_S = 0.005  # crossings wait until less waits in sockets
WORDS_OF_LINKS = {Kind.PING, Kind.PONG, Kind.LEAN_ASKED, Kind.LEAN_GRANTED}
SOCKETS_MOST = 16384  # of libzmq's, which has 1,023 by itself; a connection takes three


@dataclass
class LinkSettings:
    """What the peer's owner allows, and what this machine gives."""

    upload: Pacer = field(default_factory=lambda: Pacer(None))
    download: Pacer = field(default_factory=lambda: Pacer(None))
    connections: int = 0  # per line; 0: as many as it turns out to need
    window_bytes: int = 4 * 1024 * 1024  # the most that one connection can have on its way
    visitor: bytes = b""  # the key of who dials this peer back, and is no contact: its coordinator
    lean: bool = False  # also connections without ZeroMQ, with those who take them too
    clock: Callable[[], float] = time.monotonic


class ZmqLink:
    """Beyond `Link`, for tests and who looks at a link by itself: `lines`, `stalls`, `given_up`, `round_trips_s`."""

    def __init__(self, keys: Keys, settings: LinkSettings | None = None) -> None:
        """`keys`: of this session."""
        self.settings = settings if settings is not None else LinkSettings()
        self.lines: dict[str, PeerConnections] = {}
        self.stalls = self.given_up = 0
        self._intake = Intake()
        self._pings = Pings(bytes(8), 0)
        self._tcp = TcpCounts()
        self._incoming = Incoming(self._tcp)
        self._clock = self.settings.clock
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MOST)
        self._zap = ZapHandler(self._context)
        self._keys = keys
        self._lean = LeanSide(curve_raw(keys[0]), self._tcp, self._clock, os.urandom)
        self._port = Port(self._zap, self._tcp, self._intake.turned_away, self._lean.cut)
        self._port.expect_visitor(self.settings.visitor)
        self._lean.gate = self._port
        self._undialled = Undialled(keys, self._zap, self._tcp, self._clock, self._connection)
        self._router: Socket | None = None
        self._me = ""
        self._widen_at = 0.0
        self._served_no = 0
        self._sharing = Sharing()
        self._carried, self._sent_told = AtLeast(), 0
        self._deep = False  # so much waits in sockets that crossings wait here
        self._sent_before: dict[str, int] = {}

    # ---- life ----------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        router = self._opened(zmq.ROUTER, BULK_SERVER, curve_server(self._keys[1], ZAP_DOMAIN))
        self._router = router
        self._port.watch(router)
        try:
            router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot listen on {host}:{port} for other peers: {error.strerror}; choose another with --listen"
            ) from None
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        bound = self._port.number = int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])
        if self.settings.lean:
            self._lean.listen(host, port)
            self._pings.lean_port = self._lean.port
        return bound

    def expect(self, me: str, run_tag: bytes, payload_max: int, kinds: Kinds = CORE_KINDS) -> None:
        self._me = me
        self._intake.expect(run_tag, payload_max, kinds)
        self._pings = Pings(run_tag, payload_max)
        self._pings.lean_port = self._lean.port
        buffer = bulk(payload_max, self.settings.download.bytes_per_s).get(zmq.RCVBUF, 0)
        self._lean.expect(payload_max, int(buffer))

    def set_contacts(self, roster: Iterable[Contact]) -> None:
        contacts = {contact.peer: contact for contact in roster if contact.peer != self._me}
        gone: list[bytes] = []
        for peer, line in list(self.lines.items()):
            now_contact = contacts.get(peer)
            if now_contact is None or now_contact.key != line.contact.key:
                gone.append(line.contact.key)
                self._drop(peer)
            elif now_contact.address != line.contact.address:
                line.contact, line.undialable = now_contact, False
                line.close()
        self._port.shut_out(gone)
        for peer, contact in contacts.items():
            if peer not in self.lines:
                self.lines[peer] = PeerConnections(contact)
                self._port.let_in(contact.key, peer)
        # Connections stand before they are needed: a round does not wait for handshakes, a peer that can't be dialled
        # is answered over them, and it is known which peers can't be reached.
        for line in self.lines.values():
            if len(contacts) <= CROWD:
                self._dial(line)  # in a crowd, when something is to go there

    def set_ways(self, ways: Mapping[str, Relayed]) -> None:
        for peer, line in self.lines.items():
            self._undialled.tell_way(line, ways.get(peer))
            self._dial(line)

    def meeting_port(self, host: str) -> int:
        return self._undialled.meeting_port(host)

    def set_appointments(self, appointments: Mapping[str, Appointment]) -> None:
        self._undialled.set_appointments(self.lines, appointments)

    def punched(self) -> frozenset[str]:
        return frozenset(peer for peer, line in self.lines.items() if line.is_punched)

    def unmet(self) -> set[str]:
        return self._undialled.unmet(self.lines)

    def limit(self, up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> None:
        now = self._clock()
        self.settings.upload.set_rate(now, up_bytes_per_s)
        self.settings.download.set_rate(now, down_bytes_per_s)
        self._tcp.pace(up_bytes_per_s)

    def close(self) -> None:
        for peer in list(self.lines):
            self._drop(peer)
        self._router = None
        self._port.close()
        self._undialled.close()
        self._lean.close()
        self._zap.close()
        self._context.destroy(linger=0)
        self._tcp.close()

    def _drop(self, peer: str) -> None:
        line = self.lines.pop(peer)
        self._zap.forget_policy(domain_of(line.contact.key))
        self._sent_before.pop(peer, None)
        self._pings.forget(peer)
        self._lean.forget(peer)
        line.hang_up()

    def _opened(self, kind: int, *presets: Options) -> Socket:
        both_ends = bulk(self._intake.payload_max, self.settings.download.bytes_per_s)
        return opened(self._context, kind, both_ends, *presets)

    def _dial(self, line: PeerConnections) -> None:
        """Open what the line needs, if the other side can be dialled."""
        if line.way is not None:
            self._undialled.meet_at_relay(line, line.way)
        elif line.contact.address and not line.undialable and self._clock() >= line.refused.again_at:
            self._dial_directly(line)

    def _dial_directly(self, line: PeerConnections) -> None:
        lean = any(each.up for each in line.over(ConnectionKind.LEAN))
        while len(line.over(ConnectionKind.DIALLED)) < (1 if lean else self._wanted(line)):
            connection = self._connection(ConnectionKind.DIALLED, curve_client(self._keys, line.contact.key))
            if connection is None:
                return  # what waits for this line is stuck, and so it is dialled again
            try:
                connection.socket.connect(f"tcp://{line.contact.address}")
            # The coordinator checks addresses, but one that slips through must not end us.
            except zmq.ZMQError:
                connection.close()
                line.undialable = True
                return
            line.opened.append(connection)

    def _wanted(self, line: PeerConnections) -> int:
        return max(1, self.settings.connections, line.wanted)

    def _connection(self, over: ConnectionKind, *presets: Options) -> ZmqConnection | None:
        """None: this process has as many sockets as it may have."""
        dealer = None
        try:
            dealer = self._opened(zmq.DEALER, BULK_CLIENT, *presets)
            return ZmqConnection.watched(dealer, self._tcp, over)
        except zmq.ZMQError as error:
            if dealer is not None:
                dealer.close(linger=0)
            if error.errno != errno.EMFILE:
                raise
            return None

    # ---- polling and time ----------------------------------------------------------------------------------

    def sockets(self) -> Iterator[tuple[Pollable | int, int]]:
        yield self._zap.socket, zmq.POLLIN
        if self._port.news is not None:
            yield self._port.news, zmq.POLLIN
        now = self._clock()
        may_read = zmq.POLLIN if self.settings.download.wait_s(now) <= 0 else 0
        may_write = zmq.POLLOUT if self.settings.upload.wait_s(now) <= 0 and not self._deep else 0
        if self._router is not None and may_read:
            yield self._router, may_read
        for line in self.lines.values():
            if line.relay_way is not None:
                yield from line.relay_way.sockets()
            waits = line.waits and not any(each.up for each in line.over(ConnectionKind.LEAN))
            for connection in line.opened:
                events = may_read | (may_write if waits and connection.up else 0)
                if events and isinstance(connection, ZmqConnection):
                    yield connection.socket, events
        if self.settings.lean and may_read:
            yield self._lean.watch.reading, zmq.POLLIN
        if self._lean.watch.writing.get_map():
            yield self._lean.watch.writing, zmq.POLLIN

    def idle_s(self) -> float:
        now = self._clock()
        waits = [self.settings.download.wait_s(now)] if self.settings.download.wait_s(now) > 0 else []
        if any(line.waits for line in self.lines.values()):
            paced_s = self.settings.upload.wait_s(now)
            if paced_s > 0:
                waits.append(paced_s)
            elif self._deep:
                waits.append(ROOM_AGAIN_S)
            elif any(line.waits and line.routes and line.needs_routes(now) for line in self.lines.values()):
                waits.append(ROUTES_AGAIN_S)  # room in one connection of a ROUTER can't be waited for
        waits.append(self._undialled.idle_s(self.lines.values(), now))
        return min(waits)

    def on_tick(self) -> None:
        now = self._clock()
        self._port.read_news()
        self._tcp.look()
        self._carried.feed(now, self._newly_sent())
        for peer, line in self.lines.items():
            for connection in (*line.opened, *line.accepted):
                if connection.read_news():
                    line.put(self._pings.greet(peer, now))
                connection.listen(now)
            line.drop_refused(now)
            if line.way is not None or line.refused.again_at:
                self._dial(line)
            self._look_at_lean(peer, line, now)
            if line.is_up and line.stuck_since is not None and now - line.stuck_since >= STALL_S:
                self.stalls += 1
                line.hang_up()  # what is in its sockets is lost, and asked for again
                line.stuck_since = now
                self._dial(line)
        self._look_at_tails(now)
        self._lean.on_tick()
        if now - self._widen_at >= WIDEN_EVERY_S:
            self._widen(now - self._widen_at)
            self._widen_at = now

    def _look_at_tails(self, now: float) -> None:
        """Which stream has fallen: ZeroMQ's, which stands beside it, and a new one are quicker."""
        busy = [[each for each in line.opened if each.held_bytes] for line in self.lines.values()]
        speeds = sum(each.speed.latest or 0.0 for row in busy for each in row)
        streams = sum(len(line.dialled) for line in self.lines.values())
        around = Around(self._carried.bytes_per_s, speeds, sum(map(len, busy)), streams)
        for peer, line in self.lines.items():
            for each in line.over(ConnectionKind.LEAN):
                if line.tails.look(now, each.speed, each.held_bytes, around, self._pings.rtt_s.get(peer)):
                    self.given_up += 1
                    line.give_up(each)

    def _look_at_lean(self, peer: str, line: PeerConnections, now: float) -> None:
        """Which ended, and whether another one is due."""
        for ended in [each for each in line.over(ConnectionKind.LEAN) if each.has_failed(now)]:
            ended.close()
            line.opened.remove(ended)
            self._lean.failed(peer)
        for ended in [each for each in line.accepted if each.is_over]:
            ended.close()
            line.accepted.remove(ended)
        lean = line.over(ConnectionKind.LEAN)
        dialled = any(each.up for each in line.over(ConnectionKind.DIALLED))
        wanted = max(self._wanted(line), streams_wanted(self._pings.rtt_s.get(peer), len(self.lines)))
        if self.settings.lean and dialled and line.way is None and len(lean) < wanted:
            half = self._lean.ask(peer)
            if half is not None:
                line.put(with_payload(Header(Kind.LEAN_ASKED, self._intake.run_tag), half))

    def probe(self) -> None:
        found = self._pings.probe(self._clock())
        if found is not None:
            self.send(*found)

    def probed_bytes_per_s(self) -> float | None:
        if self._pings.probed is None:
            return None
        size, took_s = self._pings.probed
        return size / took_s

    @property
    def round_trips_s(self) -> dict[str, float]:
        """The shortest to each peer that has answered a greeting."""
        return self._pings.rtt_s

    def _widen(self, span_s: float) -> None:
        for peer, line in self.lines.items():
            rate = (line.sent_bytes - self._sent_before.get(peer, 0)) / span_s
            self._sent_before[peer] = line.sent_bytes
            rtt_s = self._pings.rtt_s.get(peer)
            if self.settings.connections == 0 and line.waits and rtt_s is not None:
                line.wanted = connections_wanted(len(line.dialled), rate, rtt_s, self.settings.window_bytes)
                self._dial(line)

    def unreached(self) -> set[str]:
        now = self._clock()
        since = {peer: line.unreached_since() for peer, line in self.lines.items()}
        return {peer for peer, at in since.items() if at is not None and now - at >= UNREACHED_AFTER_S}

    def answers_waiting(self, peer: str) -> int:
        line = self.lines.get(peer)
        return line.waiting.answers if line is not None else 0

    def arriving(self) -> set[str]:
        return self._incoming.take_peers_heard()

    def peers_waiting(self) -> int:
        """Here or in the kernel."""
        return sum(line.waits or any(each.waits for each in line.opened) for line in self.lines.values())

    def waiting_bytes(self) -> int:
        """What the line takes no more of at once, by the kernel's word; what waits in front of it is counted as one."""
        return max(self._tcp.totals.waiting, int(any(line.waits for line in self.lines.values())))

    def moved(self) -> MovedBytes:
        """The kernel's word where there is one: what a socket took may still wait here, and what is read now may have
        arrived long before."""
        if self._tcp.is_known:
            totals = self._tcp.totals
            return MovedBytes(totals.sent, totals.received)
        return MovedBytes(self.counts.sent_bytes, self.counts.arrived_bytes)

    # ---- sending -------------------------------------------------------------------------------------------

    def send(self, peer: str, frame: Frame) -> bool:
        line = self.lines.get(peer)
        if line is None:
            return False
        line.put(frame)
        self._dial(line)
        alone = self.settings.upload.bytes_per_s is None and not self._crossings_wait
        if alone:
            self._flush_lines([line])
        else:
            self.flush()  # what may leave now is not for whoever asked last
        return True

    def forget_rounds_before(self, round_no: int) -> None:
        for line in self.lines.values():
            line.forget_rounds_before(round_no)

    def flush(self) -> None:
        self._flush_lines(self.lines.values())

    def _flush_lines(self, lines: Iterable[PeerConnections]) -> None:
        """A frame of each line in turn, so that a cap is shared by all of them: it may let one frame go at a time."""
        upload, self._deep = self.settings.upload, False
        able = sorted((line for line in lines if line.waits), key=lambda line: line.served_no)
        while able:
            now = self._clock()
            if upload.wait_s(now) > 0:
                return
            due = self._due(able, now)
            if due is None:
                self._deep = True
                return
            line, rank = due
            able.remove(line)
            sent = line.send_one(self._router, now, rank)
            if not sent:
                continue  # it takes nothing at all now
            upload.take(now, sent)
            self._sharing.took(rank, sent)
            self.counts.sent_bytes += sent
            self._served_no += 1
            line.served_no = self._served_no
            if line.waits:
                able.append(line)

    def _due(self, able: list[PeerConnections], now: float) -> tuple[PeerConnections, Rank] | None:
        """What leaves next.  None: too much waits in sockets already for what could."""
        rows = {rank: [line for line in able if line.waiting.has(rank)] for rank in Rank}
        if words := rows[Rank.WORD]:
            return words[0], Rank.WORD
        crossings, bulk = rows[Rank.CROSSING], rows[Rank.BULK]
        if crossings and not self._has_room(crossings[0], Rank.CROSSING, now):
            return None
        results = [line for line in bulk if line.leaves_next(Kind.RESULT)]
        if results and self._contributions_leave(now) and not self._has_room(results[0], Rank.BULK, now):
            bulk = [line for line in bulk if not line.leaves_next(Kind.RESULT)]
        if not (crossings or bulk):
            return None
        rank = self._sharing.next(bool(crossings), bool(bulk))
        return (bulk if rank == Rank.BULK else crossings)[0], rank

    def _contributions_leave(self, now: float) -> bool:
        """Others merge nothing before they have mine: results, which nobody needs so soon, take what those leave."""
        return any(line.brings_contributions(now) for line in self.lines.values())

    def _has_room(self, line: PeerConnections, rank: Rank, now: float) -> bool:
        """Over connections that others opened, the kernel knows only what it could not send yet."""
        first = line.waiting.first(rank)
        frame_bytes = first.size if first is not None else 0
        opened = [each for line in self.lines.values() for each in line.opened]
        theirs = self._tcp.waiting_beside({each.descriptor for each in opened})
        waiting = theirs + sum(each.unacknowledged_bytes(now) for each in opened)
        known = [rate for rate in (self._carried.bytes_per_s, self.settings.upload.bytes_per_s) if rate]
        trips = self._pings.rtt_s.values()
        return has_room(
            waiting, frame_bytes, min(known, default=None), statistics.median(trips) if trips else None
        )

    @property
    def _crossings_wait(self) -> bool:
        return any(line.waiting.has(Rank.CROSSING) for line in self.lines.values())

    def _newly_sent(self) -> int:
        before, self._sent_told = self._sent_told, max(self._sent_told, self.moved().sent_bytes)
        return self._sent_told - before

    # ---- receiving -----------------------------------------------------------------------------------------

    @property
    def counts(self) -> FrameCounts:
        return self._intake.counts

    def answer_handshakes(self) -> None:
        """Those who dial wait for it."""
        self._zap.serve_waiting()
        self._port.read_news()

    def receive(self) -> Iterator[tuple[str, Frame | Spoiled]]:
        self.answer_handshakes()
        for peer, line in list(self.lines.items()):
            if line.relay_way is not None:
                self._undialled.follow_relay(line, line.relay_way)
            if line.appointment is not None:
                self._undialled.follow_meeting(line)
            for connection in list(line.opened):
                if isinstance(connection, ZmqConnection):
                    yield from self._receive_from(connection.socket, peer)
        if self._router is not None:
            yield from self._receive_from(self._router, None)
        if self.settings.lean:
            self._lean.write_ready()
            for lean in self._lean.read_ready():
                yield from self._receive_lean(lean)

    def _receive_lean(self, lean: Lean) -> Iterator[tuple[str, Frame | Spoiled]]:
        line = self.lines.get(lean.peer)
        if line is None:
            lean.close()
            return
        if lean not in line.opened:
            if lean not in line.accepted:
                line.accepted = [*line.accepted, lean]
            self._port.heard(lean.descriptor, line.contact.key)
        for _ in range(FRAMES_PER_TURN):
            if lean.is_over or self.settings.download.wait_s(self._clock()) > 0:
                return
            was_up, parts = lean.up, lean.receive()
            if lean.up and not was_up:
                self._lean.stands(lean.peer)
            if parts is None:
                return
            size = len(parts[0]) + len(parts[1])
            self._intake.on_bytes(size)
            self.settings.download.take(self._clock(), size)
            self._incoming.came_over(lean.descriptor, lean.peer)
            arrived = self._judged(lean.peer, self._intake.frame_of(*parts))
            if arrived is not None:
                yield lean.peer, arrived

    def _receive_from(self, socket: Socket, dialled: str | None) -> Iterator[tuple[str, Frame | Spoiled]]:
        for _ in range(FRAMES_PER_TURN):
            if socket.closed or self.settings.download.wait_s(self._clock()) > 0:
                return
            if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return  # asked, since an exception at every turn for every socket would cost more than the frames
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return  # it said that something was there: a connection that breaks may take that with it
            size = sum(len(part) for part in parts)
            self._intake.on_bytes(size)
            self.settings.download.take(self._clock(), size)
            line, key = int(parts[-1].get(zmq.SRCFD)), _user_of(parts[-1])
            peer = dialled if dialled is not None else self._port.peer_of(key)
            if not peer:
                self._intake.stranger()
                self._port.cut(line)
                continue
            if dialled is None:
                self._port.heard(line, key)
            self._incoming.came_over(line, peer)
            arrived = self._accept(peer, parts, dialled is None)
            if arrived is not None:
                yield peer, arrived

    def _accept(self, peer: str, parts: list[zmq.Frame], routed: bool) -> Frame | Spoiled | None:
        if len(parts) != (3 if routed else 2):
            return self._intake.unreadable()
        header_part, payload_part = parts[-2:]
        frame = self._intake.frame_of(header_part.bytes, payload_part.buffer)
        line = self.lines[peer]
        if isinstance(frame, Frame) and routed and parts[0].bytes not in line.routes:
            line.routes = [*line.routes, parts[0].bytes][-LINES_OF_CONTACT:]
        return self._judged(peer, frame)

    def _judged(self, peer: str, frame: Frame | Spoiled) -> Frame | Spoiled | None:
        """What the two links say to each other ends here."""
        if isinstance(frame, Spoiled) or frame.header.kind not in WORDS_OF_LINKS:
            return frame
        self.counts.verdicts.count(Verdict.ACCEPTED)
        line, header, now = self.lines[peer], frame.header, self._clock()
        if header.kind == Kind.LEAN_ASKED:
            granted = self._lean.grant(peer, line.contact.key, frame.payload)
            if granted is not None:
                line.put(with_payload(Header(Kind.LEAN_GRANTED, header.run_tag), granted))
        elif header.kind == Kind.LEAN_GRANTED:
            far_ends = (
                self._tcp.far_end(each.descriptor) for each in line.over(ConnectionKind.DIALLED) if each.up
            )
            made = self._lean.dial(peer, line.contact.key, next(far_ends, ""), frame.payload)
            if made is not None:
                line.opened.append(made)
        else:
            if header.kind == Kind.PONG:
                self._lean.takes_them(peer, header.version)
            answer = self._pings.on_frame(peer, header, now)
            if answer is not None:
                line.put(answer)
        return None


def _user_of(part: zmq.Frame) -> bytes:
    """The CURVE key of the connection, as the ZAP handler wrote it down; empty if there was none."""
    try:
        return bytes.fromhex(str(part.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""
