"""Draws docs/dashboard.svg from docs/sample_status.json, so that the picture never lags behind the program.

Run by hand after a change to peer/dashboard.py: `python docs/make_pictures.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from farflung.peer.live import save_svg

WIDTH, HEIGHT = 100, 30


def draw(sample: Path, picture: Path) -> None:
    """Render the status in `sample` as it would look in a terminal and save it as an SVG."""
    save_svg(json.loads(sample.read_text(encoding="utf-8")), picture, (WIDTH, HEIGHT), "farflung watch")


if __name__ == "__main__":
    here = Path(__file__).parent
    draw(here / "sample_status.json", here / "dashboard.svg")
