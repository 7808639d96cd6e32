"""A run as one picture: loss, who took part, bytes of the rounds, and a waterfall of who waited for whom.  Pure.

Called by `farflung export --plot`, with a recording.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from farflung.console.history.picture import BLUE, GREEN, INK, ORANGE, PALE, SKY, Chart, Sheet
from farflung.console.history.recorded_run import Moment, Recording, StageStory, stage_stories
from farflung.console.screen.text import clean
from farflung.protocol.caps import duration, si
from farflung.protocol.errors import UserError

WIDTH, LEFT, RIGHT = 960, 110, 30
HEIGHT, GAP = 150, 62
ROW = 18  # of a peer in the waterfall
ROUNDS_IN_WATERFALL = 12  # the last ones: more would be too thin to read
NAMES_SHOWN = 32
# Told apart without colours, too.
STAGE_LINES = ((BLUE, ""), (ORANGE, "6 3"), (GREEN, "2 2"), (INK, "8 2 2 2"), (SKY, "1 3"))


@dataclass
class _Round:
    """One committed round: when each part of it was over, and at whom."""

    number: int
    opened: float
    decided: float
    committed: float
    included: set[str]
    members: list[str]
    sent: dict[str, float] = field(default_factory=dict)
    sealed: dict[str, float] = field(default_factory=dict)
    frozen: dict[str, float] = field(default_factory=dict)


def picture_of(recording: Recording) -> str:
    commits = recording.coordinators("committed")
    if not commits:
        raise UserError("no round was committed in this recording: there is nothing to draw")
    rounds = _rounds(recording)[-ROUNDS_IN_WATERFALL:]
    peers = sorted({peer for each in rounds for peer in each.members}, key=recording.name)[:NAMES_SHOWN]
    stages = stage_stories((m.at_s, m.event) for m in recording.moments if not m.peer)
    tops = [60 + place * (HEIGHT + GAP) for place in range(5 if stages else 4)]
    sheet = Sheet(WIDTH, tops[-1] + ROW * max(len(peers), 1) + 80)
    title = f"{clean(recording.run)}: {len(commits)} rounds in {duration(recording.seconds)}"
    sheet.words(LEFT, 26, title, 17)
    _loss(sheet, tops[0], recording, commits)
    _participation(sheet, tops[1], recording, commits)
    _bytes(sheet, tops[2], recording, commits)
    if stages:
        _seats(sheet, tops[3], recording, stages)
    _waterfall(sheet, tops[-1], recording, rounds, peers)
    return sheet.text()


def _box(top: float, height: float = HEIGHT) -> tuple[float, float, float, float]:
    return LEFT, top, WIDTH - LEFT - RIGHT, height


def _loss(sheet: Sheet, top: float, recording: Recording, commits: list[Moment]) -> None:
    known = [(c.at_s, float(c.event["loss"])) for c in commits if c.event.get("loss") is not None]
    evaluated = [each for each in recording.coordinators("evaluated") if each.event.get("loss") is not None]
    held_out = [(each.at_s, float(each.event["loss"])) for each in evaluated]
    losses = [loss for _, loss in (*known, *held_out)] or [0.0, 1.0]
    low, high = min(losses), max(losses)
    room = 0.05 * (high - low) or 0.5
    chart = Chart(sheet, _box(top), (0, recording.seconds), (low - room, high + room), "loss")
    chart.y_axis("mean over the tokens of each round" + ("    dashed line: held out" if held_out else ""))
    chart.x_axis("seconds")
    if known:
        sheet.line([chart.at(*point) for point in known], BLUE, 2)
        for x, y in (chart.at(*point) for point in known):
            sheet.box(x - 1.5, y - 1.5, 3, 3, BLUE)
    if held_out:
        sheet.line([chart.at(*point) for point in held_out], GREEN, 2, "5 3")
        for point in held_out:
            x, y = chart.at(*point)
            sheet.box(x - 2, y - 2, 4, 4, GREEN, f"held out: {point[1]:.4f} nats a token")


def _participation(sheet: Sheet, top: float, recording: Recording, commits: list[Moment]) -> None:
    alive = _alive(recording)
    took = [(c.at_s, len(_included(c.event))) for c in commits]
    most = max([count for _, count in alive] + [count for _, count in took])
    chart = Chart(sheet, _box(top), (0, recording.seconds), (0, most + 0.5), "who takes part")
    chart.y_axis("dashed line: alive    bars: in the round")
    chart.x_axis("seconds")
    for at, count in took:
        x, y = chart.at(at, count)
        sheet.box(x - 2, y, 4, chart.bottom - y, GREEN, f"{count} in the round committed after {at:.0f} s")
    stairs = [(0.0, 0)]
    for at, count in alive:
        stairs += [(at, stairs[-1][1]), (at, count)]
    stairs.append((recording.seconds, stairs[-1][1]))
    sheet.line([chart.at(*step) for step in stairs], INK, 1.5, "5 3")


def _bytes(sheet: Sheet, top: float, recording: Recording, commits: list[Moment]) -> None:
    sizes = [(c.at_s, float(c.event.get("tx_bytes") or 0)) for c in commits]
    most = max(size for _, size in sizes) or 1.0
    scale, unit = next(
        (s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if most >= s or s == 1.0
    )
    chart = Chart(sheet, _box(top), (0, recording.seconds), (0, 1.1 * most / scale), "bytes sent")
    total = si(sum(size for _, size in sizes), "B")
    chart.y_axis(f"by all peers, from commit to commit; {total} in all", f" {unit}")
    chart.x_axis("seconds")
    for at, size in sizes:
        x, y = chart.at(at, size / scale)
        sheet.box(x - 2, y, 4, chart.bottom - y, SKY, f"{si(size, 'B')} after {at:.0f} s")


def _seats(sheet: Sheet, top: float, recording: Recording, stages: list[StageStory]) -> None:
    """Of each stage of a model in several: where a line falls, somebody was lost, and the stage is narrower."""
    most = max(story.most for story in stages)
    chart = Chart(sheet, _box(top), (0, recording.seconds), (0, most + 0.5), "seats of each stage")
    given_up = sum(story.given_up for story in stages)
    chart.y_axis(f"{len(stages)} stages; given up in a batch: {given_up}")
    chart.x_axis("seconds")
    for place, story in enumerate(stages):
        colour, dashes = STAGE_LINES[place % len(STAGE_LINES)]
        raised = 0.12 * (place % 4) if len(stages) > 1 else 0.0  # equal stages would hide each other
        steps = [(0.0, raised)]
        for at, count in story.stairs:
            steps += [(at, steps[-1][1]), (at, count + raised)]
        steps.append((recording.seconds, steps[-1][1]))
        sheet.line([chart.at(*step) for step in steps], colour, 2, dashes)
        if place < len(STAGE_LINES):
            x = LEFT + 330 + 92 * place
            sheet.line([(x, top - 12), (x + 18, top - 12)], colour, 2, dashes)
            sheet.words(x + 22, top - 8, f"stage {story.number}", 10)


def _waterfall(
    sheet: Sheet, top: float, recording: Recording, rounds: list[_Round], peers: list[str]
) -> None:
    """Each round has the same width, or long inner steps would leave no room for it."""
    sheet.words(LEFT, top - 8, f"the last {len(rounds)} rounds, each from its opening to the last state", 13)
    legend = (
        (SKY, "sends"),
        (PALE, "waits"),
        (GREEN, "gets results"),
        (BLUE, "applies"),
        (ORANGE, "× left out"),
    )
    for place, (colour, word) in enumerate(legend):
        x = LEFT + 410 + 86 * place
        sheet.box(x, top - 17, 10, 10, colour)
        sheet.words(x + 14, top - 8, word, 10)
    each = (WIDTH - LEFT - RIGHT) / len(rounds)
    for row, peer in enumerate(peers):
        sheet.words(LEFT - 6, top + ROW * row + 13, clean(recording.name(peer), 16), 10, "end")
    for column, done in enumerate(rounds):
        left, width = LEFT + column * each, each - 8
        over = max([done.committed, *done.sealed.values()])
        seconds = max(over - done.opened, 1e-3)
        for row, peer in enumerate(peers):
            _bars(sheet, done, peer, (left, top + ROW * row + 3, width / seconds))
        bottom = top + ROW * len(peers)
        sheet.line([(left - 4, top), (left - 4, bottom)], PALE)
        sheet.words(left, bottom + 14, f"{done.number}: {duration(over - done.opened)}", 9)


def _bars(sheet: Sheet, done: _Round, peer: str, place: tuple[float, float, float]) -> None:
    left, top, per_s = place
    if peer not in done.members:
        return
    if peer not in done.included:
        sheet.box(left, top, 10, ROW - 6, ORANGE, f"not in round {done.number}")
        sheet.words(left + 2, top + 10, "×", 11, fill="white")
        return
    sent = min(max(done.sent.get(peer, done.decided), done.opened), done.committed)
    sealed = max(done.sealed.get(peer, done.committed), done.committed)
    steps = ((done.opened, sent, SKY, "sends"), (sent, done.decided, PALE, "waits"),
             (max(sent, done.decided), done.committed, GREEN, "gets results"),
             (done.committed, sealed, BLUE, "applies"))  # fmt: skip
    for begun, over, colour, word in steps:
        if over > begun:
            x, wide = left + (begun - done.opened) * per_s, (over - begun) * per_s
            sheet.box(x, top, wide, ROW - 6, colour, f"{word} {duration(over - begun)}")


def _included(event: Any) -> list[str]:
    weights = event.get("weights") or []
    return [str(peer) for peer, weight in zip(event.get("members") or [], weights, strict=False) if weight]


def _alive(recording: Recording) -> list[tuple[float, int]]:
    here: set[str] = set()
    found = []
    for moment in recording.moments:
        kind, peer = moment.event.get("event"), str(moment.event.get("peer"))
        if moment.peer or kind not in ("admitted", "departed", "start"):
            continue
        here = set() if kind == "start" else here | {peer} if kind == "admitted" else here - {peer}
        found.append((moment.at_s, len(here)))
    return found


def _rounds(recording: Recording) -> list[_Round]:
    """Committed rounds, with what the peers' journals add."""
    opened: dict[int, float] = {}
    decided: dict[int, float] = {}
    found: dict[int, _Round] = {}
    sent: dict[tuple[int, str], float] = {}
    by_version: dict[tuple[int, int], _Round] = {}
    for moment in recording.moments:
        event, at = moment.event, moment.at_s
        number, kind = event.get("round"), event.get("event")
        if moment.peer and kind == "sent" and number is not None:
            sent[number, moment.peer] = at
        elif moment.peer and kind == "sealed":
            done = by_version.get((int(event.get("fragment") or 0), int(event.get("version") or 0)))
            if done is not None:
                done.sealed.setdefault(moment.peer, at)
        elif kind == "opened" and number is not None:
            opened.setdefault(number, at)
        elif kind == "decided" and number is not None and not moment.peer:
            decided[number] = at
        elif kind == "committed" and number is not None and not moment.peer:
            begun = opened.get(number, at)
            members = [str(peer) for peer in event.get("members") or []]
            done = _Round(number, begun, decided.get(number, at), at, set(_included(event)), members)
            done.sent = {peer: when for (of, peer), when in sent.items() if of == number}
            found[number] = by_version[int(event.get("fragment") or 0), int(event["version"])] = done
    return [found[number] for number in sorted(found)]
