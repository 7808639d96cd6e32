"""When a stream has fallen: then what it still holds goes over another one of the same pair.  Pure.

Streams of TCP share a line unevenly, and one that lost packets at a bad moment crawls for seconds, long after all
others are through.  A round waits for its last chunk, so it waits for that stream.  A new one gains speed within a few
round trips; the old one is cut off, and what it had not brought there goes again.  Twice come only a part of a frame,
and what was flying.

Asked by zmq_link.py, which knows what each stream moved.  Must not know sockets, peers or frames.  A stream that is
slow because the far end is, or because all streams of its line are, has not fallen: no other one would be faster.
"""

from __future__ import annotations

from typing import NamedTuple

SPAN_S = 0.35
FELL_TO = 16  # times slower than is due to it
WORSE = 4  # times slower than the others that have something to carry
GAINS = 2**0.5  # times faster in a round trip: it gains speed by itself, as new ones do, that double theirs
ROUND_TRIPS_MOST = 20  # in a span
WORTH_S = 1.0  # what it holds would take longer
AGAIN_S = 5.0  # not sooner after the last time, of this peer


class Speed:
    """What one stream moved, span by span, while it had something to move all the time."""

    def __init__(self) -> None:
        self.latest: float | None = None  # bytes a second
        self.before: float | None = None
        self._since: float | None = None
        self._bytes = 0

    def feed(self, now: float, moved_bytes: int, is_busy: bool) -> None:
        """`moved_bytes`: since the last call."""
        if not is_busy:
            self.latest = self.before = self._since = None
        elif self._since is None:
            self._since, self._bytes = now, 0
        else:
            self._bytes += moved_bytes
            if now - self._since >= SPAN_S:
                self.before, self.latest = self.latest, self._bytes / (now - self._since)
                self._since, self._bytes = now, 0


class Around(NamedTuple):
    """All streams of a peer's line together."""

    best: float | None  # bytes a second that it has carried
    speeds: float  # of those that are busy, in their last spans
    busy: int  # streams on which something is on its way
    streams: int

    def is_worse(self, stream: float) -> bool:
        """Than the others; where most have nothing left to carry there is nobody to compare it with."""
        others = self.busy - 1
        return 2 * self.busy <= self.streams or self.speeds - stream > WORSE * stream * others


class StalledStreams:
    """Of the streams to one peer."""

    def __init__(self) -> None:
        self._best = 0.0  # bytes a second that the peer took in some span
        self._fell_at = float("-inf")

    def look(self, now: float, stream: Speed, held_bytes: int, around: Around, rtt_s: float | None) -> bool:
        """Whether this stream, with so much that has not arrived, is to be given up."""
        if stream.latest is None:
            return False
        self._best = max(self._best, stream.latest)
        if stream.before is None or not rtt_s or around.best is None or now - self._fell_at < AGAIN_S:
            return False
        due = min(self._best, around.best / max(1, around.busy))
        # Two spans, since bbr stops a stream for half a second now and then, and goes on as before.
        crawls = stream.latest > 0 and max(stream.latest, stream.before) < due / FELL_TO
        gains = stream.latest > stream.before * GAINS ** min(ROUND_TRIPS_MOST, SPAN_S / rtt_s)
        # One that stands still altogether is cut off, or that side does not read: a new one would stand, too.
        worth = held_bytes >= WORTH_S * stream.latest and around.is_worse(stream.latest)
        if not crawls or gains or not worth:
            return False
        self._fell_at = now
        return True
