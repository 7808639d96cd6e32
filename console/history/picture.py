"""A small writer of SVG: boxes, lines and words on a sheet, and axes with round numbers;
and the drawn picture as a file.

Called by plots.py and by `farflung export`.  Every text is escaped.  Colours are told apart by people who see few
(Okabe and Ito's), and no chart rests on colour alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from farflung.protocol.errors import UserError

BLUE, ORANGE, GREEN, PINK, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#999999"
INK, PALE = "#222222", "#DDDDDD"
FONTS = "Arial, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"  # by name: not every program knows the last one


class Sheet:
    """What is drawn, in order; coordinates in pixels from the top left."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> None:
        told = f"<title>{escape(hint)}</title>" if hint else ""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{max(height, 0.8):.1f}"'
        self._parts.append(f'<rect {size} fill="{fill}">{told}</rect>')

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.5, dashes: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashed}/>'
        )

    def words(
        self, x: float, y: float, text: str, size: int = 11, anchor: str = "start", fill: str = INK
    ) -> None:
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
        self._parts.append(f"<text {where}>{escape(text)}</text>")

    def text(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
        style = f'width="{self.width}" height="{self.height}" font-family="{FONTS}"'
        ground = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        return "\n".join([f"{head} {style}>", ground, *self._parts, "</svg>", ""])


def round_steps(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers between the two, about so many."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= wanted)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


class Chart:
    """A part of a sheet with axes: `at(x, y)` is where a value stands."""

    def __init__(
        self, sheet: Sheet, box: tuple[float, float, float, float], x_range: tuple[float, float],
        y_range: tuple[float, float], title: str,
    ) -> None:  # fmt: skip
        self.sheet = sheet
        self.left, self.top, self.width, self.height = box
        self._x, self._y = x_range, y_range
        sheet.words(self.left, self.top - 8, title, 13)
        sheet.line([(self.left, self.bottom), (self.left + self.width, self.bottom)], PALE)

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def at(self, x: float, y: float) -> tuple[float, float]:
        along = (x - self._x[0]) / ((self._x[1] - self._x[0]) or 1.0)
        up = (y - self._y[0]) / ((self._y[1] - self._y[0]) or 1.0)
        return self.left + along * self.width, self.bottom - up * self.height

    def y_axis(self, label: str, unit: str = "") -> None:
        for value in round_steps(*self._y):
            _, y = self.at(self._x[0], value)
            self.sheet.line([(self.left, y), (self.left + self.width, y)], PALE, 0.5)
            self.sheet.words(self.left - 6, y + 4, f"{value:g}{unit}", 10, "end")
        self.sheet.words(self.left + self.width, self.top - 8, label, 10, "end", GREY)

    def x_axis(self, label: str) -> None:
        for value in round_steps(*self._x, wanted=8):
            x, _ = self.at(value, self._y[0])
            self.sheet.words(x, self.bottom + 13, f"{value:g}", 10, "middle")
        self.sheet.words(self.left + self.width, self.bottom + 26, label, 10, "end", GREY)


# ---- a picture as a file ------------------------------------------------------------------------------
#
# PNG is made by resvg, an optional package of one file and 1.4 MB without dependencies, which draws exactly
# what browsers draw. matplotlib or cairo would bring ten to fifty times as much, and a second way to draw.


SHARPNESS = 2  # pixels of the PNG for each of the drawing


def refuse_other_names(path: Path) -> None:
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{path}: a picture's name ends with .svg or .png")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path}: there is no such folder")


def write_picture(drawn: str, path: Path) -> None:
    refuse_other_names(path)
    content = drawn.encode() if path.suffix.lower() == ".svg" else _png(drawn)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"{path}: cannot write: {error.strerror}") from error


def _png(drawn: str) -> bytes:
    try:
        resvg: Any = importlib.import_module("resvg_py")
    except ImportError as error:
        raise UserError(
            f"PNG needs the package resvg-py: pip install resvg-py; or a name with .svg   ({error})"
        ) from error
    empty, words = Sheet(40, 20), Sheet(40, 20)
    words.words(5, 15, "words")
    if resvg.svg_to_bytes(svg_string=words.text()) == resvg.svg_to_bytes(svg_string=empty.text()):
        raise UserError(
            "PNG needs a font, and none that is known is installed (apt install fonts-dejavu-core); or a name with .svg"
        )
    return bytes(resvg.svg_to_bytes(svg_string=drawn, zoom=SHARPNESS))
