"""Plays a finished run on the dashboard: a recording, a time that moves, keys that move it.

Called by `farflung status --replay DIR`.  What happened is recorded_run.py's.
"""

from __future__ import annotations

import time

from farflung.console.history.recorded_run import RecordedStatus, Recording, Status
from farflung.console.screen.text import Record
from farflung.protocol.caps import duration

_KEYS = "←→ Home End move, + - speed, p pause, q quit"
STEP = 0.01  # of the whole, for a press of left or right
FASTEST, FIRST, SLOWEST = 1024.0, 10.0, 0.125


class Replay:
    """A source for the screen.  `speed`: seconds of the run for each second here."""

    holds = True  # it does its own pausing: time can be moved while it stands still
    is_over = False

    def __init__(self, recording: Recording, speed: float = FIRST) -> None:
        self.at_s = 0.0
        self._recording = recording
        self._speed = speed
        self._paused = False
        self._looked_at = time.monotonic()
        self._story, self._told = RecordedStatus(recording), 0

    def status(self) -> Status:
        now = time.monotonic()
        if not self._paused:
            self.at_s = min(self._recording.seconds, self.at_s + self._speed * (now - self._looked_at))
        self._looked_at = now
        return self.status_at(self.at_s)

    def status_at(self, at_s: float) -> Status:
        moments = self._recording.moments
        if self._told and moments[self._told - 1].at_s > at_s:
            self._story, self._told = (
                RecordedStatus(self._recording),
                0,
            )  # back in time: told again from the beginning
        while self._told < len(moments) and moments[self._told].at_s <= at_s:
            self._story.tell(moments[self._told])
            self._told += 1
        return self._story.status(at_s)

    def on_key(self, key: str) -> None:
        whole = self._recording.seconds
        moves = {"left": -STEP * whole, "right": STEP * whole, "home": -whole, "end": whole}
        if key in moves:
            self.at_s = min(whole, max(0.0, self.at_s + moves[key]))
        elif key in ("+", "="):
            self._speed = min(FASTEST, 2 * self._speed)
        elif key == "-":
            self._speed = max(SLOWEST, self._speed / 2)
        elif key == "p":
            self._paused = not self._paused

    def own(self) -> Record:
        whole = self._recording.seconds
        pace = "PAUSED" if self._paused else f"{self._speed:g} x"
        return {
            "title": "replay",
            "text": f"{duration(self.at_s)} of {duration(whole)}   {pace}   {_KEYS}",
            "slider": self.at_s / whole if whole > 0 else 1.0,
        }
