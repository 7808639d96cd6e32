"""The table of peers: who takes part, what each one does, and why somebody does not take part.  Pure.

Called by the dashboard.  Must not know the rest of the screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.text import Text

from farflung.console.screen.health import takes_part, why_not
from farflung.console.screen.text import (
    Record,
    bar,
    clean,
    count,
    cut,
    fraction,
    known,
    loss_of,
    number,
    records,
)
from farflung.console.screen.view import View
from farflung.protocol.process.units import si
from farflung.protocol.states import PeerState

# What a peer does, in a word, and its style: colour only repeats what the word says.
_DOES: dict[str, tuple[str, str]] = {
    PeerState.JOINING: ("joins", "yellow"),
    PeerState.SYNCING: ("fetches", "yellow"),
    PeerState.INNER: ("trains", "cyan"),
    PeerState.READY: ("ready", "bright_blue"),
    PeerState.STUCK: ("hangs", "bold red"),
    PeerState.SCATTER: ("sends", "magenta"),
    PeerState.GATHER: ("gets", "magenta"),
    PeerState.APPLY: ("applies", "magenta"),
    PeerState.LOST: ("lost", "bold red"),
    PeerState.LEFT: ("left", "dim"),
    PeerState.QUARANTINED: ("differs", "bold red"),
}
_IN, _LESS, _OUT, _ABSENT = "■", "▪", "□", "·"
_LEAST_LINE_BYTES_PER_S = 10_000  # no connection is so slow; what was seen of it was a few beats
_WHY_WIDTH = 34  # a last column of this width has room for reasons; before that they take the row


class _Column(NamedTuple):
    """A column of the table.  Those of the highest rank are dropped first; rank 0 stays."""

    title: str
    width: int
    rank: int
    right: bool = True


_COLUMNS = (
    _Column("peer", 14, 0, right=False),
    _Column("does", 10, 0, right=False),
    _Column("step", 5, 1),
    _Column("tok/s", 5, 2),
    _Column("up/s", 6, 3),
    _Column("", 5, 8, right=False),  # the line's share in use, as a bar
    _Column("down/s", 6, 3),
    _Column(" ", 5, 8, right=False),
    _Column("ver", 5, 4),
    _Column("lag", 3, 5),
    _Column("hash", 4, 9, right=False),
    _Column("loss", 6, 7),
    _Column("miss", 4, 6),
    _Column("bad", 3, 9),
    _Column("heard", 6, 10),
    _Column("id", 16, 11, right=False),
)
_STAGE = _Column("stage", 5, 1)  # of a model in several
_HISTORY = _Column("last rounds", 11, 0, right=False)


@dataclass(frozen=True)
class _Table:
    columns: list[_Column]
    last_width: int


def peers_table(status: Record, view: View, width: int, lines: int) -> list[Text]:
    """A heading and a line per member; what does not fit is counted by state in the last line."""
    members = view.ordered(status)
    table = _table(width, any("stage" in member for member in members))
    title = "last rounds, or why not in" if table.last_width >= _WHY_WIDTH else _HISTORY.title
    heading = [_cell(column.title, column, "bold") for column in table.columns]
    heading.append(cut(Text(title, "bold"), table.last_width))
    rows = [Text("  ") + Text(" ").join(heading)]
    if not members:
        return [*rows, Text("no peers yet", "dim")]
    shown = members if len(members) < lines else _window(members, view, max(0, lines - 2))
    rows += [_row(member, status, table, width, view) for member in shown]
    if hidden := [member for member in members if member not in shown]:
        states = Counter(clean(member.get("state", "?"), 20) for member in hidden)
        counted = ", ".join(f"{n} {state}" for state, n in states.most_common())
        rows.append(Text(f"... {len(hidden)} more: {counted}", "dim"))
    return rows


def _window(members: list[Record], view: View, lines: int) -> list[Record]:
    """The lines around the selected peer."""
    at = next((n for n, m in enumerate(members) if clean(m.get("id")) == view.selected), 0)
    first = min(max(0, at - lines + 1), len(members) - lines)
    return members[first : first + lines]


def _table(width: int, in_stages: bool) -> _Table:
    columns = [*_COLUMNS[:2], _STAGE, *_COLUMNS[2:]] if in_stages else list(_COLUMNS)
    while (spare := width - 2 - sum(column.width + 1 for column in columns)) < _HISTORY.width:
        worst = max(column.rank for column in columns)
        if worst == 0:
            break
        columns = [column for column in columns if column.rank < worst]
    return _Table(columns, max(0, spare))


def _row(member: Record, status: Record, table: _Table, width: int, view: View) -> Text:
    part, why = takes_part(member), why_not(member)
    mark = "●" if part else "○" if member.get("alive") is True else "×"
    word, style = _does(member)
    cells = _cells(member) | {"does": word}
    texts = [
        _line_share(member, column)
        if not column.title.strip()
        else _cell(cells[column.title], column, style if column.title == "does" else "")
        for column in table.columns
    ]
    row = Text(f"{mark} ", "green" if part else "bold yellow" if mark == "○" else "dim")
    if why and table.last_width < _WHY_WIDTH:
        row += Text(" ").join([*texts[:2], Text(why, "yellow")])
    else:
        last = Text(why, "yellow") if why else _last_rounds(member, status, table.last_width)
        row += Text(" ").join([*texts, last])
    cut(row, width)
    if view.selected and clean(member.get("id")) == view.selected:
        row.pad_right(width - row.cell_len)
        row.stylize("reverse")
    return row


def _does(member: Record) -> tuple[str, str]:
    state = clean(member.get("state") or "?")
    word, style = _DOES.get(state, (state, ""))
    if member.get("helps") is True and state == PeerState.INNER:
        word, style = "helps", "green"
    done = fraction(member, "sent" if state == PeerState.SCATTER else "got")
    if state in (PeerState.SCATTER, PeerState.GATHER) and done is not None:
        word = f"{word} {done:.0%}"
    return word, style


def _last_rounds(member: Record, status: Record, width: int) -> Text:
    name = clean(member.get("name"), 40)
    marks: list[str] = []
    if member.get("helps") is True:
        return Text("")  # nothing of it could be in them
    rounds = [past for past in records(status, "rounds") if _may_be_in(member, past)]
    for past in rounds[-width:]:
        included = past.get("included")
        names = [clean(each, 40) for each in included] if isinstance(included, list) else []
        out = any(clean(each.get("name"), 40) == name for each in records(past, "excluded"))
        less = any(clean(each.get("name"), 40) == name for each in records(past, "clipped"))
        marks.append((_LESS if less else _IN) if name in names else _OUT if out else _ABSENT)
    return Text("".join(marks)[-width:] if width else "", "cyan")


def _may_be_in(member: Record, past: Record) -> bool:
    """Of a model in stages each has rounds of its own."""
    return "stage" not in member or "fragment" not in past or past.get("fragment") == member.get("stage")


def _line_share(member: Record, column: _Column) -> Text:
    """How much of what its line is known to carry it uses now."""
    way = ("tx_bytes_per_s", "up_bytes_per_s") if not column.title else ("rx_bytes_per_s", "down_bytes_per_s")
    most = number(member, way[1])
    return bar(number(member, way[0]) / most, column.width) if most > 0 else Text(" " * column.width)


def version_mark(member: Record) -> str:
    return {True: "=", False: "≠"}.get(member.get("same"), "?")  # type: ignore[call-overload, no-any-return]


def _cells(member: Record) -> dict[str, str]:
    behind, heard_s = number(member, "behind"), known(member, "heard_s")
    holds = number(member, "version") >= 0
    return {
        "peer": clean(member.get("name") or "?"),
        "stage": count(member, "stage") if "stage" in member else "-",
        "step": count(member, "step"),
        "tok/s": si(number(member, "tokens_per_s")),
        "loss": loss_of(member),
        "up/s": si(number(member, "tx_bytes_per_s"), "B"),
        "down/s": si(number(member, "rx_bytes_per_s"), "B"),
        "ver": count(member, "version") + version_mark(member) if holds else "-",
        "lag": f"-{behind:.0f}" if behind else "0" if holds else "-",
        "hash": clean(member.get("digest"))[:4] or "-",
        "miss": count(member, "missed"),
        "bad": count(member, "strikes"),
        "heard": "-" if heard_s is None else f"{heard_s:.1f} s" if heard_s < 99 else si(heard_s, " s"),
        "id": clean(member.get("id")) or "-",
    }


_HOW_REACHED = {
    "punched": "past its router, by those whom it can't dial",
    "relayed": "over the relay, by those whom it can't dial",
}


def _reach(member: Record) -> str:
    """Which way others have to it, and why no better one."""
    if member.get("reachable") is True:
        return "others can dial it"
    how = _HOW_REACHED.get(clean(member.get("way")), "nobody can dial it: it owns no chunks")
    why = clean(member.get("why_this_way") or "")
    return f"{how} ({why})" if why else how


def _relay(offered: Record) -> str:
    """What a peer passes for others, as it says itself."""
    rate = f"{si(8 * number(offered, 'bytes_per_s'), 'bit/s')} for all who use it"
    if offered.get("on") is not True:
        return f"{rate}; nobody is sent there: {clean(offered.get('why_not'))}"
    return f"{rate}, {count(offered, 'pairs')} pairs now, {si(number(offered, 'moved_bytes'), 'B')} passed"


def _traffic(member: Record, status: Record) -> str:
    """Now, and what its connection is known to carry: of one that has sent next to nothing that is no figure."""
    if not any(other.get("alive") is True and other is not member for other in records(status, "members")):
        return "no other peer is here to exchange data with"
    said = []
    for word, way, most in (
        ("sends", "tx_bytes_per_s", "up_bytes_per_s"),
        ("gets", "rx_bytes_per_s", "down_bytes_per_s"),
    ):
        carries = number(member, most)
        of = f" of {si(carries, 'B')}/s" if carries >= _LEAST_LINE_BYTES_PER_S else ""
        said.append(f"{word} {si(number(member, way), 'B')}/s{of}")
    return ", ".join(said)


def _cell(text: str, column: _Column, style: str) -> Text:
    cell = cut(Text(text, style), column.width)
    cell.align("right" if column.right else "left", column.width)
    return cell


def details(member: Record, status: Record) -> list[Text]:
    """All that is known of one peer, in words."""
    part = takes_part(member)
    why = why_not(member)
    sent, got = fraction(member, "sent"), fraction(member, "got")
    how = "yes, without a trainer: it owns chunks and gives state" if member.get("helps") is True else "yes"
    same = {"=": "the run's state, bit for bit", "≠": "NOT the run's state", "?": "not compared yet"}
    cells = _cells(member)
    lines = [
        f"{clean(member.get('name'))}  ({clean(member.get('id'))})",
        f"takes part: {how if part else 'no: ' + why}",
        f"holds version {cells['ver'][:-1] or '-'}, digest {cells['hash']}: {same[version_mark(member)]}",
        f"step {cells['step']}, {si(number(member, 'tokens'))} tokens, {cells['tok/s']} tokens/s, loss {cells['loss']}",
        f"{_traffic(member, status)}; "
        f"{si(number(member, 'tx_bytes'), 'B')} sent, {si(number(member, 'rx_bytes'), 'B')} received",
        f"reached: {_reach(member)}",
        f"this round: {'not in it' if sent is None else f'{sent:.0%} sent, {got or 0.0:.0%} of the results here'}"
        + (f"; left out: {clean(member.get('out'))}" if member.get("out") else ""),
        f"rounds missed in a row: {cells['miss']}; shown another state: {cells['bad']}; heard {cells['heard']} ago",
    ]
    share = member.get("batch")
    if isinstance(share, Mapping):
        of = f"stage {count(member, 'stage')}, " if "stage" in member else ""
        unit_s = known(share, "unit_s")
        each = f", {1000 * unit_s:.0f} ms of work for each" if unit_s else ""
        lines.append(f"{of}seat {count(share, 'seat')}: {count(share, 'counted')} microbatches counted{each}")
    offered = [each for each in records(status, "relays_offered") if each.get("peer") == member.get("id")]
    lines += [f"offers a relay: {_relay(each)}" for each in offered]
    if member.get("left_out"):
        lines.append(f"last left out: {clean(member.get('left_out'))}")
    return [Text(line) for line in lines]
