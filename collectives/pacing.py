"""A pacer: how long until the next bytes may go.  Pure; one for each direction of the data plane.

Owned by the peer's agent, which sets the rate (caps.py says which); asked by zmq_link.py before each frame.

It keeps a debt.  A frame goes when all before it is paid, whatever its size, and its own bytes are paid off at the
rate; so the mean is exact for any size of frame, and nothing but one frame ever comes early.
"""

from __future__ import annotations


class Pacer:
    def __init__(self, bytes_per_s: float | None = None) -> None:
        """None: no limit."""
        self.bytes_per_s = bytes_per_s
        self._paid_at = 0.0  # when all that was spent so far is paid

    def set_rate(self, bytes_per_s: float | None, now: float) -> None:
        debt = max(0.0, self._paid_at - now) * (self.bytes_per_s or 0.0)
        self.bytes_per_s = bytes_per_s
        self._paid_at = now + debt / bytes_per_s if bytes_per_s else now

    def wait_s(self, now: float) -> float:
        return max(0.0, self._paid_at - now) if self.bytes_per_s is not None else 0.0

    def spend(self, now: float, count: int) -> None:
        if self.bytes_per_s is not None and count:
            self._paid_at = max(now, self._paid_at) + count / self.bytes_per_s
