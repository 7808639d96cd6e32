"""The hold of `farflung coordinate` on the page of its run: binds the port, starts the process behind it, and again.

Used by `farflung coordinate --web`.  The socket is bound here, so that a port that is taken is told before the run
begins, and so that viewers find it open while a process that died is started again.  Must not know what the page says,
nor HTTP: not a byte of a viewer is read in this process.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from types import TracebackType

import msgspec

from farflung.protocol.errors import UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import WEB_CONNECTIONS
from farflung.protocol.process.exporter import parse_address

BACKOFF_S, BACKOFF_MAX_S = 0.5, 30.0
WELL_AFTER_S = 60.0  # a process that lived so long is started again at once
ENDS_WITHIN_S = 3.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}

log = logging.getLogger("farflung.page")


class Begin(msgspec.Struct, frozen=True):
    """The one line on the input of the process."""

    url: str  # for who joins
    ask_host: str  # where this machine reaches the coordinator


class PageKeeper:
    """Use as a context manager around the coordinator; `show` once it is known how the run is reached."""

    def __init__(self, address: str) -> None:
        self.host, self._wanted_port = parse_address(address, "--web")
        self._process: subprocess.Popen[bytes] | None = None
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
        self._end(self._process)
        if self._thread is not None:
            self._thread.join(2 * ENDS_WITHIN_S)
        self._listener.close()

    def show(self, url: JoinUrl, listens_on: str) -> None:
        """`listens_on`: where the coordinator listens, which need not be where others reach it."""
        begin = Begin(str(url), _EVERYWHERE.get(listens_on, listens_on))
        host = url.host if self.host in _EVERYWHERE else self.host
        log.info("the page of this run: http://%s:%d/", f"[{host}]" if ":" in host else host, self.port)
        self._thread = threading.Thread(target=self._keep, args=(begin,), name="page", daemon=True)
        self._thread.start()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _keep(self, begin: Begin) -> None:
        wait_s = BACKOFF_S
        while not self._stop.is_set():
            started_at = time.monotonic()
            self._process = process = self._start(begin)
            if self._stop.is_set():
                self._end(process)
            code = process.wait()
            if self._stop.is_set():
                return
            wait_s = (
                BACKOFF_S if time.monotonic() - started_at >= WELL_AFTER_S else min(BACKOFF_MAX_S, 2 * wait_s)
            )
            why = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            log.warning(
                "the page: its process was %s; the run is not affected; it is started again in %.1f s",
                why,
                wait_s,
            )
            self._stop.wait(wait_s)

    def _start(self, begin: Begin) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "farflung.console.web.page_process", str(self._listener.fileno())]
        # Each arena of the allocator takes address space as if it were memory.
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            env=os.environ | {"MALLOC_ARENA_MAX": "2"},
        )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(begin) + b"\n")
            process.stdin.flush()  # it stays open: its end is what the process waits for
        except OSError:
            pass  # it is dead already, which is found out at once
        return process

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is None:
            return
        if process.stdin is not None:
            try:
                process.stdin.close()
            except OSError:
                pass
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
