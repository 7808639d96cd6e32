"""Curves as one picture: what `farflung simulate --plot` and the experiments draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from farflung.console.history.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    Chart,
    Sheet,
    write_picture,
)

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 250, 36, 44
COLOURS = (INK, BLUE, ORANGE, GREEN, PINK, SKY, GREY)
DASHES = ("", "6 3", "2 2")  # the next round of colours: no two lines look alike
Points = Sequence[tuple[float, float]]


def draw(path: Path, title: str, x_name: str, curves: Mapping[str, Points]) -> None:
    """One line for each name, without the first tenth of each curve, which would flatten the rest."""
    shown = {name: list(points[len(points) // 10 :]) for name, points in curves.items() if points}
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    pad = 0.05 * (max(ys) - min(ys)) or 0.5
    sheet = Sheet(WIDTH, HEIGHT)
    box = (LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    chart = Chart(sheet, box, (0.0, max(xs)), (min(ys) - pad, max(ys) + pad), title)
    chart.y_axis("")
    chart.x_axis(x_name)
    for number, (name, points) in enumerate(shown.items()):
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        sheet.line([chart.at(*point) for point in points], colour, 1.6, dashes)
        sheet.words(
            WIDTH - RIGHT + 12, TOP + 6 + 16 * number, f"{name}: {points[-1][1]:.3f}", 12, fill=colour
        )
    write_picture(sheet.text(), path)
