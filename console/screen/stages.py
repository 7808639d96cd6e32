"""A model in stages as people see it: a row for each stage, which one holds the run up and why, what its batches cost.
Pure.

Called by everything that shows a run: the dashboard, the line of `farflung status` and `watch`, and the table below it.
Must not know the rest of the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich.text import Text

from farflung.console.screen.text import Record, clean, count, cut, known, number, records
from farflung.protocol.caps import duration, si

_WHY = {
    "compute": "its seats compute no faster",
    "line up": "its seats' lines carry no more up",
    "line down": "its seats' lines carry no more down",
    "too few seats": "it has too few seats",
}
_WORTH_CHANGING = 1.5  # a batch that would be so many times as long, or as short
_WORTH_SHARE = 0.05  # of the time


class _StageColumn(NamedTuple):
    """A column of the table.  Those of the highest rank are dropped first; rank 0 stays."""

    title: str
    width: int
    rank: int


_COLUMNS = (
    _StageColumn("stage", 5, 0),
    _StageColumn("seats", 5, 0),
    _StageColumn("peers", 5, 4),
    _StageColumn("counted", 9, 0),
    _StageColumn("micro/s", 7, 0),
    _StageColumn("each", 7, 3),
    _StageColumn("waiting", 7, 1),
    _StageColumn("version", 7, 2),
    _StageColumn("up", 6, 5),
    _StageColumn("down", 6, 5),
)
_LAST = 22  # of the last column, at least


def batch_words(status: Record) -> str:
    """How far the synchronous batch is, and the stages in one line; empty where there is no batch."""
    batch = status.get("batch")
    if not isinstance(batch, Mapping):
        return ""
    stages = records(status, "stages")
    done = f"{count(batch, 'counted')} of {count(batch, 'microbatches')}"
    if not batch.get("microbatches"):
        told = "no batch yet"
    elif batch.get("held_out"):
        told = f"held-out loss: {done} microbatches"
    else:
        told = f"{done} microbatches counted" + (" in all stages" if stages else "")
    if not stages:
        return told
    seats = "/".join(count(stage, "seats") for stage in stages[:8]) + ("/..." if len(stages) > 8 else "")
    narrow = narrow_words(status, short=True)
    return f"{told}, seats {seats}" + (f", narrow: {narrow}" if narrow else "")


def narrow_words(status: Record, short: bool = False) -> str:
    """Which stage holds the run up, and why; empty while that is not known."""
    for at, stage in enumerate(records(status, "stages")):
        why = clean(stage.get("narrow"), 40)
        if why:
            return f"stage {at} ({why})" if short else f"stage {at} holds the others up: {_WHY.get(why, why)}"
    return ""


def cost_words(status: Record) -> str:
    """What rounds and deaths take of the time, and which way to turn `batch`; empty while that is not known."""
    batch = status.get("batch")
    costs = batch.get("costs") if isinstance(batch, Mapping) else None
    if not isinstance(costs, Mapping):
        return ""
    rounds, deaths = number(costs, "rounds_cost"), number(costs, "deaths_cost")
    told = (
        f"a batch takes {duration(number(costs, 'counting_s'))} and its round {duration(number(costs, 'round_s'))}: "
        f"rounds cost {rounds:.0%} of the computing, deaths {deaths:.0%}"
    )
    return told + _which_way(costs, rounds)


def _which_way(costs: Record, rounds: float) -> str:
    best, now = known(costs, "best"), number(costs, "batch")
    if best is None:
        return "; a larger [pipeline] batch would cost less" if rounds > 2 * _WORTH_SHARE else ""
    worth = rounds + number(costs, "deaths_cost") > _WORTH_SHARE and now > 0
    if worth and not now / _WORTH_CHANGING <= best <= now * _WORTH_CHANGING:
        return f"; [pipeline] batch = {best:.0f} would cost least (it is {now:.0f})"
    return ""


def stages_table(status: Record, width: int, lines: int) -> list[Text]:
    """A heading and a line for each stage, in at most so many lines, 3 or more; the narrow one is always among them."""
    stages = records(status, "stages")
    columns = list(_COLUMNS)
    while sum(column.width + 1 for column in columns) + 2 + _LAST > width:
        worst = max(column.rank for column in columns)
        if not worst:
            break
        columns = [column for column in columns if column.rank < worst]
    heading = "  " + " ".join(f"{column.title:>{column.width}}" for column in columns) + "  now"
    all_fit = len(stages) < lines
    shown = list(range(len(stages))) if all_fit else _chosen(stages, max(1, lines - 2))
    rows = [_row(at, stages[at], status, columns) for at in shown]
    if not all_fit:
        rows.append(Text(f"  ... {len(stages) - len(shown)} more stages", "dim"))
    return [cut(each, width) for each in (Text(heading, "bold"), *rows)]


def _chosen(stages: list[Record], most: int) -> list[int]:
    """The narrow one, and those that are least far with the batch; in their order."""

    def rank(at: int) -> tuple[bool, float]:
        return not stages[at].get("narrow"), number(stages[at], "counted")

    return sorted(sorted(range(len(stages)), key=rank)[:most])


def _row(at: int, stage: Record, status: Record, columns: list[_StageColumn]) -> Text:
    batch = status.get("batch")
    due = count(batch, "microbatches") if isinstance(batch, Mapping) and batch.get("microbatches") else "?"
    rate, unit_s = known(stage, "micros_per_s"), known(stage, "unit_s")
    cells = {
        "stage": str(at),
        "seats": count(stage, "seats"),
        "peers": count(stage, "members"),
        "counted": f"{count(stage, 'counted')}/{due}",
        "micro/s": "-" if rate is None else f"{rate:.2f}" if rate < 1000 else si(rate),
        "each": "-" if unit_s is None else _short(unit_s),
        "waiting": count(stage, "waiting"),
        "version": count(stage, "version"),
        "up": si(number(stage, "up_bytes"), "B"),
        "down": si(number(stage, "down_bytes"), "B"),
    }
    line = " ".join(f"{cells[column.title][: column.width]:>{column.width}}" for column in columns)
    narrow = clean(stage.get("narrow"), 40)
    row = Text(f"{'▼' if narrow else ' '} {line}  ", "yellow" if narrow else "")
    if narrow:
        return row.append(f"narrow: {narrow}", "bold yellow")
    word = (
        "its round is done" if stage.get("prepared") is True else "in its round" if stage.get("round") else ""
    )
    return row.append(word, "dim")


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
