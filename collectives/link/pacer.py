"""Pacing: when bytes may pass, so that a rate is kept.  Pure.

Owned by the data plane, one for each direction.  Must not know who set the rate, or what passes.
"""

from __future__ import annotations

import math


class Pacer:
    """Says when bytes may pass, so that a rate is kept.  One for each direction.

    Bytes may pass as soon as all bytes before them would have passed at the rate.  A chunk of any size goes out
    whole when its time has come, and what comes after it waits.  After a pause, or for a caller that comes late, at
    most BURST_S worth of bytes is made up for.
    """

    BURST_S = 0.05

    def __init__(self, bytes_per_s: float | None) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        # All bytes taken so far have passed at _since + _taken_bytes / rate.  Whole bytes are counted, so that
        # millions of small additions to a large time do not add up their rounding.
        self._since = -math.inf
        self._taken_bytes = 0

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    def set_rate(self, now: float, bytes_per_s: float | None) -> None:
        """From now on; what was let through beforehand and is still owed is paid off at the new rate."""
        assert bytes_per_s is None or bytes_per_s > 0
        if bytes_per_s == self._bytes_per_s:
            return
        free_at = self._free_at()
        if self._bytes_per_s is not None and free_at > now:
            self._since, self._taken_bytes = now, math.ceil((free_at - now) * self._bytes_per_s)
        else:
            self._since, self._taken_bytes = free_at, 0
        self._bytes_per_s = bytes_per_s

    def wait_s(self, now: float) -> float:
        """How long until something may pass; takes nothing."""
        return max(0.0, self._free_at() - now)

    def take(self, now: float, moved_bytes: int) -> float:
        """Seconds to wait before these bytes may pass.  They count as passed: the caller lets them pass then."""
        free_at = self._free_at()
        if free_at < now - self.BURST_S:
            self._since, self._taken_bytes = now - self.BURST_S, 0
        self._taken_bytes += moved_bytes
        return max(0.0, free_at - now)

    def _free_at(self) -> float:
        if self._bytes_per_s is None:
            return -math.inf
        return self._since + self._taken_bytes / self._bytes_per_s


# ---- courtesy: a line whose queue stays short for everybody else in the house -------------------------
#
# A home router keeps a second of data in its queue before it drops any, and many TCPs fill it: then a beat
# waits for a second as well, and so does the family's call. A beat that takes much longer than the quickest
# one shows a queue, so the pace falls below what the line was carrying, the queue drains, and the pace
# feels its way up again.
# Only the way there counts: what fills the way back is not what this peer sends. It is measured on two
# clocks, so only differences tell. The queue may be of other people in the house, and then a slower pace
# would help nobody: it never falls below a part of what the line is known to carry.


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
        """The coordinator that answers from now on may have another clock."""
        self._quickest = self._quickest_before = float("inf")

    def _remember(self, now: float, there: float) -> None:
        if now - self._quickest_since > QUICKEST_KEPT_S:
            self._quickest_before, self._quickest, self._quickest_since = self._quickest, there, now
        self._quickest = min(self._quickest, there)
