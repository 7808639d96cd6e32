"""The ports at which others dial this peer: who may come in there, and how many connections may stand.

Owned by zmq_link.py; lean.py asks it for the lean port.  The rules are those of the coordinator's sockets
(protocol/process/networks.py), and both ports share the room: what this process needs besides, it keeps.

Who may lie: anybody may connect, and is one of the silent ones, few of one network, until its handshake is over or its
time is.  Only contacts shake hands, those that the coordinator named, and the coordinator itself, which dials a
newcomer back; whoever is none any more is cut off.  A contact may open any number of connections and keep the newest.
Must not know frames or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import zmq
from zmq.utils.monitor import parse_monitor_message

from farflung.collectives.link.tcp_counts import NEWS, TcpCounts, is_ours
from farflung.protocol.caps import CONNECTIONS_MOST
from farflung.protocol.process.descriptors import end, network_at, room_for_connections
from farflung.protocol.process.networks import Bounds, Lines
from farflung.protocol.process.sockets import Socket, ZapHandler

ZAP_DOMAIN = b"data"
LINES_OF_CONTACT = 2 * CONNECTIONS_MOST  # as many of ZeroMQ's as it may want, and of lean ones
# Over which nothing was said yet, in all and of one network: a peer hears from far fewer than a coordinator.
SILENT_MOST, SILENT_OF_NETWORK = 256, 64
DESCRIPTORS_OF_LINE = 2  # the other one counts its bytes (tcp_counts.py)
NEWS_PER_TURN = 512


class Port:
    """`refused()`: somebody was not let in.  `cut_lean(line)` ends one that is not libzmq's."""

    def __init__(
        self, zap: ZapHandler, tcp: TcpCounts, refused: Callable[[], None], cut_lean: Callable[[int], None]
    ) -> None:
        bounds = Bounds(LINES_OF_CONTACT, SILENT_MOST, SILENT_OF_NETWORK)
        self.lines = Lines(room_for_connections() // DESCRIPTORS_OF_LINE, bounds)
        self.number = 0
        self._tcp, self._refused, self._cut_lean = tcp, refused, cut_lean
        self._contacts: dict[bytes, str] = {}  # by key
        self._visitor = b""
        self._router: Socket | None = None
        self._news: Socket | None = None
        zap.set_policy(ZAP_DOMAIN.decode(), self._may_come)

    # ---- who may come in -----------------------------------------------------------------------------------

    def expect_visitor(self, key: bytes) -> None:
        """Who dials this peer back to see whether it can be reached, and says nothing."""
        self._visitor = key

    def let_in(self, key: bytes, peer: str) -> None:
        self._contacts[key] = peer

    def shut_out(self, keys: Iterable[bytes]) -> None:
        """None of their connections is left.  Some may be among the silent ones; those of others dial again."""
        gone = set(keys)
        for key in gone:
            self._contacts.pop(key, None)
            self.lines.send_away(key, 0.0)
        if gone:
            self._cut([*self.lines.due(0.0, self._contacts.__contains__), *self.lines.silent()])

    def peer_of(self, key: bytes) -> str:
        """ "" for a stranger."""
        return self._contacts.get(key, "")

    def _may_come(self, key: bytes) -> bool:
        if key in self._contacts or key == self._visitor:
            return True
        self._refused()
        return False

    # ---- its connections -----------------------------------------------------------------------------------

    def watch(self, router: Socket) -> None:
        """Before it is bound: its news are then complete."""
        self._router, self._news = router, router.get_monitor_socket(NEWS)

    @property
    def news(self) -> Socket | None:
        """To poll: a flood must not have to wait for its end until something else is to be done."""
        return self._news

    def read_news(self) -> None:
        """Before frames are read: numbers are used again."""
        for _ in range(NEWS_PER_TURN):
            if self._news is None or not self._news.poll(0):
                return
            news = parse_monitor_message(self._news.recv_multipart(zmq.NOBLOCK))
            event, line = news["event"], news["value"]
            if event == zmq.EVENT_ACCEPTED:
                self._tcp.forget(line)
                self._cut(self.lines.comes(line, network_at(line)))
            else:
                self.ends(line)

    def comes(self, line: int, network: str) -> None:
        """To the lean port."""
        self._cut(self.lines.comes(line, network))

    def heard(self, line: int, key: bytes) -> None:
        """A frame came over it.  Before that a connection is nobody's, and its bytes are not counted."""
        if self.lines.is_silent(line) and not is_ours(line):
            self._tcp.on_news(zmq.EVENT_ACCEPTED, line)
        self._cut(self.lines.heard(line, b"", key))

    def ends(self, line: int) -> None:
        self._tcp.forget(line)
        self.lines.ends(line)

    def cut(self, line: int) -> None:
        self._cut([line])

    def _cut(self, lines: Iterable[int]) -> None:
        for line in lines:
            if is_ours(line):
                self._cut_lean(line)
            else:
                end(line, self.number)

    def close(self) -> None:
        if self._router is not None and self._news is not None:
            self._router.disable_monitor()
            self._news.close(linger=0)
            self._router.close(linger=0)
            self._router = self._news = None
