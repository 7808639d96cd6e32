"""Draws the status of a run again and again: the loop behind `status --watch`, the demo, and the screens of `join` and
`coordinate`.

The picture itself is dashboard.py's; this module knows the time between two frames, and where statuses come from.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console, RenderableType

from farflung.console.screen.dashboard import render
from farflung.console.screen.health import plain_line
from farflung.console.screen.status_client import StatusClient
from farflung.console.screen.text import CONTINUES, Record
from farflung.console.screen.view import View
from farflung.protocol.errors import FarflungError, FrameError, Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.states import RunPhase

# ---- terminal ----------------------------------------------------------------------------------------------
# The terminal as a canvas and a keyboard: frames without flicker, keys without Enter.
#
# Must not know what is drawn. Only lines that differ from the last frame are sent, so a
# slow ssh line keeps up. Textual would bring widgets, an event loop and a dozen packages; one picture and ten
# keys need none of that, and `join` shows the same picture without a second event loop.

_KEYS = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left",
    "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\x1bOH": "home", "\x1bOF": "end",
    "\r": "enter", "\n": "enter", "\x1b": "esc", "\x03": "ctrl-c",
}  # fmt: skip
_LONGEST = max(map(len, _KEYS))
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the other screen, no cursor, empty
_LEAVE = "\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # terminals that know it show the frame at once; others ignore it


def keys_of(typed: str) -> list[str]:
    """The names of the keys behind what a terminal sent; an unknown sequence is no key."""
    found = []
    while typed:
        known = next((n for n in range(min(_LONGEST, len(typed)), 0, -1) if typed[:n] in _KEYS), 0)
        # A sequence of another key: passed over up to its last letter.
        if typed.startswith("\x1b[") and known <= 1:
            known = next((n + 1 for n, c in enumerate(typed) if n > 1 and "@" <= c <= "~"), len(typed))
        elif known:
            found.append(_KEYS[typed[:known]])
        elif typed[0].isprintable():
            found.append(typed[0])
        typed = typed[max(1, known) :]
    return found


def has_terminal(*streams: TextIO) -> bool:
    """A person sees these streams, and this process may use the terminal: it does not run in the background."""
    if not all(stream.isatty() for stream in streams):
        return False
    try:
        return os.tcgetpgrp(streams[0].fileno()) == os.getpgrp()
    except OSError:  # a terminal, but not this session's
        return False


class Terminal:
    """Use as a context manager.  The screen of before comes back at the end, also after an error."""

    def __init__(self, reads_keys: bool) -> None:
        self._console = Console()
        self._keyboard = sys.stdin.fileno() if reads_keys and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._drawn: list[str] = []
        self._size = (0, 0)

    def __enter__(self) -> Terminal:
        if self._keyboard is not None:
            self._before = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)  # Ctrl-C still comes as a signal
        self._send(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone needs nothing put back
            self._send(_LEAVE)
            if self._keyboard is not None and self._before is not None:
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._before)

    @property
    def size(self) -> tuple[int, int]:
        return self._console.width, self._console.height

    def draw(self, picture: RenderableType) -> None:
        width, height = self.size
        if self._size != (width, height):
            self._size, self._drawn = (width, height), []
            self._send("\x1b[2J")
        lines = self._as_lines(picture, width)[:height]
        lines += [""] * (height - len(lines))
        old: list[str | None] = [*self._drawn] or [None] * height
        changed = [
            f"\x1b[{row};1H{line}\x1b[K"
            for row, (line, before) in enumerate(zip(lines, old, strict=True), 1)
            if line != before and line != CONTINUES
        ]
        if changed:
            self._send(_BEGIN + "".join(changed) + _END)
        self._drawn = lines

    def _as_lines(self, picture: RenderableType, width: int) -> list[str]:
        paper = io.StringIO()
        colours = self._console.color_system
        pen = Console(
            file=paper, force_terminal=True, width=width, height=10_000, color_system=colours,  # type: ignore[arg-type]
            no_color=self._console.no_color, legacy_windows=False,
        )  # fmt: skip
        pen.print(picture, crop=False)
        # The last line of a screen that ends with a line break would scroll it.
        return paper.getvalue().rstrip("\n").split("\n")

    def keys(self, wait_s: float) -> list[str]:
        """The keys that were pressed, after at most so long."""
        if self._keyboard is None:
            select.select([], [], [], wait_s)
            return []
        ready, _, _ = select.select([self._keyboard], [], [], wait_s)
        if not ready:
            return []
        typed = os.read(self._keyboard, 1024)
        return keys_of(typed.decode("utf-8", "replace")) if typed else ["q"]  # its other end is closed

    def _send(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


# ---- live --------------------------------------------------------------------------------------------------

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
