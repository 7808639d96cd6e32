"""Owns how a run looks: from one status dictionary and a view to a screen of at most the given size.

Called by `farflung status`, `join`, `coordinate`, `farflung demo` and docs/make_pictures.py, several times a second.
Must not know clocks, terminals or sockets.  The status comes from elsewhere: keys may be missing or odd, and
every text in it is stripped of control characters and shown as is, never read as markup.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farflung.console.screen.health import (
    health,
    parity,
    place_in_period,
    plain_line,
    takes_part,
    why_not,
)
from farflung.console.screen.stages import batch_words, cost_words, narrow_words, stages_table
from farflung.console.screen.text import (
    CONTINUES,
    Record,
    bar,
    clean,
    count,
    cut,
    fraction,
    held_out_words,
    known,
    loss_of,
    number,
    panel,
    records,
    sparkline,
)
from farflung.console.screen.view import HELP, View
from farflung.protocol.caps import duration, si
from farflung.protocol.states import PeerState, RunPhase

# ---- peers table -------------------------------------------------------------------------------------------
# The table of peers: who takes part, what each one does, and why somebody does not take part. Pure.
#
# Called by the dashboard. Must not know the rest of the screen.

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
    own = member.get("figures")
    if isinstance(own, Mapping) and own:
        told = ", ".join(f"{clean(name, 32)} {known(own, name) or 0.0:.4g}" for name in list(own)[:8])
        lines.append(f"its script's figures: {told}")
    offered = [each for each in records(status, "relays_offered") if each.get("peer") == member.get("id")]
    lines += [f"offers a relay: {_relay(each)}" for each in offered]
    if member.get("left_out"):
        lines.append(f"last left out: {clean(member.get('left_out'))}")
    return [Text(line) for line in lines]


# ---- dashboard ---------------------------------------------------------------------------------------------

_ONE_ROW = 110  # from this width on, all bars share a line, and recent rounds stand beside events
_SMALLEST = (60, 14)  # below, there is one line only
_LATE_SHOWN = 4
_WAITS_SHOWN = 500  # why this peer waits: what is cut off says nothing
_STAGES_LEAST = 3  # lines of the table of stages: fewer say nothing
_ROOM_FOR_COSTS = 24  # lines for all
PLAIN = View()


def render(
    status: Record, width: int, height: int, view: View = PLAIN, own: Record | None = None
) -> RenderableType:
    """The whole screen, never wider than `width` cells nor higher than `height` lines.

    `own`: what the process that shows it knows of itself (embedded.py), for the top.
    """
    if width < _SMALLEST[0] or height < _SMALLEST[1]:
        return cut(Text(plain_line(status)), width)
    top, used = _own_top(own, width) if own is not None and height >= 22 and view.page != "help" else ([], 0)
    top.append(panel(_header(status, width), f"farflung  {clean(status.get('run'))}", width))
    room = height - used - 5 - 1  # the last line is for the keys
    if view.page == "help":
        body: list[RenderableType] = [panel([Text(line) for line in HELP], "help", width, room)]
    elif view.page == "log" and own is not None:
        log = own.get("log")
        newest = [Text(clean(line)) for line in log] if isinstance(log, list) else []
        body = [panel(newest[-(room - 2) :], "log", width, room)]
    else:
        body, used = _stages(status, width, room)
        body += _overview(status, view, width, room - used)
    return Group(*top, *body, _keys(view, own, width))


def _overview(status: Record, view: View, width: int, room: int) -> list[RenderableType]:
    members, current = records(status, "members"), status.get("round")
    current = current if isinstance(current, dict) else None
    chosen = next((m for m in members if clean(m.get("id")) == view.selected and view.selected), None)
    if chosen is not None and view.page == "details":
        facts = details(chosen, status)[: max(1, room - 6)]
        below, kept = [panel(facts, "this peer", width)], len(facts) + 2
    else:
        below = [panel(_round_lines(status, current, width), _round_title(status, current), width)]
        kept = 4
    left = room - kept
    # A line of recent rounds and one of events are kept free, as long as peers have a line as well.
    history = 6 if width < _ONE_ROW and left - len(members) - 3 >= 6 else 3
    least = 7 if records(status, "stages") else 4  # where stages have rows, peers go before events
    lines = min(len(members) + 1, left - 2 - (history if left - history >= least else 0))
    peers = peers_table(status, view, width - 4, max(2, lines))
    title = f"peers ({len(members)})" + (f", by {view.sort}" if view.sort != "joined" else "")
    return [panel(peers, title, width), *below, *_history(status, view, width, left - len(peers) - 2)]


# ---- the top ---------------------------------------------------------------------------------------------


def _header(status: Record, width: int) -> list[Text]:
    verdict = health(status)
    members = records(status, "members")
    alive = sum(member.get("alive") is True for member in members)
    part = sum(takes_part(member) for member in members)
    left_s, phase_s = known(status, "eta_s"), known(status, "phase_left_s")
    phase = clean(status.get("phase") or RunPhase.WAITING, 20) + (
        f", {duration(phase_s)} left" if phase_s is not None and status.get("phase") != RunPhase.APPLY else ""
    )
    second = Text.assemble(
        (f"version {count(status, 'version')}/{count(status, 'target')}", "bold"),
        f"  {phase}  {alive} alive, {part} take part{_useful(status)}  ",
        parity(status),
    )
    begin = f"loss {loss_of(status)}{held_out_words(status)} "
    rest = (
        f"  {si(number(status, 'tokens'))} tokens, {si(number(status, 'tokens_per_s'))}/s  "
        f"{duration(number(status, 'elapsed_s'))} gone"
    )
    if left_s is not None and status.get("phase") != RunPhase.FINISHED:
        rest += f", about {duration(left_s)} to go"
    losses = [loss for entry in records(status, "rounds") if (loss := known(entry, "loss")) is not None]
    # The curve gives way: a number that is cut off says nothing.
    cells = min(width // 5, width - 4 - len(begin) - len(rest))
    third = Text.assemble(begin, (sparkline(losses[-cells:]) if cells > 0 else "", "cyan"), rest)
    first = Text.assemble((f"{verdict.mark} {verdict.word}", verdict.style), f"  {verdict.text}")
    return [first, second, third]


def _useful(status: Record) -> str:
    """How many members the run can use, where that is known."""
    told = status.get("useful_members")
    members = known(told, "members") if isinstance(told, dict) else None
    return f", it can use about {members:,.0f}" if members is not None else ""


def _own_top(own: Record, width: int) -> tuple[list[RenderableType], int]:
    """What this process knows of itself, and how many lines that takes: its machine, or the URL to give away."""
    if own.get("url"):
        # Without a border and in one piece, so that it can be copied.
        words = f'farflung join "{clean(own.get("url"), 300)}"'
        rows = -(-len(words) // width)
        told = Text(words, "bold", no_wrap=True, overflow="ignore")
        return [Text("peers join with:", "dim"), told, *[Text(CONTINUES)] * (rows - 1)], rows + 1
    slider = fraction(own, "slider")
    if slider is not None:
        lines = [Text(clean(own.get("text"))), bar(slider, width - 4)]
        return [panel(lines, clean(own.get("title")), width)], 4
    title = clean(own.get("title") or "you")
    if waits := clean(own.get("waiting"), _WAITS_SHOWN):
        lined = textwrap.wrap(waits, width - 4)
        return [panel([Text(row) for row in lined], title, width)], len(lined) + 2
    shares = [
        (word, share)
        for word in ("computes", "waits", "network")
        if (share := fraction(own, word)) is not None
    ]
    each = min(16, max(4, (width - 52) // 3))
    timed = [Text.assemble(f"{word} ", bar(share, each), f" {share:.0%}   ") for word, share in shares]
    lines = [Text(clean(own.get("text"))), Text().join(timed) if timed else Text("no figures yet", "dim")]
    return [panel(lines, title, width)], 4


def _keys(view: View, own: Record | None, width: int) -> Text:
    if not view.has_keys:
        return Text("Ctrl-C ends it", "dim")
    words = "q quit  ↑↓ peer  ⏎ details  s sort  p pause  PgUp older  ? help"
    if own is not None and "log" in own:
        words = words.replace("? help", "l log  ? help").replace("q quit", "Ctrl-C leave")
    line = Text.assemble(("PAUSED  ", "bold reverse") if view.paused else "", (words, "dim"))
    return cut(line, width)


# ---- the round -------------------------------------------------------------------------------------------


def _round_title(status: Record, current: Record | None) -> str:
    if current is None:
        return "no round open"
    taken = f"{duration(number(current, 'seconds'))} of {duration(number(current, 'deadline_s'))}"
    name, epoch, members = (count(current, key) for key in ("number", "epoch", "members"))
    return f"round {name}  epoch {epoch}  {members} members  {taken}"


def _round_lines(status: Record, current: Record | None, width: int) -> list[Text]:
    """Two lines, with a round and without, so that nothing jumps."""
    if current is None:
        return [_training(status, width), _getting_ready(status)]
    shown = current
    shares = {
        "sent": number(shown, "held"),
        "merged": number(shown, "merged"),
        "received": number(shown, "got"),
        "whole": number(shown, "scattered") / max(number(shown, "members"), 1.0),
    }
    chosen = list(shares.items())[: 4 if width >= _ONE_ROW else 3]
    cells = (width - 4) // len(chosen) - 16  # label 8, tail 6, two spaces
    bars = [
        Text.assemble(f"{word:<9}", bar(share, cells), f"{min(share, 1.0):>5.0%}  ") for word, share in chosen
    ]
    return [Text().join(bars), _waiting_for(status, current)]


def _training(status: Record, width: int) -> Text:
    """How far the peers are on their way to the next round."""
    batch = status.get("batch")
    if isinstance(batch, dict):
        return _batch(status, batch, width)
    part = [member for member in records(status, "members") if takes_part(member)]
    ready = sum(member.get("state") == PeerState.READY for member in part)
    places = [place_in_period(status, member) for member in part]
    done = [
        1.0 if m.get("state") == PeerState.READY else steps / every
        for m, (steps, every) in zip(part, places, strict=True)
    ]
    share = sum(done) / max(len(done), 1)
    ends = f" {share:.0%}  {ready} of {len(part)} are ready for the next round"
    return Text.assemble("inner steps ", bar(share, max(4, width - 18 - len(ends))), ends)


def _batch(status: Record, batch: Record, width: int) -> Text:
    words = f" {batch_words(status)}"
    cells = max(4, min(24, width - 10 - len(words)))
    drawn = bar(number(batch, "counted") / max(number(batch, "microbatches"), 1.0), cells)
    return cut(Text.assemble("batch ", drawn, words), width - 4)


def _stages(status: Record, width: int, room: int) -> tuple[list[RenderableType], int]:
    """A row for each stage of a model in several, in a third of the room at most, and how many lines that takes.
    Nothing where that is too little: the line of the batch says it in short."""
    stages = records(status, "stages")
    lines = min(len(stages) + 1, room // 3 - 1)
    if not stages or lines < _STAGES_LEAST:
        return [], 0
    narrow, costs = narrow_words(status), cost_words(status)
    table = stages_table(status, width - 4, lines)
    told = [Text(costs, "dim")] if costs and room >= _ROOM_FOR_COSTS else []
    title = f"stages ({len(stages)})" + (f": {narrow}" if narrow else "")
    return [panel([*table, *told], title, width)], len(table) + len(told) + 2


def _getting_ready(status: Record) -> Text:
    """Whom the others wait for before the round opens, once somebody waits."""
    opens_in_s = known(status, "phase_left_s")
    late = [
        clean(member.get("name"), 40)
        for member in records(status, "members")
        if member.get("alive") is True and member.get("state") in (PeerState.INNER, PeerState.STUCK)
    ]
    if opens_in_s is None or not late:
        return Text(clean(status.get("reason")), "dim")
    return _named(late, f"; the round opens without them in {duration(opens_in_s)}")


def _named(late: list[str], then: str) -> Text:
    more = f" and {len(late) - _LATE_SHOWN} more" if len(late) > _LATE_SHOWN else ""
    return Text.assemble(("waiting for ", "bold"), f"{', '.join(late[:_LATE_SHOWN])}{more}{then}")


def _waiting_for(status: Record, current: Record) -> Text:
    """Who holds the round up, with how far each is."""
    reason = Text(clean(status.get("reason")), "dim")
    sending = status.get("phase") == RunPhase.SCATTER
    key = "sent" if sending else "got"
    late = [
        (share, clean(member.get("name"), 40))
        for member in records(status, "members")
        if member.get("alive") is True and (share := fraction(member, key)) is not None and share < 1.0
    ]
    if not late:
        return reason
    grace_s = number(current, "grace_s") - number(current, "seconds")
    then = f"; left out in {duration(grace_s)}" if sending and grace_s > 0 else ""
    return _named([f"{name} {share:.0%}" for share, name in sorted(late)], then)


# ---- what was --------------------------------------------------------------------------------------------


def _history(status: Record, view: View, width: int, room: int) -> list[RenderableType]:
    """Recent rounds and events, newest first, beside each other where wide enough."""
    of_stages = bool(records(status, "stages"))
    helping = [
        clean(each.get("name"), 40) for each in records(status, "members") if each.get("helps") is True
    ]
    rounds = [_round_line(entry, of_stages, helping) for entry in reversed(records(status, "rounds"))]
    events = [
        Text.assemble((f"{duration(number(entry, 'at_s')):>8}  ", "dim"), clean(entry.get("text")))
        for entry in reversed(records(status, "events"))
    ]
    rounds, events = (each[min(view.scroll, max(0, len(each) - 1)) :] for each in (rounds, events))
    if room < 3:
        return []
    if width >= _ONE_ROW:
        half = width // 2
        grid = Table.grid()
        grid.add_row(panel(rounds, "recent rounds", half, room), panel(events, "events", width - half, room))
        return [grid]
    if room < 6:
        return [panel(events, "events", width, room)]
    upper = panel(rounds, "recent rounds", width, room // 2)
    return [upper, panel(events, "events", width, room - room // 2)]


def _round_line(entry: Record, of_stages: bool, helping: Collection[str] = ()) -> Text:
    """`helping`: who is in rounds without a trainer: that nothing of theirs counts is no news."""
    included = entry.get("included")
    names = [clean(name, 40) for name in included] if isinstance(included, list) else []
    stage = f"stage {count(entry, 'fragment'):<2} " if of_stages else ""
    line = Text(f"v{count(entry, 'version'):<5} {stage}{duration(number(entry, 'seconds')):>7}  ")
    line.append(f"{si(number(entry, 'bytes'), 'B'):>6}  loss {loss_of(entry):<6} in {len(names)}")
    for out in records(entry, "excluded"):
        if clean(out.get("name"), 40) in helping:
            continue
        why = clean(out.get("reason")) or "no reason"
        line.append(f"  out {clean(out.get('name'), 40)}: {why}", "yellow")
    for less in records(entry, "clipped"):
        line.append(f"  less {clean(less.get('name'), 40)}: {clean(less.get('reason'))}", "yellow")
    return line.append(f"  ({', '.join(names)})", "dim")
