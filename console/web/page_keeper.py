"""The hold of `farflung coordinate` on the page of its run: binds the port, starts the process behind it, and again.

Used by `farflung coordinate --web`.  The socket is bound here, so that a port that is taken is told before the run
begins, and so that viewers find it open while a process that died is started again.  Must not know what the page says,
nor HTTP: not a byte of a viewer is read in this process.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from functools import partial
from types import TracebackType

import msgspec

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WEB_CONNECTIONS, WEB_MEMORY_BYTES
from farflung.protocol.process.child import CannotListen, ChildSettings, KeptChild, Listening, started
from farflung.protocol.process.metrics import parse_address

LOOK_S = 0.5
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}

log = logging.getLogger("farflung.page")


class PageSettings(ChildSettings, frozen=True, kw_only=True, tag="begin"):
    listener: int  # the descriptor of the socket that is bound to the port
    url: str  # for who joins
    ask_host: str  # where this machine reaches the coordinator


class PageProcess(KeptChild[PageSettings, Listening | CannotListen]):
    name, lost = "the page", "its process was {}; the run is not affected"
    module = "farflung.console.web.page_process"
    memory_bytes = WEB_MEMORY_BYTES
    heard = msgspec.msgpack.Decoder(Listening | CannotListen)
    silent_most_s = math.inf  # once it listens it has nothing more to say
    ends_within_s = 3.0  # it closes its viewers' connections first

    def signal_name(self, number: int) -> str:
        return f"signal {number}"


class PageKeeper:
    """Use as a context manager around the coordinator; `show` once it is known how the run is reached."""

    def __init__(self, address: str) -> None:
        self.host, self._wanted_port = parse_address(address, "--web")
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def __enter__(self) -> PageKeeper:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((self.host, self._wanted_port))
            self._listener.listen(WEB_CONNECTIONS)
        except OSError as error:
            self._listener.close()
            raise UserError(
                f"--web: cannot listen on {self.host} port {self._wanted_port}: {error.strerror}; choose a free "
                "port, and an address of this machine"
            ) from error
        self.port = int(self._listener.getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * PageProcess.ends_within_s)
        self._listener.close()

    def show(self, url: JoinUrl, listens_on: str) -> None:
        """`listens_on`: where the coordinator listens, which need not be where others reach it."""
        descriptor, ask_host = self._listener.fileno(), _EVERYWHERE.get(listens_on, listens_on)
        begin = PageSettings(port=self.port, listener=descriptor, url=str(url), ask_host=ask_host)
        page = PageProcess(begin, log.warning, partial(started, also=[descriptor]))
        host = url.host if self.host in _EVERYWHERE else self.host
        log.info("the page of this run: http://%s:%d/", f"[{host}]" if ":" in host else host, self.port)
        self._thread = threading.Thread(target=self._keep, args=(page,), name="page", daemon=True)
        self._thread.start()

    def _keep(self, page: PageProcess) -> None:
        try:
            while not self._stop.wait(LOOK_S):
                for _ in page.receive(time.monotonic()):
                    pass
        finally:
            page.close()
