"""How many connections one line between two peers needs.  Pure; called by the data plane.

One TCP connection has at most a window of bytes on its way, so it moves at most window / round-trip time.  Where a
line that always has something to send moves about that much, the window is what holds it back, and another
connection helps.  Where it moves less, the line itself is full, and another connection would only make it unfair.
"""

from __future__ import annotations

MOST_CONNECTIONS = 16
# A full window is seen as less: the kernel counts its own overhead into it, and a span holds the slow start.
HELD_BACK_AT = 0.35


def connections_wanted(have: int, line_bytes_per_s: float, rtt_s: float, window_bytes: int) -> int:
    """`line_bytes_per_s`: over a span in which something waited all the time, through all `have` connections."""
    if have < 1:
        return 1
    on_the_way_bytes = line_bytes_per_s / have * rtt_s
    if on_the_way_bytes < HELD_BACK_AT * window_bytes:
        return have
    return min(MOST_CONNECTIONS, 2 * have)
