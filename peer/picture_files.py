"""Writes a drawn SVG into a file: as it is, or as PNG.

Called by `farflung plot`.  PNG is made by resvg, an optional package of one file and 1.4 MB without dependencies, which
draws exactly what browsers draw.  matplotlib or cairo would bring ten to fifty times as much, and a second way to draw.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from farflung.collectives.errors import UserError
from farflung.peer.svg import Sheet

SHARPNESS = 2  # pixels of the PNG for each of the drawing


def write_picture(drawn: str, path: Path) -> None:
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UserError(f"--out {path}: a picture's name ends with .svg or .png")
    content = drawn.encode() if kind == ".svg" else _png(drawn)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(f"--out {path}: cannot write: {error.strerror}") from error


def _png(drawn: str) -> bytes:
    try:
        resvg: Any = importlib.import_module("resvg_py")
    except ImportError as error:
        raise UserError(
            f"PNG needs the package resvg-py: pip install resvg-py; or --out with .svg   ({error})"
        ) from error
    empty, words = Sheet(40, 20), Sheet(40, 20)
    words.words(5, 15, "words")
    if resvg.svg_to_bytes(svg_string=words.text()) == resvg.svg_to_bytes(svg_string=empty.text()):
        raise UserError(
            "PNG needs a font, and none that is known is installed (apt install fonts-dejavu-core); or --out with .svg"
        )
    return bytes(resvg.svg_to_bytes(svg_string=drawn, zoom=SHARPNESS))
