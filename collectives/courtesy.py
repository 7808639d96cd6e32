"""Courtesy: how fast bulk may be sent so that the line's queue stays short for everybody else in the house.  Pure.

Owns: the pace, from what the way to the coordinator takes while this peer sends.  Called by the data line, which keeps
the pace.  Must not know: sockets, who is asked, limits that people set.

A home router keeps a second of data in its queue before it drops any, and many TCPs fill it: then a beat waits for a
second as well, and so does the family's call.  A beat that takes much longer than the quickest one shows a queue,
so the pace falls below what the line was carrying, the queue drains, and the pace feels its way up again.

Only the way there counts: what fills the way back is not what this peer sends.  It is measured on two clocks, so only
differences tell.  The queue may be of other people in the house, and then a slower pace would help nobody: it never
falls below a part of what the line is known to carry.
"""

from __future__ import annotations

QUEUED_S = 0.12  # longer than the quickest: this is a queue and no chance
SLOWER, FASTER_PER_S = 0.85, 1.15
LEAST_PART = 0.5  # of what the line is known to carry
FREE_ABOVE = 2.0  # times that: no pace is needed
QUICKEST_KEPT_S = 300.0  # the way to the coordinator may change, and two clocks drift apart


class Courtesy:
    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # the pace; None: as fast as it goes
        self._quickest = self._quickest_before = float("inf")
        self._quickest_since = 0.0
        self._slowed_at = self._looked_at = float("-inf")

    def on_answer(self, now: float, took_s: float, there: float, line: float | None) -> None:
        """An answer of the coordinator came after `took_s`; `there`: seconds of the way there, from any beginning.

        `line`: bytes per second that the line is known to carry; None while that is not known or nothing has to leave.
        """
        self._remember(now, there)
        since_s, self._looked_at = min(1.0, now - self._looked_at), now
        if line is None:
            return
        queued_s = there - min(self._quickest, self._quickest_before)
        if queued_s > QUEUED_S:
            # What is queued must drain before an answer can tell of the new pace.
            if now - self._slowed_at > took_s + 2 * queued_s:
                self._slowed_at = now
                before = line if self.bytes_per_s is None else min(line, self.bytes_per_s)
                self.bytes_per_s = max(LEAST_PART * line, SLOWER * before)
        elif self.bytes_per_s is not None:
            self.bytes_per_s *= FASTER_PER_S**since_s
            if self.bytes_per_s > FREE_ABOVE * line:
                self.bytes_per_s = None

    def forget_way(self) -> None:
        """Whoever answers from now on may have another clock."""
        self._quickest = self._quickest_before = float("inf")

    def _remember(self, now: float, there: float) -> None:
        if now - self._quickest_since > QUICKEST_KEPT_S:
            self._quickest_before, self._quickest, self._quickest_since = self._quickest, there, now
        self._quickest = min(self._quickest, there)
