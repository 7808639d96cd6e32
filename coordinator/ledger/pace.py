"""How fast things go, for people: each member's figures per second, and the run's time from version to version.

Fed by the guidance with beats and by the drivers with commits; read by the status alone.  Nothing is decided
by it.  Pure.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from farflung.protocol.messages import Beat

SPAN_S = 2.0  # beats come in bursts around a round: shorter spans say nothing
COMMITS_KEPT = 20
TOKENS_SMOOTHED = 0.3
FETCHED_BYTES = 16384


@dataclass
class MemberPace:
    """What one member does per second, from what its beats count."""

    tokens_per_s: float = 0.0
    tx_bytes_per_s: float = 0.0
    rx_bytes_per_s: float = 0.0
    fetched_at: float = -math.inf  # when more than questions and pings had come in
    _fetched: int = 0
    _at: float = 0.0
    _seen: tuple[int, int, int] | None = None

    def on_beat(self, beat: Beat, now: float) -> None:
        counted = (beat.tokens, beat.tx_bytes, beat.rx_bytes)
        if beat.rx_bytes - self._fetched >= FETCHED_BYTES:
            self._fetched, self.fetched_at = beat.rx_bytes, now
        seconds = now - self._at
        if self._seen is not None and seconds < SPAN_S:
            return
        if self._seen is not None:
            tokens, tx, rx = (
                max(0, new - old) / seconds for new, old in zip(counted, self._seen, strict=True)
            )
            self.tokens_per_s += TOKENS_SMOOTHED * (tokens - self.tokens_per_s)
            self.tx_bytes_per_s, self.rx_bytes_per_s = tx, rx
        self._at, self._seen = now, counted


@dataclass
class RunPace:
    """The commits of this coordinator's life, by which the rest of the run is estimated."""

    _commits: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=COMMITS_KEPT))
    _sent_bytes: int = 0  # by all members, at the last commit of any fragment

    def sent_since_commit(self, sent_bytes: int) -> int:
        """`sent_bytes`: by all members, now that some fragment has another commit."""
        before, self._sent_bytes = self._sent_bytes, sent_bytes
        return max(0, sent_bytes - before)

    def on_commit(self, version: int, now: float) -> None:
        if self._commits and version <= self._commits[-1][1]:
            if version == self._commits[-1][1]:
                return  # another fragment's: the run as a whole is no further
            self._commits.clear()  # the run went back
        self._commits.append((now, version))

    def left_s(self, target: int, now: float) -> float | None:
        """Until the run has `target` versions, if it goes on like this; None as long as nothing is known."""
        if len(self._commits) < 2:
            return None
        ended, last = self._commits[-1]
        # The usual time: while nobody was here the run made no version, and that says nothing of its pace.
        usual_s = median((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(self._commits))
        each_s = max(usual_s, (now - ended) / 2)  # a halted run is not nearly done
        return max(0.0, (target - last) * each_s - min(now - ended, each_s))


# The loss of a run from its first version to its newest, in a bounded number of points.  Part of the ledger.  Pure.
#
# The ledger adds each commit's loss; the status tells it.  As the run grows, neighbours become one point with their
# mean, so a curve of a million rounds is as small as one of two hundred, and has its first descent still.  A mean, and
# not every second loss: a round's loss is that of few samples, and a curve of some of them would be as rough as all.

TOLD_DIGITS = 5  # of a loss, for people
# More than a screen shows; even, so that all find a neighbour.
POINTS_MOST = 240


@dataclass(frozen=True)
class Point:
    version: int  # of the newest round in it
    tokens: int  # of the run, then
    loss: float  # the mean of its rounds
    rounds: int = 1


@dataclass
class LossCurve:
    """Kept with the ledger, and made anew by nothing but commits and ways back."""

    points: list[Point] = field(default_factory=list)
    every: int = 1  # rounds in a whole point; the newest one may have fewer

    def add(self, version: int, tokens: int, loss: float | None) -> None:
        """Of a round that was committed; a loss that is no number is no point, and the run goes on without one."""
        if loss is None or not math.isfinite(loss):
            return
        new = Point(version, tokens, loss)
        if self.points and self.points[-1].rounds < self.every:
            self.points[-1] = _joined(self.points[-1], new)
            return
        if len(self.points) >= POINTS_MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_joined(one, other) for one, other in pairs]
            self.every *= 2
        self.points.append(new)

    def told(self) -> list[list[float]]:
        """[version, loss] of each point, as the status has them."""
        return [[point.version, round(point.loss, TOLD_DIGITS)] for point in self.points]

    def forget_after(self, version: int) -> None:
        """The run went back; what a point knows of several rounds goes with the newest of them."""
        self.points = [point for point in self.points if point.version <= version]


def _joined(one: Point, other: Point) -> Point:
    rounds = one.rounds + other.rounds
    # Without a sum of the two: losses that are finite have a finite mean.
    loss = one.loss * (one.rounds / rounds) + other.loss * (other.rounds / rounds)
    return Point(other.version, other.tokens, loss, rounds)
