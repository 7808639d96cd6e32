"""When a coordinator ends: it was told to, or its run is complete and nobody needs it any more.

Called by the server.  Must not know sockets.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

LINGER_DONE_S = 2.0  # after a finished run's last member left
LINGER_MOST_S = 60.0  # after the run finished, whoever is still there


class QuietEnd:
    """When a finished run's coordinator may go home: its members have left, or had time enough to."""

    def __init__(self) -> None:
        self._finished_at: float | None = None
        self._empty_since: float | None = None

    def is_over(self, finished: bool, members: int, now: float) -> bool:
        if not finished:
            return False
        self._finished_at = now if self._finished_at is None else self._finished_at
        if members:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        quiet_s = 0.0 if self._empty_since is None else now - self._empty_since
        return quiet_s >= LINGER_DONE_S or now - self._finished_at >= LINGER_MOST_S


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The stop signals that came so far, instead of their usual deaths."""
    asked: list[int] = []
    stops = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(stop, lambda number, _: asked.append(number)) for stop in stops]
    try:
        yield asked
    finally:
        for stop, handler in zip(stops, before, strict=True):
            signal.signal(stop, handler)
