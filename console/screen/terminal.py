"""The terminal as a canvas and a keyboard: frames without flicker, keys without Enter.

Called by live.py.  Must not know what is drawn.  Only lines that differ from the last frame are sent, so a slow ssh
line keeps up.  Textual would bring widgets, an event loop and a dozen packages; one picture and ten keys need none
of that, and `join` shows the same picture without a second event loop.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType

from farflung.console.screen.text import CONTINUES

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
