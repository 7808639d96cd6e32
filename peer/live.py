"""Draws the status of a run again and again: the loop behind `watch` and the demo.

The picture itself is dashboard.py's; this module knows the terminal and the time between two frames.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live

from farflung.collectives.errors import Unreachable
from farflung.coordinator.url import JoinUrl
from farflung.peer.dashboard import plain_line, render
from farflung.peer.watching import StatusClient

PLAIN_EVERY_S = 5.0  # without a terminal: a line when the version or the phase's kind changes, or so often
FETCH_S = 5.0


class Screen:
    """Use as a context manager.  A terminal gets the dashboard in place; anything else gets plain lines."""

    def __init__(self, whole_screen: bool = True) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._whole_screen = whole_screen
        self._last_line_at = -PLAIN_EVERY_S
        self._last_news: tuple[object, ...] = ()

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                screen=self._whole_screen,
                auto_refresh=False,
                transient=not self._whole_screen,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: dict[str, Any]) -> None:
        if self._live is not None:
            # One line less than the terminal has: a full-height frame would scroll it at every refresh.
            picture = render(status, self._console.width, self._console.height - 1)
            self._live.update(picture, refresh=True)
            return
        alive = sum(1 for m in status.get("members", []) if m.get("alive"))
        news = (status.get("version"), alive, status.get("phase") == "finished")
        if news != self._last_news or time.monotonic() - self._last_line_at >= PLAIN_EVERY_S:
            self._last_news, self._last_line_at = news, time.monotonic()
            print(plain_line(status), flush=True)


def watch(url: JoinUrl, once: bool, every_s: float) -> None:
    with StatusClient(url) as client:
        status = client.fetch(FETCH_S)
        if once:
            console = Console()
            height = console.height - 1 if console.is_terminal else 40
            console.print(render(status, console.width, height))
            return
        with Screen() as screen:
            screen.show(status)
            follow(client, screen.show, every_s)


def follow(client: StatusClient, show: Callable[[dict[str, Any]], None], every_s: float) -> None:
    """Until the run is finished or the user stops looking.  A coordinator that is away may come back."""
    while True:
        time.sleep(every_s)
        try:
            status = client.fetch(FETCH_S)
        except Unreachable as error:
            print(f"farflung: {error}; still looking", file=sys.stderr, flush=True)
            continue
        show(status)
        if status.get("phase") == "finished":
            return
