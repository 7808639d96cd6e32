"""The loss of a run from its first version to its newest, in a bounded number of points.  Part of the ledger.  Pure.

The ledger adds each commit's loss; the status tells it.  As the run grows, neighbours become one point with their
mean, so a curve of a million rounds is as small as one of two hundred, and has its first descent still.  A mean, and
not every second loss: a round's loss is that of few samples, and a curve of some of them would be as rough as all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
