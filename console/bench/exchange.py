"""How the hosts of one bench tell their figures to the one that serves.

Called by console/bench/bench.py.  One CURVE socket, two ports above the coordinator's door, with the coordinator's own
key: a caller that has the join URL can check whom it talks to.  Must not know what the figures mean.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from farflung.coordinator.door.keys import load_or_create
from farflung.protocol.errors import FarflungError, Unreachable
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.process.sockets import CLIENT, REPORTS_SERVER, curve_client, curve_server, opened

ABOVE_THE_DOOR = 2
SEND_S = 60.0


@dataclass(frozen=True)
class BenchLine:
    port: int

    @classmethod
    def of(cls, url: JoinUrl) -> BenchLine:
        return cls(url.port + ABOVE_THE_DOOR)


class Collector:
    """Use as a context manager: the port is open inside it."""

    def __init__(self, data: Path, host: str, line: BenchLine) -> None:
        self._keys = load_or_create(data)
        self._host = host
        self._line = line

    def __enter__(self) -> Collector:
        self._context = zmq.Context()
        self._socket = opened(self._context, zmq.REP, REPORTS_SERVER, curve_server(self._keys.secret))
        try:
            self._socket.bind(f"tcp://{self._host}:{self._line.port}")
        except zmq.ZMQError as error:
            self.__exit__(None, None, None)
            where = f"{self._host}:{self._line.port}"
            raise FarflungError(f"cannot listen on {where} for the figures: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()

    def collect(self, count: int, patience_s: float) -> list[dict[str, Any]]:
        """So many reports, or as many as came in time."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + patience_s
        while len(found) < count and self._socket.poll(max(0, round(1000 * (end - time.monotonic())))):
            found.append(json.loads(self._socket.recv()))
            self._socket.send(b"")
        return found


def send_report(url: JoinUrl, report: dict[str, Any]) -> None:
    """Returns when the host that serves has it."""
    context = zmq.Context()
    socket = opened(context, zmq.REQ, CLIENT, curve_client(zmq.curve_keypair(), url.key))
    try:
        host = f"[{url.host}]" if ":" in url.host else url.host
        socket.connect(f"tcp://{host}:{BenchLine.of(url).port}")
        socket.send(json.dumps(report).encode())
        if not socket.poll(round(1000 * SEND_S)):
            raise Unreachable(
                f"{url.host} took no figures on port {BenchLine.of(url).port} within {SEND_S:g} s"
            )
        socket.recv()
    finally:
        socket.close()
        context.term()
