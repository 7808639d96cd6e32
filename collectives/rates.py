"""How fast a line is, learned from what really moved over it.  Pure; one meter for each direction.

Owns: the estimate.  Called by the agent, which feeds it what left or arrived.
Must not know: sockets, clocks, which peer the bytes were for.

Only time in which bytes were waiting counts: a line that idles tells nothing of what it could carry.  The first
moments of such a time do not count either, since bytes then vanish into buffers faster than any line is, or a
connection has not yet gained its speed.  The rate is bytes over seconds, both fading with the time that the line
was busy, and bytes and time are added together, when something moved: a chunk of 1 MiB that is reported as a whole
after many seconds is no burst.
"""

from __future__ import annotations

SETTLE_S = 0.25  # of each busy time that do not count
HALF_LIFE_S = 10.0  # busy seconds after which an observation counts half
IDLE_HALF_LIFE_S = 1800.0  # the line may be another one after a night
KNOWN_AFTER_S = 1.0  # busy seconds until there is an estimate
KNOWN_AFTER_MOVES = 3
PROBE_COUNTS_S = 2.0  # a short probe counts as much as so many busy seconds


class RateMeter:
    """The sustainable rate of one direction of a line."""

    def __init__(self) -> None:
        self._fed_at: float | None = None
        self._busy_s = 0.0  # both fade
        self._busy_bytes = 0.0
        self._observed_s = 0.0  # does not fade
        self._moves = 0
        self._probed = False
        self._last_move_bytes = 0
        self._pending_s = 0.0  # busy, but nothing has moved yet
        self._settling_s: float | None = 0.0  # seconds of this busy time so far; None once it has settled

    @property
    def bytes_per_s(self) -> float | None:
        """None until enough was seen."""
        seen = self._observed_s >= KNOWN_AFTER_S and self._moves >= KNOWN_AFTER_MOVES
        if not (seen or self._probed):
            return None
        rate = self._busy_bytes / self._busy_s
        # A line that has gone silent: at best, a move like the last one is just about to be reported.
        at_best = (self._busy_bytes + self._last_move_bytes) / (self._busy_s + self._pending_s)
        return min(rate, at_best)

    def feed(self, now: float, moved_bytes: int, backlog: bool) -> None:
        """`moved_bytes` moved since the last call; `backlog`: more was waiting during all of that time.

        Call it when something has moved, or now and then; for a sender that means sent or acknowledged, not queued.
        """
        span_s = 0.0 if self._fed_at is None else now - self._fed_at
        assert span_s >= 0 and moved_bytes >= 0
        backlog = backlog and self._fed_at is not None
        self._fed_at = now
        if not backlog:
            self._fade(span_s / IDLE_HALF_LIFE_S, least_s=PROBE_COUNTS_S)
            self._pending_s, self._settling_s = 0.0, 0.0
        elif self._settling_s is not None:
            self._settling_s += span_s
            if self._settling_s >= SETTLE_S and moved_bytes:
                self._settling_s = (
                    None  # counting starts with a move, so that none is counted with half its time
                )
        else:
            self._pending_s += span_s
            if moved_bytes:
                self._add_move(moved_bytes)

    def feed_probe(self, moved_bytes: int, took_s: float) -> None:
        """The result of a short test at full speed: gives a first estimate, which real transfers soon outweigh."""
        assert moved_bytes > 0 and took_s > 0
        self._fade(PROBE_COUNTS_S / HALF_LIFE_S)
        self._busy_s += PROBE_COUNTS_S
        self._busy_bytes += PROBE_COUNTS_S * moved_bytes / took_s
        self._probed = True

    def _add_move(self, moved_bytes: int) -> None:
        self._fade(self._pending_s / HALF_LIFE_S)
        self._busy_s += self._pending_s
        self._busy_bytes += moved_bytes
        self._observed_s += self._pending_s
        self._moves += 1
        self._last_move_bytes = moved_bytes
        self._pending_s = 0.0

    def _fade(self, half_lives: float, least_s: float = 0.0) -> None:
        """The estimate stays, its weight falls, though not below `least_s` busy seconds."""
        if self._busy_s > least_s:
            factor = max(0.5**half_lives, least_s / self._busy_s)
            self._busy_s *= factor
            self._busy_bytes *= factor
