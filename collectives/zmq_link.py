"""The data plane over ZeroMQ and CURVE: bulk frames between the peers of a run.

Owned by the agent, which polls its sockets, hands it frames to send and takes frames that arrived.  It knows
who may speak (the contacts) and how to reach them, and nothing of rounds.  Keys are arguments.

Who can be dialled is dialled, one connection for each direction.  Who cannot be dialled keeps connections to
all who can, and is answered over them.  A socket takes only a few frames at a time; the rest waits here, as
references to bytes that their owner keeps anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from farflung.collectives.errors import FrameError, UserError
from farflung.collectives.frames import Frame, Header, Kind, Payload, check_payload, parse
from farflung.collectives.limits import BULK_SLACK_BYTES
from farflung.collectives.plan import Contact
from farflung.collectives.verdicts import Counters, Verdict

FRAMES_IN_SOCKET = 8  # per connection and direction: with 1 MiB chunks, at most 8 MiB in libzmq
FRAMES_PER_TURN = 64  # bounded work between two looks at the clock
ZAP_DOMAIN = b"data"


@dataclass
class _Line:
    """One peer as we reach it: a socket we opened, or the route of a connection that it opened."""

    contact: Contact
    dealer: zmq.Socket[bytes] | None = None
    route: bytes | None = None
    waiting: deque[tuple[int, bytes, Payload]] = field(default_factory=deque)  # (round, header, payload)
    named: set[bytes] = field(default_factory=set)  # headers of what waits: nothing waits twice
    undialable: bool = False  # its address can't be used


class ZmqLink:
    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: tuple[bytes, bytes], counters: Counters
    ) -> None:
        """`keys`: CURVE public and secret key of this session, z85."""
        self.counters = counters
        self.tx_bytes = self.rx_bytes = 0
        self._context = context
        self._public, self._secret = keys
        self._lines: dict[str, _Line] = {}
        self._peer_of_key: dict[str, str] = {}
        self._router: zmq.Socket[bytes] | None = None
        self._run_tag = bytes(8)
        self._payload_max = 0
        self._me = ""

    # ---- life ----------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        """Accept connections; returns the port (port 0: any free one)."""
        router = self._socket(zmq.ROUTER)
        router.curve_server = True
        router.zap_domain = ZAP_DOMAIN
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router = router
        try:
            router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot listen on {host}:{port} for other peers: {error.strerror}; choose another with --listen"
            ) from None
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])

    def expect(self, me: str, run_tag: bytes, payload_max: int) -> None:
        """What frames of this run look like.  First of all: a socket's limit is fixed when it is opened."""
        self._me, self._run_tag, self._payload_max = me, run_tag, payload_max

    def set_contacts(self, roster: Iterable[Contact]) -> None:
        contacts = {contact.peer: contact for contact in roster if contact.peer != self._me}
        for peer, line in list(self._lines.items()):
            if contacts.get(peer) != line.contact:
                self._drop(peer)
        for peer, contact in contacts.items():
            if peer not in self._lines:
                self._lines[peer] = _Line(contact)
                self._peer_of_key[contact.key.hex()] = peer
                if self._router is None and contact.address:
                    # Nobody can dial me: my connection must be there before somebody has something for me.
                    self.send(peer, Frame(Header(Kind.MISSING, self._run_tag)))

    def close(self) -> None:
        for peer in list(self._lines):
            self._drop(peer)
        if self._router is not None:
            self._router.close(linger=0)

    def _drop(self, peer: str) -> None:
        line = self._lines.pop(peer)
        self._peer_of_key.pop(line.contact.key.hex(), None)
        if line.dealer is not None:
            line.dealer.close(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, FRAMES_IN_SOCKET)
        socket.setsockopt(zmq.RCVHWM, FRAMES_IN_SOCKET)
        socket.setsockopt(zmq.MAXMSGSIZE, self._payload_max + BULK_SLACK_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        # No ZMTP heartbeats: libzmq 4.3.5 aborts the whole process when a heartbeat is due on a connection that
        # broke while its receive queue was full.  The kernel's keepalive and our own beats find the dead.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.TCP_MAXRT, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    # ---- polling -------------------------------------------------------------------------------------------

    def sockets(self) -> Iterator[tuple[zmq.Socket[bytes], bool]]:
        """(socket to poll, whether to wait for room in it too)."""
        if self._router is not None:
            yield self._router, False
        for line in self._lines.values():
            if line.dealer is not None:
                yield line.dealer, bool(line.waiting)

    # ---- sending -------------------------------------------------------------------------------------------

    def send(self, peer: str, frame: Frame) -> bool:
        """Queue a frame.  False if the peer is not a contact: then nobody waits for it any more."""
        line = self._lines.get(peer)
        if line is None:
            return False
        header = frame.header.pack()
        if header not in line.named:  # asked for again while it still waits: once is enough
            line.named.add(header)
            line.waiting.append((frame.header.round_no, header, frame.payload))
        self._flush_line(line)
        return True

    def forget_rounds_before(self, round_no: int) -> None:
        """What still waits of rounds that are over would only delay the round that is on."""
        for line in self._lines.values():
            kept = [item for item in line.waiting if item[0] == 0 or item[0] >= round_no]
            if len(kept) < len(line.waiting):
                line.waiting, line.named = deque(kept), {header for _, header, _ in kept}

    def flush(self) -> None:
        for line in self._lines.values():
            if line.waiting:
                self._flush_line(line)

    def _flush_line(self, line: _Line) -> None:
        if line.contact.address and line.dealer is None and not line.undialable:
            self._dial(line)
        socket = line.dealer if line.dealer is not None else self._router
        if socket is None or (line.dealer is None and line.route is None):
            return
        while line.waiting:
            _, header, payload = line.waiting[0]
            parts: list[Payload] = [header, payload]
            if line.dealer is None and line.route is not None:
                parts.insert(0, line.route)
            try:
                socket.send_multipart(parts, zmq.NOBLOCK, copy=len(payload) < 65536)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                line.route = None  # its connection is gone; it will open another
                return
            line.waiting.popleft()
            line.named.discard(header)
            self.tx_bytes += len(header) + len(payload)

    def _dial(self, line: _Line) -> None:
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # a socket that is not connected takes nothing: it waits here
        dealer.curve_serverkey = z85.encode(line.contact.key)
        try:
            dealer.connect(f"tcp://{line.contact.address}")
        except zmq.ZMQError:  # the coordinator checks addresses, but one that slips through must not end us
            dealer.close()
            line.undialable = True
            return
        line.dealer = dealer

    # ---- receiving -----------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[str, Frame]]:
        """Frames that arrived from contacts and match their hash; all others end in their counter here."""
        for peer, line in list(self._lines.items()):
            if line.dealer is not None:
                yield from self._receive_from(line.dealer, peer)
        if self._router is not None:
            yield from self._receive_from(self._router, None)

    def _receive_from(self, socket: zmq.Socket[bytes], dialled: str | None) -> Iterator[tuple[str, Frame]]:
        for _ in range(FRAMES_PER_TURN):
            if socket.closed:
                return
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                accepted = self._accept(parts, dialled)
            except FrameError as error:
                self.counters.count(error.verdict)
                continue
            if accepted is not None:
                yield accepted

    def _accept(self, parts: list[zmq.Frame], dialled: str | None) -> tuple[str, Frame] | None:
        self.rx_bytes += sum(len(part) for part in parts)
        if len(parts) != (2 if dialled is not None else 3):
            raise FrameError(Verdict.MALFORMED, f"a bulk frame has two parts, this one {len(parts)}")
        header_part, payload_part = parts[-2:]
        peer = dialled
        if peer is None:
            peer = self._peer_of_key.get(_user_of(parts[-1]), "")
            if not peer:
                raise FrameError(Verdict.UNAUTHORISED, "a key that is not in the run")
            self._lines[peer].route = parts[0].bytes
        header = parse(header_part.bytes, len(payload_part), self._run_tag, self._payload_max)
        payload = payload_part.buffer
        check_payload(header, payload)
        if header.kind == Kind.MISSING and header.round_no == 0 and header.decision_no == 0:
            self.counters.count(
                Verdict.ACCEPTED
            )  # the greeting of one who can't be dialled: it only shows its route
            return None
        return peer, Frame(header, payload)


def _user_of(part: zmq.Frame) -> str:
    """The CURVE key of the connection, as the ZAP handler wrote it down; "" if there was none."""
    try:
        user = part.get("User-Id")
    except zmq.ZMQError:
        return ""
    return user if isinstance(user, str) else ""
