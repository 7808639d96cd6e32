"""When the next round will probably begin: after a pause like one of the last ones.  Pure.

Owned by serving.py, which gives nothing large away just before: what a socket has taken can't be called back, and would
share the line with the round's first seconds.  Must not know why rounds begin, nor what is given.
"""

from __future__ import annotations

from collections import deque

PAUSES_KEPT = 3  # fragments' rounds come in turns, with pauses of different lengths
LATE_PART, LATE_MOST_S = 0.1, 5.0  # a round that is later than that is not waited for
LEAD_PART = 0.5  # of a pause at most: short pauses are used as well


class NextRound:
    def __init__(self) -> None:
        self._pauses_s: deque[float] = deque(maxlen=PAUSES_KEPT)
        self._ended_at: float | None = None
        self._in_round = False

    def look(self, in_round: bool, now: float) -> None:
        """At every turn of the agent's loop."""
        if in_round == self._in_round:
            return
        self._in_round = in_round
        if not in_round:
            self._ended_at = now
        elif self._ended_at is not None:
            self._pauses_s.append(now - self._ended_at)

    def is_near(self, lead_s: float, now: float) -> bool:
        """May it begin within `lead_s`, or is it just late?"""
        if self._in_round or self._ended_at is None:
            return False
        paused_s = now - self._ended_at
        return any(
            -min(lead_s, LEAD_PART * usual_s) <= paused_s - usual_s <= min(LATE_MOST_S, LATE_PART * usual_s)
            for usual_s in self._pauses_s
        )
