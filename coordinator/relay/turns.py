"""Whose bytes pass next, and how many: a rate for all pairs together, which those that have something to pass share
equally.  Pure.

Asked by relay.py before each read.  What is not read waits in the kernel, and then at its sender: TCP holds it back.
A pair that hogs waits for its turn as the others do; one that sends little gets all that it needs.  Must not know
sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

TURN_BYTES = 256 * 1024  # at most, in one turn: fewer would cost the processor more for each byte
LEAST_TURN_BYTES = 4 * 1024
TURN_S = 0.05  # nor more than passes in so long: with a low rate, turns are small
SAVED_TURNS, SAVED_S = 8, 0.02  # may pass at once after a pause, or when this process woke up late
GATHERED_TURNS = 4  # are waited for together: to wake up costs more than to pass a turn


class RelayTurn(NamedTuple):
    pair: bytes
    most_bytes: int


class Turns:
    def __init__(self, bytes_per_s: float, now: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._turn_bytes = int(min(TURN_BYTES, max(LEAST_TURN_BYTES, TURN_S * bytes_per_s)))
        self._saved_most = max(float(SAVED_TURNS * self._turn_bytes), SAVED_S * bytes_per_s)
        self._left = self._saved_most
        self._filled_at = now
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # -> what it has left of its turn

    def __len__(self) -> int:
        return len(self._waiting)

    def wants(self, pair: bytes) -> None:
        """It has something to pass, and keeps its place."""
        self._waiting.setdefault(pair, self._turn_bytes)

    def rests(self, pair: bytes) -> None:
        """It has nothing more for now, or nobody takes it: the next time it comes last."""
        self._waiting.pop(pair, None)

    def next(self, now: float) -> RelayTurn | None:
        """None: nobody waits, or nothing may pass yet (`wait_s`)."""
        self._fill(now)
        pair = next(iter(self._waiting), None)
        if pair is None:
            return None
        due = self._waiting[pair]
        return RelayTurn(pair, due) if self._left >= due else None

    def took(self, pair: bytes, size: int) -> None:
        self._left -= size
        left = self._waiting.get(pair)
        if left is None:
            return
        if left - size > LEAST_TURN_BYTES:
            self._waiting[pair] = left - size
        else:
            self._waiting[pair] = self._turn_bytes
            self._waiting.move_to_end(pair)

    def wait_s(self, now: float) -> float | None:
        """Until something may pass; None: nobody waits."""
        pair = next(iter(self._waiting), None)
        if pair is None:
            return None
        self._fill(now)
        if self._left >= self._waiting[pair]:
            return 0.0
        return (GATHERED_TURNS * self._turn_bytes - self._left) / self.bytes_per_s

    def _fill(self, now: float) -> None:
        self._left = min(self._saved_most, self._left + (now - self._filled_at) * self.bytes_per_s)
        self._filled_at = now
