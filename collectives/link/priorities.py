"""Which of the frames that wait leaves next: words, then crossings of microbatches, then what is large and can wait.

Asked by zmq_link.py for each frame that it lets go of.  Somebody computes nothing until a crossing is there, while a
round or a joiner takes as long as it takes: so crossings go first, but bulk keeps a quarter of the bytes, or a joiner
would never get in and a round never end.  What a socket has taken can't be called back: while crossings wait, so
little is handed out that the next one finds a short queue, and enough that the line never runs dry.  Where there are
no crossings, in a run of a model in one piece, nothing is held back for them.

Pure.  Must not know sockets, peers, or what a frame is about.
"""

from __future__ import annotations

from enum import IntEnum

from farflung.protocol.frames import Frame, Kind

LITTLE_BYTES = 4096  # of a payload: such a frame makes no queue longer
_OF_LINKS = {Kind.PING, Kind.PONG, Kind.LEAN_ASKED, Kind.LEAN_GRANTED}
URGENT_KINDS = _OF_LINKS | {Kind.LATER, Kind.MISSING, Kind.HAVE}  # as is each crossing
BULK_PART = 4  # one in so many bytes is bulk, at least, while crossings wait too

DEEP_S = 0.2  # of the line's rate may wait in sockets, beside what a round trip has on its way
DEEP_FRAMES = 2  # at least
ROUND_TRIP_S = 0.1  # where none was measured


class Rank(IntEnum):
    WORD = 0  # short, and somebody waits for it
    CROSSING = 1
    BULK = 2


def rank_of(frame: Frame) -> Rank:
    """A ping of many bytes probes the line, and meets what bulk meets."""
    kind = frame.header.kind
    if len(frame.payload) <= LITTLE_BYTES and (kind.crossing or kind in URGENT_KINDS):
        return Rank.WORD
    return Rank.CROSSING if kind.crossing else Rank.BULK


class Sharing:
    """The bytes of one line between crossings and bulk, while both wait."""

    def __init__(self) -> None:
        self._both = False
        self._crossing_bytes = self._bulk_bytes = 0

    def next(self, crossings: bool, bulk: bool) -> Rank:
        """Whose turn it is, of what could leave now: one of the two at least."""
        self._both = crossings and bulk
        if not self._both:
            self._crossing_bytes = self._bulk_bytes = 0  # who was alone owes the other nothing
            return Rank.CROSSING if crossings else Rank.BULK
        due = (BULK_PART - 1) * self._bulk_bytes < self._crossing_bytes
        return Rank.BULK if due else Rank.CROSSING

    def took(self, rank: Rank, size_bytes: int) -> None:
        """What left after `next`; words are too short to count."""
        if self._both and rank == Rank.BULK:
            self._bulk_bytes += size_bytes
        elif self._both and rank == Rank.CROSSING:
            self._crossing_bytes += size_bytes


def has_room(
    waiting_bytes: int, frame_bytes: int, bytes_per_s: float | None, round_trip_s: float | None
) -> bool:
    """May another frame be handed out while crossings wait?  `waiting_bytes`: handed out, and not acknowledged yet."""
    span_s = DEEP_S + (ROUND_TRIP_S if round_trip_s is None else round_trip_s)
    most = max(DEEP_FRAMES * frame_bytes, span_s * (bytes_per_s or 0.0))
    return waiting_bytes + frame_bytes <= most
