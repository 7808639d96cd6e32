"""Owns how a run looks: from one status dictionary and a view to a screen of at most the given size.

Called by `farflung status`, `join`, `coordinate`, `farflung demo` and docs/make_pictures.py, several times a second.
Must not know clocks, terminals or sockets.  The status comes from elsewhere: keys may be missing or odd, and
every text in it is stripped of control characters and shown as is, never read as markup.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farflung.console.screen.health import health, parity, plain_line, takes_part
from farflung.console.screen.peers_table import details, peers_table
from farflung.console.screen.stages import batch_words, cost_words, narrow_words, stages_table
from farflung.console.screen.text import (
    CONTINUES,
    Record,
    bar,
    clean,
    count,
    cut,
    fraction,
    known,
    loss_of,
    number,
    panel,
    records,
    sparkline,
)
from farflung.console.screen.view import HELP, View
from farflung.protocol.process.units import duration, si
from farflung.protocol.states import PeerState, RunPhase

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
    begin = f"loss {loss_of(status)} "
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
    every = max(number(status, "sync_every"), 1.0)
    part = [member for member in records(status, "members") if takes_part(member)]
    ready = sum(member.get("state") == PeerState.READY for member in part)
    done = [1.0 if m.get("state") == PeerState.READY else number(m, "step") % every / every for m in part]
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
