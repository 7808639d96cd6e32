"""Curves as an SVG file, without any library: what the experiments draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 250, 36, 44
COLORS = ("#222222", "#1f6fb2", "#d1622b", "#2f8f4e", "#8a4fa3", "#b89b1d", "#c23b5a", "#4f9fa3")
Points = Sequence[tuple[float, float]]


def draw(path: Path, title: str, x_name: str, y_name: str, curves: Mapping[str, Points]) -> None:
    """One line for each name, without the first tenth of each curve, which would flatten the rest."""
    shown = {name: list(points[len(points) // 10 :]) for name, points in curves.items() if points}
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    (x_low, x_high), (y_low, y_high) = (0.0, max(xs)), (min(ys), max(ys))
    pad = 0.05 * (y_high - y_low or 1.0)
    y_low, y_high = y_low - pad, y_high + pad

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low or 1.0)
        up = (y - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 20, title, weight="bold"),
        _text(LEFT, HEIGHT - 8, x_name),
        _text(6, TOP - 8, y_name),
    ]
    for y in ticks(y_low, y_high):
        (x1, row), (x2, _) = at(x_low, y), at(x_high, y)
        parts.append(f'<line x1="{x1:.1f}" y1="{row:.1f}" x2="{x2:.1f}" y2="{row:.1f}" stroke="#dddddd"/>')
        parts.append(_text(8, row + 4, f"{y:g}"))
    for x in ticks(x_low, x_high):
        parts.append(_text(at(x, y_low)[0] - 8, HEIGHT - BOTTOM + 16, f"{x:g}"))
    for number, (name, points) in enumerate(shown.items()):
        color = COLORS[number % len(COLORS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 16 * number, f"{name}: {points[-1][1]:.3f}", fill=color))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, about five of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [round(step * n, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, fill: str = "#222222", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-weight="{weight}">{escape(text)}</text>'
