"""Draws the status of a run again and again: the loop behind `status --watch`, the demo, and the screens of `join` and
`coordinate`.

The picture itself is dashboard.py's; this module knows the time between two frames, and where statuses come from.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from farflung.console.screen.dashboard import render
from farflung.console.screen.health import plain_line
from farflung.console.screen.status_client import StatusClient
from farflung.console.screen.terminal import Terminal, has_terminal
from farflung.console.screen.text import Record
from farflung.console.screen.view import View
from farflung.protocol.errors import FarflungError, FrameError, Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.states import RunPhase

PLAIN_EVERY_S = 5.0  # without a terminal: a line when the version or the phase's kind changes, or so often
FETCH_S = 5.0
EVERY_S = 1.0  # between two looks
FRAME_S = 0.25
SAME_S = 1.0  # a picture without news is drawn again after so long: the terminal may have another size
SILENT_S = 3.0  # without an answer for so long, the screen says that it is old
FRAME_LINES = 40  # of a frame that is printed, where no terminal has a height

Status = dict[str, Any]


class StatusSource(Protocol):
    @property
    def holds(self) -> bool:
        """It pauses by itself."""

    def status(self) -> Status | None:
        """The newest one; None as long as there is none.  Raises what makes looking pointless."""

    def on_key(self, key: str) -> None:
        """A key that the view does not know, perhaps."""

    def own(self) -> Record | None:
        """What the process that is shown knows of itself, for the top of the screen."""

    @property
    def is_over(self) -> bool:
        """There is nothing more to show, and nobody needs to see the last picture."""


class Feed:
    """Asks a coordinator again and again, in a thread, so that keys are answered while it is slow."""

    is_over = holds = False

    def __init__(self, url: JoinUrl) -> None:
        self._url = url
        self._status: Status | None = None
        self._heard_at = time.monotonic()
        self._error: FarflungError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="status")
        self._thread.start()

    def _run(self) -> None:
        with StatusClient(self._url) as client:
            while not self._stop.is_set():
                try:
                    self._status, self._heard_at = client.fetch(FETCH_S), time.monotonic()
                except (Unreachable, FrameError) as error:  # it may come back
                    self._error = error if self._status is None else None
                except FarflungError as error:
                    self._error = error
                    return
                self._stop.wait(EVERY_S)

    def status(self) -> Status | None:
        if self._error is not None:
            raise self._error
        silent_s = time.monotonic() - self._heard_at
        if self._status is None or silent_s < EVERY_S + SILENT_S:
            return self._status
        return self._status | {"unanswered_s": silent_s}

    def on_key(self, key: str) -> None:
        pass

    def own(self) -> Record | None:
        return None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(FETCH_S + 1)


class Screen:
    """Shows one status after the other, without keys: a terminal gets the dashboard, anything else gets lines."""

    def __init__(self) -> None:
        self._terminal = Terminal(reads_keys=False) if sys.stdout.isatty() else None
        self._last_line_at = -PLAIN_EVERY_S
        self._last_news: tuple[object, ...] = ()

    def __enter__(self) -> Screen:
        if self._terminal is not None:
            self._terminal.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            self._terminal.__exit__(None, None, None)

    def show(self, status: Status) -> None:
        if self._terminal is not None:
            self._terminal.draw(render(status, *self._terminal.size, View(has_keys=False)))
            return
        alive = sum(1 for m in status.get("members", []) if m.get("alive"))
        news = (status.get("version"), alive, status.get("phase") == RunPhase.FINISHED)
        if news != self._last_news or time.monotonic() - self._last_line_at >= PLAIN_EVERY_S:
            self._last_news, self._last_line_at = news, time.monotonic()
            print(plain_line(status), flush=True)


def interact(source: StatusSource) -> Status | None:
    """The screen with keys, until the person or the source ends it; returns what was shown last."""
    view, shown, drawn_at = View(), None, 0.0
    with Terminal(reads_keys=True) as terminal:
        while not view.quit and not source.is_over:
            before = shown
            keys = terminal.keys(FRAME_S)
            for key in keys:
                if key != "p" or not source.holds:
                    view = view.on_key(key, shown or {})
                source.on_key(key)
            found = source.status()
            if found is not None and not (view.paused and shown is not None):
                shown = found
            if not keys and shown is before and time.monotonic() - drawn_at < SAME_S:
                continue  # a picture costs some milliseconds, and nothing is new
            drawn_at = time.monotonic()
            waiting = {"unasked": True, "reason": "asking the coordinator"}
            terminal.draw(render(shown or waiting, *terminal.size, view, source.own()))
    return shown


def watch(url: JoinUrl) -> None:
    """Until the run is finished and the person has seen it; plain lines where the output is no terminal."""
    if not has_terminal(sys.stdout):
        with StatusClient(url) as client, Screen() as screen:
            screen.show(client.fetch(FETCH_S))
            follow(client, screen.show)
        return
    feed = Feed(url)
    try:
        last = interact(feed)
    finally:
        feed.close()
    if last is not None:
        print(plain_line(last))


def follow(client: StatusClient, show: Callable[[Status], None]) -> None:
    """Until the run is finished or the user stops looking.  A coordinator that is away may come back."""
    while True:
        time.sleep(EVERY_S)
        try:
            status = client.fetch(FETCH_S)
        except Unreachable as error:
            print(f"farflung: {error}; still looking", file=sys.stderr, flush=True)
            continue
        show(status)
        if status.get("phase") == RunPhase.FINISHED:
            return


# ---- one frame -------------------------------------------------------------------------------------------


def print_frame(status: Record) -> None:
    console = Console()
    height = console.height - 1 if console.is_terminal else FRAME_LINES
    console.print(render(status, console.width, height))


def save_svg(status: Record, path: Path, size: tuple[int, int] = (100, 30)) -> None:
    """The frame as a picture, for a page or a report.  `size`: columns and lines."""
    width, height = size
    console = Console(width=width, height=height, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render(status, width, height))
    try:
        path.write_text(console.export_svg(title="farflung status --watch"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {path}: cannot write: {error.strerror}") from error
