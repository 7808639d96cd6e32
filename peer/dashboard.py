"""Owns how a run looks: from one status dictionary to a screen of at most the given size, or to one line.

Called by `farflung watch`, `farflung demo` and docs/make_pictures.py, several times a second.
Must not know clocks, terminals or sockets.  The status comes from elsewhere: keys may be missing or odd, and
every text in it is stripped of control characters and shown as is, never read as markup.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Record = Mapping[str, object]

# Colour only repeats what the words say.
_STATE_STYLES = {"inner": "cyan", "ready": "bright_blue", "left": "dim"}
_STATE_STYLES |= dict.fromkeys(("joining", "syncing"), "yellow")
_STATE_STYLES |= dict.fromkeys(("lost", "quarantined"), "bold red")
_BLOCKS = "▁▂▃▄▅▆▇█"
_ONE_ROW = 110  # from this width on, the bars share a line, and recent rounds stand beside events
_SMALLEST = (60, 13)  # below, there is one line only


class _Column(NamedTuple):
    """A column of the peers table.  Those of the highest rank are dropped first; rank 0 stays."""

    title: str
    width: int
    rank: int
    right: bool = True


_COLUMNS = (
    _Column("peer", 12, 0, right=False),
    _Column("state", 11, 0, right=False),
    _Column("alive", 5, 0, right=False),
    _Column("in", 3, 0, right=False),
    _Column("step", 5, 1),
    _Column("tok/s", 5, 2),
    _Column("loss", 6, 6),
    _Column("up", 6, 4),
    _Column("down", 6, 4),
    _Column("ver", 5, 3),
    _Column("hash", 4, 3, right=False),
    _Column("miss", 4, 5),
    _Column("id", 16, 7, right=False),
)


def render(status: Record, width: int, height: int) -> RenderableType:
    """The whole screen, never wider than `width` cells nor higher than `height` lines."""
    if width < _SMALLEST[0] or height < _SMALLEST[1]:
        return _cut(Text(plain_line(status)), width)
    header, members, current = _header(status, width), _records(status, "members"), status.get("round")
    current = current if isinstance(current, Mapping) else None
    bars = _bars(current or {}, width)
    room = height - len(header) - len(bars) - 4  # for peers, recent rounds and events, with their borders
    # A line of recent rounds and one of events are kept free, as long as peers have a line as well.
    below = 3 if width >= _ONE_ROW else 6
    lines = min(len(members) + 1, room - 2 - (below if room - below >= 4 else 0))
    peers = _peers(members, width - 4, max(2, lines))
    return Group(
        _panel(header, f"farflung  {clean(status.get('run'))}", width),
        _panel(peers, f"peers ({len(members)})", width),
        _panel(bars, _round_title(current), width),
        *_history(status, width, room - len(peers) - 2),
    )


def plain_line(status: Record) -> str:
    """The same in one line, for logs and for output that is no terminal."""
    alive, taking_part = _counts(status)
    return (
        f"version {_progress(status)}  loss {_loss(status)}  {alive} alive {taking_part} participating  "
        f"tokens {si(_number(status, 'tokens'))}  {_parity(status)[0]}"
    )


def si(value: float, unit: str = "") -> str:
    """At most four characters and a letter, then the unit: 999, 1.2k, 12.3M, 123G."""
    for letter in ("", "k", "M", "G", "T", "P", "E"):
        digits = 0 if abs(value) >= 99.95 or (not letter and value == round(value, 6) // 1) else 1
        # Decided on the rounded number: 999.9 is 1.0k, not 1000.
        if abs(round(value, digits)) < 1000:
            return f"{value:.{digits}f}{letter}{unit}"
        value /= 1000
    return f"?{unit}"


def sparkline(values: Sequence[float]) -> str:
    """One block per finite value, from the lowest to the highest."""
    low = min(values, default=0.0)
    span = max(values, default=0.0) - low
    return "".join(_BLOCKS[int((value - low) / span * 7.99) if span > 0 else 3] for value in values)


def clean(value: object, limit: int = 200) -> str:
    """Text from elsewhere, without control characters, direction marks and stacked accents."""
    text = "" if value is None else str(value)[:limit]
    return "".join(c for c in text if c == " " or unicodedata.category(c)[0] not in "CMZ")


def _header(status: Record, width: int) -> list[Text]:
    alive, taking_part = _counts(status)
    losses = [_known(entry, "loss") for entry in _records(status, "rounds")]
    curve = sparkline([loss for loss in losses if loss is not None][-(width // 4) :])
    first = Text.assemble(
        (f"version {_progress(status)}", "bold"),
        f"  {alive} alive, {taking_part} participating  ",
        _parity(status),
    )
    second = Text.assemble(
        f"loss {_loss(status)}  ",
        (curve, "cyan"),
        f"  tokens {si(_number(status, 'tokens'))}  elapsed {_duration(_number(status, 'elapsed_s'))}",
    )
    return [first, second, Text(clean(status.get("reason")), "dim")]


def _peers(members: list[Record], width: int, lines: int) -> list[Text]:
    """A heading and a line per member; what does not fit is counted by state in the last line."""
    columns = list(_COLUMNS)
    while (spare := width + 1 - sum(column.width + 1 for column in columns)) < 0:
        worst = max(column.rank for column in columns)
        columns = [column for column in columns if column.rank < worst]
    columns[0] = columns[0]._replace(width=min(columns[0].width + spare, 24))
    rows = [Text(" ").join(_cell(column.title, column, "bold") for column in columns)]
    shown = members if len(members) < lines else members[: lines - 2]
    for member in shown:
        cells = _cells(member)
        styles = {"state": _STATE_STYLES.get(cells["state"], "")}
        rows.append(Text(" ").join(_cell(cells[c.title], c, styles.get(c.title, "")) for c in columns))
    if hidden := members[len(shown) :]:
        states = Counter(clean(member.get("state", "?"), 20) for member in hidden)
        counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
        rows.append(Text(f"... {len(hidden)} more: {counted}", "dim"))
    return rows if members else [*rows, Text("no peers yet", "dim")]


def _cells(member: Record) -> dict[str, str]:
    return {
        "peer": clean(member.get("name") or "?"),
        "state": clean(member.get("state") or "?"),
        "alive": "yes" if member.get("alive") is True else "no",
        "in": "yes" if member.get("participating") is True else "no",
        "step": _count(member, "step"),
        "tok/s": si(_number(member, "tokens_per_s")),
        "loss": _loss(member),
        "up": si(_number(member, "tx_bytes"), "B"),
        "down": si(_number(member, "rx_bytes"), "B"),
        "ver": _count(member, "version"),
        "hash": clean(member.get("digest"))[:4] or "-",
        "miss": _count(member, "missed"),
        "id": clean(member.get("id")) or "-",
    }


def _cell(text: str, column: _Column, style: str) -> Text:
    cell = _cut(Text(text, style), column.width)
    cell.align("right" if column.right else "left", column.width)
    return cell


def _round_title(current: Record | None) -> str:
    if current is None:
        return "no round open"
    taken = f"{_duration(_number(current, 'seconds'))} of {_duration(_number(current, 'deadline_s'))}"
    number, epoch, members = (_count(current, key) for key in ("number", "epoch", "members"))
    return f"round {number}  epoch {epoch}  {members} members  {taken}"


def _bars(current: Record, width: int) -> list[Text]:
    """The four bars, on one line or two; as many lines without a round, so that nothing jumps."""
    per_line = 4 if width >= _ONE_ROW else 2
    cells = (width - 4) // per_line
    fractions = {
        "scatter": _number(current, "scattered") / max(_number(current, "members"), 1.0),
        "held": _number(current, "held"),
        "merged": _number(current, "merged"),
        "gather": _number(current, "got"),
    }
    bars = [_bar(label, min(max(fraction, 0.0), 1.0), cells) for label, fraction in fractions.items()]
    return [Text().join(bars[at : at + per_line]) for at in range(0, 4, per_line)]


def _bar(label: str, fraction: float, cells: int) -> Text:
    length = cells - 15  # label 8, tail 5, two spaces to the next bar
    full = round(fraction * length)
    bar = ("█" * full, "blue"), ("░" * (length - full), "dim")
    return Text.assemble(f"{label:<8}", *bar, f"{fraction:>5.0%}  ")


def _history(status: Record, width: int, room: int) -> list[RenderableType]:
    """Recent rounds and events, newest first, beside each other where wide enough."""
    rounds = [_round_line(entry) for entry in reversed(_records(status, "rounds"))]
    events = [
        Text.assemble((f"{_duration(_number(entry, 'at_s')):>8}  ", "dim"), clean(entry.get("text")))
        for entry in reversed(_records(status, "events"))
    ]
    if room < 3:
        return []
    if width >= _ONE_ROW:
        half = width // 2
        left = _panel(rounds, "recent rounds", half, room)
        grid = Table.grid()
        grid.add_row(left, _panel(events, "events", width - half, room))
        return [grid]
    if room < 6:
        return [_panel(events, "events", width, room)]
    upper = _panel(rounds, "recent rounds", width, room // 2)
    return [upper, _panel(events, "events", width, room - room // 2)]


def _round_line(entry: Record) -> Text:
    included = entry.get("included")
    names = [clean(name, 40) for name in included] if isinstance(included, list) else []
    line = Text(f"v{_count(entry, 'version'):<5} {_duration(_number(entry, 'seconds')):>7}  ")
    line.append(f"{si(_number(entry, 'bytes'), 'B'):>6}  loss {_loss(entry):<6} in {len(names)}")
    for out in _records(entry, "excluded"):
        why = clean(out.get("reason")) or "no reason"
        line.append(f"  out {clean(out.get('name'), 40)}: {why}", "yellow")
    for less in _records(entry, "clipped"):
        line.append(f"  less {clean(less.get('name'), 40)}: {clean(less.get('reason'))}", "yellow")
    return line.append(f"  ({', '.join(names)})", "dim")


def _panel(lines: Sequence[Text], title: str, width: int, height: int | None = None) -> Panel:
    shown = list(lines) if height is None else list(lines)[: height - 2]
    return Panel(
        Group(*(_cut(line, width - 4) for line in shown)),
        title=_cut(Text(title), width - 6),
        title_align="left",
        border_style="blue",
        width=width,
        height=height,
    )


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def _counts(status: Record) -> tuple[int, int]:
    members = _records(status, "members")
    alive = sum(member.get("alive") is True for member in members)
    return alive, sum(member.get("participating") is True for member in members)


def _progress(status: Record) -> str:
    phase = clean(status.get("phase") or "waiting", 20)
    return f"{_count(status, 'version')}/{_count(status, 'target')} {phase}"


def _parity(status: Record) -> tuple[str, str]:
    """Words and their style: nobody should need colour to see that a run is broken."""
    if status.get("parity") is True:
        return f"parity ok {clean(status.get('digest'))[:4]}".rstrip(), "green"
    if status.get("parity") is False:
        return "PARITY BROKEN", "bold white on red"
    return "parity unknown", "dim"


def _loss(record: Record) -> str:
    value = _known(record, "loss")
    return "-" if value is None else f"{value:.3f}" if abs(value) < 99 else si(value)


def _count(record: Record, key: str) -> str:
    value = _number(record, key)
    return f"{value:.0f}" if abs(value) < 99_999 else si(value)


def _duration(seconds: float) -> str:
    if seconds < 119.5:
        return f"{seconds:.{int(seconds < 9.95)}f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{si(minutes / 60)} h"


def _records(record: Record, key: str) -> list[Record]:
    value = record.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _known(record: Record, key: str) -> float | None:
    value = record.get(key)
    # The bound also keeps out infinity and what is not a number.
    return float(value) if isinstance(value, int | float) and abs(value) < 1e30 else None


def _number(record: Record, key: str) -> float:
    return _known(record, key) or 0.0
