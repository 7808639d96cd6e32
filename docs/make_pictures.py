"""Draws docs/dashboard.svg from docs/sample_status.json, so that the picture never lags behind the program.

Run by hand after a change to peer/dashboard.py: `python docs/make_pictures.py`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from farflung.peer.dashboard import render

WIDTH, HEIGHT = 100, 30


def draw(sample: Path, picture: Path) -> None:
    """Render the status in `sample` as it would look in a terminal and save it as an SVG."""
    status = json.loads(sample.read_text(encoding="utf-8"))
    console = Console(width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render(status, WIDTH, HEIGHT))
    picture.write_text(console.export_svg(title="farflung watch"), encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).parent
    draw(here / "sample_status.json", here / "dashboard.svg")
