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
