"""Hands a page out, and its news to whoever looks on: one thread, a few hundred sockets, the same bytes for all.

Made by page_process.py, whose other thread gives it a new `Edition` now and then.  It is a loop over `selectors`, not
`http.server`, which has a thread for each viewer, nor asyncio's streams, which copy what they send into a buffer of
each; here a viewer is a socket, an index into bytes that all share, and a time by which it must have moved on.  Who
asks slowly, reads slowly, sends more than a request, or comes too often from one network is cut off.  Must not know
what the page says.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.console.web.requests import (
    EVENTS,
    FOREVER,
    FRESH,
    HTML,
    Request,
    StreamPiece,
    Wrong,
    answer,
    gzipped,
    is_whole,
    live_head,
    refusal,
    request_of,
    said,
)
from farflung.coordinator.door.allowance import Quota
from farflung.protocol.limits import (
    WEB_ANSWER_S,
    WEB_CONNECTIONS,
    WEB_CONNECTIONS_OF_NETWORK,
    WEB_REQUEST_S,
    WEB_REQUESTS_BURST,
    WEB_REQUESTS_PER_S,
    WEB_SLOW_S,
)
from farflung.protocol.process.networks import StrangerCounts, network_of

KEEP_ALIVE_S = 15.0
GOODBYE_S = 1.0  # for the other side to take the last bytes and close
SILENT_S = 2 * KEEP_ALIVE_S  # a full server makes room by cutting off who has not taken anything for so long
_TURN_S = 0.25
_READ_BYTES = 4096
_SEND_BUFFER_BYTES = 64 * 1024  # the system's, for each: what a slow reader may leave lying there
_ACCEPTS_A_TURN = 64
_TOO_MUCH_BYTES = 64 * 1024  # after a request that was answered

log = logging.getLogger("farflung.page")


@dataclass(frozen=True)
class PageLimits:
    """What holds at the port; tests have others."""

    connections: int = WEB_CONNECTIONS
    connections_of_network: int = WEB_CONNECTIONS_OF_NETWORK
    request_s: float = WEB_REQUEST_S
    answer_s: float = WEB_ANSWER_S
    slow_s: float = WEB_SLOW_S
    requests_per_s: float = WEB_REQUESTS_PER_S
    requests_burst: float = WEB_REQUESTS_BURST
    keep_alive_s: float = KEEP_ALIVE_S


@dataclass(frozen=True)
class Edition:
    """One state of the page, in all the forms in which it is handed out."""

    number: str
    page: bytes
    packed_page: bytes
    whole: StreamPiece  # for a viewer of whom it is not known what it has
    news: StreamPiece | None  # for who has `before`; None: nothing is different
    before: str = ""


@dataclass(frozen=True)
class Asset:
    """A file that goes with every page."""

    kind: str
    body: bytes
    keep: str = FOREVER
    packed: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", gzipped(self.body))


@dataclass
class _Line:
    """One connection.  What it is to be sent is `out`, from `sent` on."""

    socket: socket.socket
    network: str
    until: float  # by then it must have moved on
    came: bytes = b""
    more_bytes: int = 0  # that came after it was answered
    out: bytes = b""
    sent: int = 0
    live: bool = False
    gzip: bool = False
    behind: bool = False  # it could not take an update: it gets the whole as soon as it can
    closing: bool = False  # nothing more is said; what still comes is thrown away
    quiet_since: float = field(default=0.0)

    @property
    def waits(self) -> bool:
        return self.sent < len(self.out)


class PageServer:
    """`listener`: bound already.  `serve` is the thread's whole life; `publish` and `idle_s` are for others."""

    def __init__(
        self, listener: socket.socket, assets: Mapping[str, Asset], limits: PageLimits | None = None
    ) -> None:
        self._limits = limits or PageLimits()
        self._listener = listener
        self._assets = dict(assets)
        self._edition: Edition | None = None
        self._lines: dict[int, _Line] = {}
        self._crowd = StrangerCounts(self._limits.connections, self._limits.connections_of_network, SILENT_S)
        self._asks: Quota[str] = Quota(self._limits.requests_per_s, self._limits.requests_burst)
        self._refused: Quota[str] = Quota(1 / 60.0, 1.0)  # lines of the log, for each network
        self._wake, self._woken = socket.socketpair()
        self._stop = threading.Event()
        self._asked_at = -math.inf
        self._beat = said(b": \n\n")
        self.sent_bytes = 0
        self.viewers = 0
        self.cut_off = 0  # that broke a limit
        for each in (listener, self._wake, self._woken):
            each.setblocking(False)

    def publish(self, edition: Edition) -> None:
        """From another thread."""
        self._edition = edition  # one assignment: the loop sees the old or the new
        self._ring()

    def stop(self) -> None:
        self._stop.set()
        self._ring()

    def idle_s(self, now: float) -> float:
        """Since somebody last asked for something; 0 while anybody looks on."""
        return 0.0 if self.viewers else now - self._asked_at

    def _ring(self) -> None:
        try:
            self._wake.send(b"!")
        except BlockingIOError:
            pass  # it is full of rings already

    # ---- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            told, look_at = "", 0.0
            while not self._stop.is_set():
                for key, ready in self._selector.select(_TURN_S):
                    now = time.monotonic()
                    if key.fileobj is self._listener:
                        self._accept(now)
                    elif key.fileobj is self._woken:
                        _drain(self._woken)
                    elif isinstance(key.data, _Line) and key.fd in self._lines:
                        self._move_on(key.data, ready, now)
                now = time.monotonic()
                if self._edition is not None and self._edition.number != told:
                    edition = self._edition
                    self._tell_all(edition, told, now)
                    told = edition.number
                if now >= look_at:
                    look_at = now + _TURN_S
                    self._look_round(now)
            for line in list(self._lines.values()):
                self._close(line)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                one, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it is gone again, or there are no more descriptors: the next turn looks again
                self._stop.wait(_TURN_S / 10)
                return
            network = network_of(str(address[0]))
            for descriptor in self._crowd.comes(one.fileno(), network, now):
                if descriptor == one.fileno():
                    self._say_refused(network, now)
                    one.close()
                elif descriptor in self._lines:
                    self.cut_off += 1
                    self._close(self._lines[descriptor])
            if one.fileno() < 0:
                continue
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            line = self._lines[one.fileno()] = _Line(
                one, network, now + self._limits.request_s, quiet_since=now
            )
            self._selector.register(one, selectors.EVENT_READ, line)

    def _say_refused(self, network: str, now: float) -> None:
        self.cut_off += 1
        if self._refused.take(network, now):
            whose = f"from {network}" if network else "in all"
            log.warning("the page: too many connections %s; more are turned away", whose)

    def _look_round(self, now: float) -> None:
        """Who is too slow goes; who has heard nothing for long hears that we are there."""
        for line in [each for each in self._lines.values() if now >= each.until]:
            self.cut_off += not line.closing
            self._close(line)
        for line in [each for each in self._lines.values() if each.live and not each.waits]:
            if now - line.quiet_since >= self._limits.keep_alive_s:
                self._say(line, self._beat.coded(line.gzip), now)

    # ---- one connection ------------------------------------------------------------------------------------------

    def _move_on(self, line: _Line, ready: int, now: float) -> None:
        try:
            if ready & selectors.EVENT_READ and not self._hear(line, now):
                self._close(line)
            elif ready & selectors.EVENT_WRITE:
                self._send(line, now)
        except BlockingIOError:
            return
        except OSError:
            self._close(line)

    def _hear(self, line: _Line, now: float) -> bool:
        """False: it is over."""
        came = line.socket.recv(_READ_BYTES)
        if not came or line.live:  # a viewer has nothing more to say
            self.cut_off += bool(came)
            return False
        if line.closing or line.out:
            line.more_bytes += len(came)
            return line.more_bytes <= _TOO_MUCH_BYTES
        line.came += came
        if is_whole(line.came):
            self._answer(line, request_of(line.came), now)
        return True

    def _answer(self, line: _Line, asked: Request | Wrong, now: float) -> None:
        line.came, self._asked_at = b"", now
        if line.network and not self._asks.take(line.network, now):
            asked = Wrong(
                "429 Too Many Requests", "too many requests from your network; try again in a while"
            )
        line.until = now + self._limits.answer_s
        if isinstance(asked, Wrong):
            self._say(line, refusal(asked), now)
        elif asked.path == "/live" and asked.with_body and self._edition is not None:
            self._begin_live(line, asked, self._edition, now)
        else:
            self._say(line, self._found(asked), now)

    def _found(self, asked: Request) -> bytes:
        head_only, gzip, edition = not asked.with_body, asked.takes_gzip, self._edition
        asset = self._assets.get(asked.path)
        if asset is not None:
            body = asset.packed if gzip else asset.body
            return answer("200 OK", asset.kind, body, asset.keep, head_only=head_only, gzip=gzip)
        if edition is None:
            return refusal(Wrong("503 Service Unavailable", "starting; try again in a moment"))
        if asked.path == "/":
            body = edition.packed_page if gzip else edition.page
            return answer("200 OK", HTML, body, FRESH, head_only=head_only, gzip=gzip)
        if asked.path == "/live":
            return answer("200 OK", EVENTS, b"", FRESH, head_only=True)
        return refusal(Wrong("404 Not Found", "there is only one page"))

    def _begin_live(self, line: _Line, asked: Request, edition: Edition, now: float) -> None:
        line.live, line.gzip = True, asked.takes_gzip
        self.viewers += 1
        begin = live_head(line.gzip)
        if asked.has != edition.number:
            begin += edition.whole.coded(line.gzip)
        self._say(line, begin, now)

    def _tell_all(self, edition: Edition, told: str, now: float) -> None:
        """The same bytes for everybody; `told`: the edition that they have."""
        news = edition.news if told == edition.before else edition.whole
        if news is None:
            return
        for line in [each for each in self._lines.values() if each.live]:
            if line.waits:
                line.behind = True
            else:
                self._say(line, news.coded(line.gzip), now)

    def _say(self, line: _Line, words: bytes, now: float) -> None:
        line.out, line.sent = words, 0
        if line.live:
            line.until = now + self._limits.slow_s
        try:
            self._send(line, now)
        except BlockingIOError:
            self._selector.modify(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
        except OSError:
            self._close(line)

    def _send(self, line: _Line, now: float) -> None:
        while line.waits:
            taken = line.socket.send(memoryview(line.out)[line.sent :])
            line.sent += taken
            self.sent_bytes += taken
        self._crowd.heard(line.socket.fileno(), now)
        line.quiet_since = now
        self._selector.modify(line.socket, selectors.EVENT_READ, line)
        if not line.live:
            # Closed at once, what the other side has sent since would take our last bytes with it.
            line.closing, line.until = True, now + GOODBYE_S
            line.socket.shutdown(socket.SHUT_WR)
            return
        line.until = math.inf
        line.out, line.sent = b"", 0
        if line.behind and self._edition is not None:
            line.behind = False
            self._say(line, self._edition.whole.coded(line.gzip), now)

    def _close(self, line: _Line) -> None:
        descriptor = line.socket.fileno()
        if self._lines.pop(descriptor, None) is None:
            return
        self.viewers -= line.live
        self._crowd.ends(descriptor)
        self._selector.unregister(line.socket)
        line.socket.close()


def _drain(bell: socket.socket) -> None:
    try:
        while bell.recv(1024):
            pass
    except BlockingIOError:
        return
