"""The curve of a run's loss as a drawing that stretches with the page, and its axes as text beside it.  Pure.

Called by page.py.  The drawing holds lines alone and is stretched to any width; what is read stands outside of it in
HTML, so that it is as large on a phone as elsewhere.  Colours are the style sheet's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 1000, 240
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LINES = 4  # horizontal ones, about


class Axis(NamedTuple):
    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        return [self.low + n * self.step for n in range(round((self.high - self.low) / self.step) + 1)]


def axis_of(low: float, high: float) -> Axis:
    """Around the two, from one round number to another, with round steps between."""
    span = max(high - low, abs(high) * 1e-3, 1e-6)
    power = 10.0 ** math.floor(math.log10(span / _LINES))
    step = next(power * factor for factor in _STEPS if span / (power * factor) <= _LINES)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, max(last, first + 1) * step, step)


def loss_words(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def summary(curve: Curve) -> str:
    """What the drawing shows, for whoever does not see it."""
    if not curve:
        return "No round is committed yet."
    (first, began), (last, now) = curve[0], curve[-1]
    if first == last:
        return f"{loss_words(now)} at round {last:,.0f}."
    lowest_at, lowest = min(curve, key=lambda point: point[1])
    told = f"From {loss_words(began)} at round {first:,.0f} to {loss_words(now)} at round {last:,.0f}"
    return f"{told}; the lowest was {loss_words(lowest)}, at round {lowest_at:,.0f}."


def chart(curve: Curve) -> str:
    """The drawing and what it shows in words; words alone where there is nothing to draw."""
    says = f'<p class="dim" id="curve-says">{escape(summary(curve))}</p>'
    if len(curve) < 2:
        return f'{says}<p class="empty">The curve begins with the second round.</p>'
    losses = [loss for _, loss in curve]
    axis = axis_of(min(losses), max(losses))
    first, last = curve[0][0], curve[-1][0]
    points = [_point(each, axis, first, last) for each in curve]
    rungs = "".join(
        f'<path class="rung" d="M0 {y:.1f}H{WIDTH}"/>' for y in (_height(tick, axis) for tick in axis.ticks)
    )
    line = "L".join(points)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-labelledby="curve-says">'
        f"{rungs}"
        f'<path class="under" d="M{line}V{HEIGHT}H0Z"/><path class="curve" d="M{line}"/></svg>'
    )
    rows = "".join(f"<span>{_tick(tick, axis.step)}</span>" for tick in reversed(axis.ticks))
    columns = "".join(f"<span>{each}</span>" for each in _rounds(first, last))
    return (
        f'{says}<div class="plot"><div class="y" aria-hidden="true">{rows}</div>{drawing}'
        f'<div class="x" aria-hidden="true">{columns}</div></div>'
    )


def _point(each: tuple[float, float], axis: Axis, first: float, last: float) -> str:
    return f"{(each[0] - first) / (last - first) * WIDTH:.1f} {_height(each[1], axis):.1f}"


def _height(loss: float, axis: Axis) -> float:
    return (axis.high - loss) / (axis.high - axis.low) * HEIGHT


def _tick(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += step * 10**decimals % 1 > 1e-6  # steps of 2.5
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"


def _rounds(first: float, last: float) -> list[str]:
    """The begin, the middle and the end of the horizontal axis."""
    middle = [f"{(first + last) / 2:,.0f}"] if last - first >= 4 else []
    return [f"round {first:,.0f}", *middle, f"{last:,.0f}"]
