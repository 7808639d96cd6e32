"""Figures for Prometheus: its text format, and the families that every farflung process has.

Used by the coordinator (coordinator/run_metrics.py) and by peers; the exporter below hands the
text out.  Names follow Prometheus: base units, `_total` for what only grows.  docs/operate.md lists them all.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from farflung.protocol.errors import UserError
from farflung.protocol.limits import METRICS_CONNECTIONS, METRICS_REQUEST_BYTES, METRICS_REQUEST_S

PREFIX = "farflung_"
_TEXT = str.maketrans({"\\": r"\\", "\n": r"\n"})
_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True)
class Family:
    """One name and its values, each under labels of its own; a value of None is left out."""

    name: str
    help: str
    values: Iterable[tuple[Mapping[str, str], float | None]]
    kind: Literal["gauge", "counter"] = "gauge"


def gauge(name: str, help: str, value: float | None, **labels: str) -> Family:
    return Family(PREFIX + name, help, [(labels, value)])


def counter(name: str, help: str, value: float | None, **labels: str) -> Family:
    return Family(PREFIX + name, help, [(labels, value)], "counter")


def by_label(name: str, help: str, label: str, values: Mapping[str, float]) -> Family:
    kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
    return Family(PREFIX + name, help, [({label: key}, value) for key, value in values.items()], kind)


def text_of(families: Iterable[Family]) -> str:
    """The exposition format 0.0.4."""
    lines: list[str] = []
    for family in families:
        told = [(labels, value) for labels, value in family.values if value is not None]
        if told:
            lines.append(f"# HELP {family.name} {family.help.translate(_TEXT)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in told]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{value.translate(_LABEL)}"' for key, value in labels.items()) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if isinstance(value, float) else str(int(value))


def of_process(software: str, run: str, role: str) -> list[Family]:
    """Under the names that every Prometheus client library uses."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    rss_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    plain: Mapping[str, str] = {}
    return [
        gauge("info", "Always 1; the labels say what this is.", 1, software=software, run=run, role=role),
        Family("process_resident_memory_bytes", "Memory in use.", [(plain, rss_kb * 1024)]),
        Family("process_cpu_seconds_total", "CPU time used.", [(plain, time.process_time())], "counter"),
        Family(
            "process_open_fds", "Open files and connections.", [(plain, len(os.listdir("/proc/self/fd")))]
        ),
    ]


# ---- exporter ----------------------------------------------------------------------------------------------
# Hands out `/metrics` and `/healthz` over HTTP, in a thread of its own with its own few sockets.
#
# Made by the server and by a peer's agent, where `--metrics` asks for it. Their loops only put a new text
# here now and then, so no client of this port can hold them up; and what health means is that the loop has
# done so lately. Whoever sends much, slowly, or to many connections at once is cut off. Must not know what
# the text says.

EVERY_S = 1.0  # how often a loop puts a new text here
STALE_S = 15.0  # a loop that has not been heard of for so long does not turn any more
_TURN_S = 0.25

log = logging.getLogger("farflung.metrics")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class _Connection:
    until: float
    request: bytes = b""
    answer: bytes = b""


@dataclass(frozen=True)
class _Told:
    text: bytes = b""
    at: float = field(default_factory=time.monotonic)


class Exporter:
    """Use as a context manager.  `address`: HOST:PORT, or a port of this machine alone."""

    def __init__(self, address: str) -> None:
        self.host, self._wanted_port = parse_address(address)
        self._told = _Told()
        self._stop = threading.Event()

    def __enter__(self) -> Exporter:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((self.host, self._wanted_port))
            self._listener.listen(METRICS_CONNECTIONS)
        except OSError as error:
            self._listener.close()
            raise UserError(
                f"--metrics: cannot listen on {self.host} port {self._wanted_port}: {error.strerror}; choose a free "
                "port, and an address of this machine"
            ) from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        log.info("figures for Prometheus: http://%s:%d/metrics", self.host, self.port)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._listener.close()

    def is_due(self, now: float) -> bool:
        return not self._told.text or now - self._told.at >= EVERY_S

    def tell(self, text: bytes) -> None:
        """From the loop that is watched: what to hand out from now on."""
        self._told = _Told(text)  # one assignment: the thread sees the old or the new

    # ---- the thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                ready = [key for key, _ in selector.select(_TURN_S)]
                for key in ready:
                    if key.data is not None:
                        self._move_on(selector, key)
                if any(key.data is None for key in ready):
                    self._accept(selector)
                now = time.monotonic()
                for key in [key for key in selector.get_map().values() if key.data and now >= key.data.until]:
                    _close(selector, key)
            for key in [key for key in selector.get_map().values() if key.data]:
                _close(selector, key)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            one, _ = self._listener.accept()
        except OSError:  # it is gone again, or there are no more descriptors: the next turn looks again
            self._stop.wait(_TURN_S / 10)
            return
        others = [key for key in selector.get_map().values() if key.data]
        if len(others) >= METRICS_CONNECTIONS:
            _close(selector, min(others, key=lambda key: float(key.data.until)))  # who has had most time
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ, _Connection(time.monotonic() + METRICS_REQUEST_S))

    def _move_on(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        one, state = key.fileobj, key.data
        assert isinstance(one, socket.socket) and isinstance(state, _Connection)
        try:
            if not state.answer:
                came = one.recv(METRICS_REQUEST_BYTES)
                state.request += came
                if came and not self._is_whole(state.request):
                    return
                if came:
                    state.answer = self._answer(state.request)
                    selector.modify(one, selectors.EVENT_WRITE, state)
            state.answer = state.answer[one.send(state.answer) :]
        except BlockingIOError:
            return
        except OSError:
            state.answer = b""
        if not state.answer:
            _close(selector, key)

    @staticmethod
    def _is_whole(request: bytes) -> bool:
        return b"\r\n\r\n" in request or b"\n\n" in request or len(request) >= METRICS_REQUEST_BYTES

    def _answer(self, request: bytes) -> bytes:
        if len(request) >= METRICS_REQUEST_BYTES:
            return _response("431 Request Header Fields Too Large", b"the request is too long\n")
        words = request.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"not an HTTP request\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET and HEAD\n")
        status, body = self._page(words[1].split(b"?", 1)[0])
        return _response(status, body, with_body=words[0] == b"GET")

    def _page(self, path: bytes) -> tuple[str, bytes]:
        told, age_s = self._told, time.monotonic() - self._told.at
        match path:
            case b"/metrics":
                return ("200 OK", told.text) if told.text else ("503 Service Unavailable", b"starting\n")
            case b"/healthz" if age_s >= STALE_S:
                return (
                    "503 Service Unavailable",
                    f"the main loop has stood still for {age_s:.0f} s\n".encode(),
                )
            case b"/healthz":
                return "200 OK", b"ok\n"
        return "404 Not Found", b"there are /metrics and /healthz\n"


def parse_address(text: str, option: str = "--metrics") -> tuple[str, int]:
    """`PORT`, `HOST:PORT` or `[IPV6]:PORT`; a port alone is one of this machine only.  `option`: for the error."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{option} '{text}': expected PORT or HOST:PORT, such as 9464 or 127.0.0.1:9464")
    return host, int(port)


def _response(status: str, body: bytes, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + (body if with_body else b"")


def _close(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    one = key.fileobj
    assert isinstance(one, socket.socket)
    selector.unregister(one)
    one.close()
