"""The small pieces of a screen: numbers, times, bars and curves as text, and safe ways to read a status.

Called by everything that draws.  Must not know what a run is.  A status comes from elsewhere: keys may be missing or
odd, and every text in it is stripped of control characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from farflung.protocol.caps import si

Record = Mapping[str, object]

CONTINUES = "\u200b"  # a row that the row above flows into, so that it is copied as one line

_BLOCKS = "▁▂▃▄▅▆▇█"


# ---- values of a status that nobody promised to be right -------------------------------------------------


def clean(value: object, limit: int = 200) -> str:
    """Text from elsewhere, without control characters, direction marks and stacked accents."""
    text = "" if value is None else str(value)[:limit]
    return "".join(c for c in text if c == " " or unicodedata.category(c)[0] not in "CMZ")


def records(record: Record, key: str) -> list[Record]:
    value = record.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def known(record: Record, key: str) -> float | None:
    value = record.get(key)
    # The bound also keeps out infinity and what is not a number.
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else None


def number(record: Record, key: str) -> float:
    return known(record, key) or 0.0


def fraction(record: Record, key: str) -> float | None:
    value = known(record, key)
    return None if value is None else min(max(value, 0.0), 1.0)


# ---- numbers as text -------------------------------------------------------------------------------------


def count(record: Record, key: str) -> str:
    value = number(record, key)
    return f"{value:.0f}" if abs(value) < 99_999 else si(value)


def loss_of(record: Record) -> str:
    value = known(record, "loss")
    return "-" if value is None else f"{value:.3f}" if abs(value) < 99 else si(value)


def held_out_words(status: Record) -> str:
    """Behind a loss: that of text that nobody learns from, at the newest version of which that is known."""
    told = status.get("held_out")
    if not isinstance(told, dict) or "version" not in told:
        return ""
    loss = "contested" if known(told, "loss") is None else loss_of(told)
    return f", held out {loss} at {count(told, 'version')}"


# ---- pictures --------------------------------------------------------------------------------------------


def sparkline(values: Sequence[float]) -> str:
    """One block per finite value, from the lowest to the highest."""
    low = min(values, default=0.0)
    span = max(values, default=0.0) - low
    return "".join(_BLOCKS[int((value - low) / span * 7.99) if span > 0 else 3] for value in values)


def bar(share: float, cells: int) -> Text:
    """Full and empty cells differ in shape, so that no colour is needed to read them."""
    full = round(min(max(share, 0.0), 1.0) * cells)
    return Text.assemble(("█" * full, "blue"), ("░" * (cells - full), "dim"))


def cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(max(0, width), overflow="ellipsis")
    return text


def panel(lines: Sequence[Text], title: str, width: int, height: int | None = None) -> Panel:
    shown = list(lines) if height is None else list(lines)[: height - 2]
    return Panel(
        Group(*(cut(line, width - 4) for line in shown)),
        title=cut(Text(title), width - 6),
        title_align="left",
        border_style="blue",
        width=width,
        height=height,
    )
