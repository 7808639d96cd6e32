"""A run as a page of HTML, and what of it has changed since the last one.  Pure.

Called once a tick, whoever looks: every viewer is handed the same bytes.  A page is a frame and parts; each part is one
element with its id, and an update is the parts that read differently now.  Must not know sockets, nor a status: it sees
only what public.py lets through.  Everything that is text goes through `escape`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from farflung.console.web.public import Leader, Person, PublicHeldOut, PublicStage, PublicStatus, PublicText
from farflung.protocol.caps import duration, si

# ---- chart -------------------------------------------------------------------------------------------------
# The curve of a run's loss as a drawing that stretches with the page, and its axes as text beside it. Pure.
#
# The drawing holds lines alone and is stretched to any width; what is read stands outside
# of it in HTML, so that it is as large on a phone as elsewhere. Colours are the style sheet's.

Curve = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 1000, 240
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LINES = 4  # horizontal ones, about


class Axis(NamedTuple):
    low: float
    high: float
    step: float

    @property
    def ticks(self) -> list[float]:
        return [self.low + n * self.step for n in range(round((self.high - self.low) / self.step) + 1)]


def axis_of(low: float, high: float) -> Axis:
    """Around the two, from one round number to another, with round steps between."""
    span = max(high - low, abs(high) * 1e-3, 1e-6)
    power = 10.0 ** math.floor(math.log10(span / _LINES))
    step = next(power * factor for factor in _STEPS if span / (power * factor) <= _LINES)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, max(last, first + 1) * step, step)


def loss_words(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def summary(curve: Curve) -> str:
    """What the drawing shows, for whoever does not see it."""
    if not curve:
        return "No round is committed yet."
    (first, began), (last, now) = curve[0], curve[-1]
    if first == last:
        return f"{loss_words(now)} at round {last:,.0f}."
    lowest_at, lowest = min(curve, key=lambda point: point[1])
    told = f"From {loss_words(began)} at round {first:,.0f} to {loss_words(now)} at round {last:,.0f}"
    return f"{told}; the lowest was {loss_words(lowest)}, at round {lowest_at:,.0f}."


def chart(curve: Curve, held_out: Curve = ()) -> str:
    """The drawing and what it shows in words; words alone where there is nothing to draw.  `held_out`: a second line,
    where it lies within the first."""
    also = f" Dashed, on text that nobody learns from: {lowered(summary(held_out))}" if held_out else ""
    says = f'<p class="dim" id="curve-says">{escape(summary(curve) + also)}</p>'
    if len(curve) < 2:
        return f'{says}<p class="empty">The curve begins with the second round.</p>'
    first, last = curve[0][0], curve[-1][0]
    held_out = [each for each in held_out if first <= each[0] <= last]
    losses = [loss for _, loss in (*curve, *held_out)]
    axis = axis_of(min(losses), max(losses))
    points = [_point(each, axis, first, last) for each in curve]
    rungs = "".join(
        f'<path class="rung" d="M0 {y:.1f}H{WIDTH}"/>' for y in (_height(tick, axis) for tick in axis.ticks)
    )
    line = "L".join(points)
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-labelledby="curve-says">'
        f"{rungs}"
        f'<path class="under" d="M{line}V{HEIGHT}H0Z"/><path class="curve" d="M{line}"/>'
        f"{_second(held_out, axis, first, last)}</svg>"
    )
    rows = "".join(f"<span>{_tick(tick, axis.step)}</span>" for tick in reversed(axis.ticks))
    columns = "".join(f"<span>{each}</span>" for each in _rounds(first, last))
    return (
        f'{says}<div class="plot"><div class="y" aria-hidden="true">{rows}</div>{drawing}'
        f'<div class="x" aria-hidden="true">{columns}</div></div>'
    )


def _second(curve: Curve, axis: Axis, first: float, last: float) -> str:
    points = "L".join(_point(each, axis, first, last) for each in curve)
    return f'<path class="curve held" d="M{points}"/>' if len(curve) > 1 else ""


def lowered(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _point(each: tuple[float, float], axis: Axis, first: float, last: float) -> str:
    return f"{(each[0] - first) / (last - first) * WIDTH:.1f} {_height(each[1], axis):.1f}"


def _height(loss: float, axis: Axis) -> float:
    return (axis.high - loss) / (axis.high - axis.low) * HEIGHT


def _tick(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += step * 10**decimals % 1 > 1e-6  # steps of 2.5
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"


def _rounds(first: float, last: float) -> list[str]:
    """The begin, the middle and the end of the horizontal axis."""
    middle = [f"{(first + last) / 2:,.0f}"] if last - first >= 4 else []
    return [f"round {first:,.0f}", *middle, f"{last:,.0f}"]


# ---- page --------------------------------------------------------------------------------------------------

RELOAD_S = 30  # without JavaScript
_HOW = {
    "open": "Anybody may join, and leave at any time. A GPU helps; Linux and Python 3.11 are needed.",
    "token": "This run is by invitation: ask whoever hosts it for a join URL of your own.",
    "allowlist": "This run is for peers on a list: ask whoever hosts it to put yours on it.",
}
_SCRIPT = (
    "It trains by a script of its own, which whoever hosts it gives you: here it is called train.py. Read it first, "
    "since it is run as you."
)
_NOBODY = {
    "people": '<tr class="none"><td colspan="5">Nobody yet.</td></tr>',
    "leaders": '<tr class="none"><td colspan="4">The first round will tell.</td></tr>',
}


def parts_of(seen: PublicStatus) -> dict[str, str]:
    """By id.  A row of a table is a part of its own, so that an update needs no more than the rows that changed."""
    parts = {
        "verdict": _verdict(seen),
        "progress": _progress(seen),
        "tiles": _tiles(seen),
        "curve": f'<div id="curve">{chart(seen.curve, seen.held_out.curve if seen.held_out else ())}</div>',
        "written": _written(seen.written),
        "here": f'<p id="here" class="dim">{escape(_here(seen))}</p>',
        "foot": _foot(seen),
    }
    if seen.stages:
        parts["narrow"] = f'<p id="narrow" class="dim">{escape(_narrow(seen.stages))}</p>'
    for stage in seen.stages:
        parts[f"s{stage.number}"] = _stage(stage, f"s{stage.number}")
    for at, person in enumerate(seen.people):
        parts[f"p{at}"] = _person(person, f"p{at}", bool(seen.stages))
    for at, leader in enumerate(seen.leaders):
        parts[f"l{at}"] = _leader(at + 1, leader, f"l{at}")
    return parts


def shape_of(seen: PublicStatus) -> str:
    """What an update can't change: of another shape the page is loaded anew."""
    return f"{seen.run}/{seen.software}/{seen.admission}/{len(seen.stages)}"


def update_of(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The parts that differ.  A table that has more or fewer rows than before is sent whole, below the name of its
    body."""
    changed = {key: html for key, html in now.items() if before.get(key) != html}
    for body, letter in (("people", "p"), ("leaders", "l")):
        if _rows(before, letter) != _rows(now, letter):
            changed = {key: html for key, html in changed.items() if key not in _rows(now, letter)}
            changed[body] = body_of(body, now)
    return changed


def whole_of(now: Mapping[str, str]) -> dict[str, str]:
    """For a viewer of whom it is not known what it has."""
    return update_of({}, now) | {body: body_of(body, now) for body in ("people", "leaders")}


def body_of(body: str, parts: Mapping[str, str]) -> str:
    rows = [parts[key] for key in _rows(parts, body[0])] or [_NOBODY[body]]
    return f'<tbody id="{body}">{"".join(rows)}</tbody>'


def _rows(parts: Mapping[str, str], letter: str) -> list[str]:
    return [key for key in parts if key[0] == letter and key[1:].isdigit()]


def event_of(number: str, shape: str, parts: Mapping[str, str]) -> bytes:
    """A server-sent event.  JSON has no line break in it, so it is one line."""
    told = json.dumps({"shape": shape, "parts": dict(parts)}, separators=(",", ":"))
    return f"id: {number}\ndata: {told}\n\n".encode()


def page_of(seen: PublicStatus, parts: Mapping[str, str], number: str, url: str, version: str) -> bytes:
    """The whole page.  `number`: of the newest update that is in it; `url`: for who joins, shown where anybody may;
    `version`: of the style sheet and the script, so that browsers keep them."""
    name = escape(seen.run)
    describes = escape(f"{seen.run}: one model, trained by {seen.alive} computers over the internet.")
    body = "".join(
        (
            '<a class="skip" href="#main">Skip to the run</a>',
            f'<header><p class="brand">{_MARK}farflung</p>{_LIVE}</header><main id="main">',
            f'<div class="title"><h1>{name}</h1><div role="status">{parts["verdict"]}</div></div>',
            parts["progress"],
            parts["tiles"],
            _section("loss", "Loss", parts["curve"], "wide"),
            parts["written"],
            _stages(seen, parts),
            f'<div class="columns">{_people(seen, parts)}<div>{_join(seen, url)}{_leaders(parts)}</div></div>',
            f"</main>{parts['foot']}",
        )
    )
    return (
        f'<!doctype html><html lang="en" data-seen="{escape(number)}" data-shape="{escape(shape_of(seen))}"><head>'
        f'<meta charset="utf-8"><title>{name} · farflung</title><meta name="description" content="{describes}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<noscript><meta http-equiv="refresh" content="{RELOAD_S}"></noscript>'
        f'<link rel="icon" href="icon.svg"><link rel="stylesheet" href="page.css?{version}">'
        f'<script src="page.js?{version}" defer></script></head><body>{body}</body></html>'
    ).encode()


# ---- the top ---------------------------------------------------------------------------------------------

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><g fill="none" stroke="#3b7ddd" stroke-width="2">'
    '<path d="M5 18 12 5l7 13M5 18h14"/></g><g fill="#3b7ddd"><circle cx="12" cy="5" r="3.4"/>'
    '<circle cx="5" cy="18" r="3.4"/><circle cx="19" cy="18" r="3.4"/></g></svg>'
)
_MARK = ICON.replace("<svg ", '<svg class="mark" aria-hidden="true" ').replace("#3b7ddd", "currentColor")
_LIVE = (
    '<p class="live" id="live"><span class="dot" aria-hidden="true"></span><span id="live-says">'
    f"as of when the page was loaded</span><noscript>, again every {RELOAD_S} s</noscript></p>"
)


def _verdict(seen: PublicStatus) -> str:
    verdict = seen.verdict
    return (
        f'<p id="verdict"><strong class="chip {verdict.tone}">{escape(verdict.word)}</strong> '
        f"{escape(verdict.text)}</p>"
    )


def _progress(seen: PublicStatus) -> str:
    rounds = f"Round {seen.version:,.0f} of {seen.target:,.0f}" if seen.target else "No round yet"
    left = "" if seen.eta_s is None or seen.finished else f"about {duration(seen.eta_s)} to go"
    right = left or ("complete" if seen.finished else f"{seen.share:.0%}")
    return (
        f'<div id="progress"><p class="ends"><span>{rounds}</span><span class="dim">{right}</span></p>'
        f'<progress max="1000" value="{seen.share * 1000:.0f}" aria-label="{rounds}">{seen.share:.0%}</progress>'
        f'<p class="dim">{escape(seen.phase)}</p></div>'
    )


def _tiles(seen: PublicStatus) -> str:
    tiles = (
        ("Loss", "–", "no round yet")
        if seen.loss is None
        else ("Loss", loss_words(seen.loss), "of the last round"),
        *([_held_out(seen.held_out)] if seen.held_out else []),
        ("Learned", _tokens(seen.tokens), "tokens in the model"),
        ("Speed", _tokens(seen.tokens_per_s), "tokens a second, together"),
        ("Peers", f"{seen.taking_part:,}", f"take part, of {seen.alive:,} here"),
    )
    rows = "".join(
        f"<div><dt>{title}</dt><dd><b>{value}</b> <span>{note}</span></dd></div>"
        for title, value, note in tiles
    )
    return f'<dl id="tiles">{rows}</dl>'


def _held_out(seen: PublicHeldOut) -> tuple[str, str, str]:
    at = f"round {seen.version:,.0f}"
    if seen.loss is None:
        return "Held out", "–", f"contested at {at}"
    more = [
        f"{value:.3g} {unit}"
        for value, unit in ((seen.perplexity, "perplexity"), (seen.bits_per_byte, "bits a byte"))
        if value is not None
    ]
    by = "one peer's word" if seen.peers == 1 else f"by {seen.peers:,} peers"
    return "Held out", loss_words(seen.loss), f"{at}, {by}; {', '.join(more)}" if more else f"{at}, {by}"


def _written(text: PublicText | None) -> str:
    if text is None:
        return '<div id="written" hidden></div>'
    by = f"{text.peers:,} peers say the same" if text.peers > 1 else "one peer's word"
    told = f'<p class="dim">From the first words of a held-out text, at round {text.version:,.0f}; {by}.</p>'
    words = f'<pre class="words"><span>{escape(text.began)}</span>{escape(text.went_on)}</pre>'
    return f'<div id="written">{_section("writes", "What it writes", told + words, "wide")}</div>'


def _tokens(count: float) -> str:
    """As people who train models write them: a thousand million are a B."""
    return si(count).replace("G", "B")


def _foot(seen: PublicStatus) -> str:
    software = f" farflung {escape(seen.software)}." if seen.software else ""
    return (
        f'<footer id="foot"><p>The run began {duration(seen.elapsed_s)} ago.{software} '
        "Names are what peers call themselves. Tokens count once a round that used them is committed.</p></footer>"
    )


# ---- the sections ----------------------------------------------------------------------------------------


def _section(name: str, title: str, inside: str, style: str = "") -> str:
    head = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section class="card {style}" aria-labelledby="{name}-title">{head}{inside}</section>'


def _table(name: str, titles: Sequence[tuple[str, str]], body: str) -> str:
    """`titles`: each with the class of its column.  A table that is too wide moves in its own frame, also by keys."""
    head = "".join(f'<th scope="col" class="{style}">{title}</th>' for title, style in titles)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}-title"><table>'
        f"<thead><tr>{head}</tr></thead>{body}</table></div>"
    )


def _cells(key: str, name: str, cells: Sequence[tuple[str, str]], style: str = "") -> str:
    """A row: its name, which heads it, and cells of HTML with their classes."""
    rest = "".join(f'<td class="{how}">{inside}</td>' for inside, how in cells)
    return f'<tr id="{key}" class="{style}"><th scope="row">{name}</th>{rest}</tr>'


def _here(seen: PublicStatus) -> str:
    more = seen.alive - len(seen.people)
    if not seen.alive:
        return "Nobody is here now."
    return f"{seen.alive:,} here, {seen.taking_part:,} in the rounds" + (
        f"; the first {len(seen.people)} are shown." if more > 0 else "."
    )


def _people(seen: PublicStatus, parts: Mapping[str, str]) -> str:
    stage = [("Stage", "number")] if seen.stages else []
    titles = [("Peer", ""), ("Now", ""), *stage, ("Here for", "number"), ("Tokens/s", "number")]
    return _section(
        "people", "Who is here", parts["here"] + _table("people", titles, body_of("people", parts))
    )


def _person(person: Person, key: str, in_stages: bool) -> str:
    stage = [("–" if person.stage is None else str(person.stage), "number")] if in_stages else []
    cells = [
        (escape(person.does), ""),
        *stage,
        ("–" if person.here_s is None else _coarse(person.here_s), "number"),
        (_tokens(person.tokens_per_s) if person.tokens_per_s else "–", "number"),
    ]
    dot = f'<span class="dot {"in" if person.takes_part else "out"}" aria-hidden="true"></span>'
    return _cells(key, dot + escape(person.name), cells, "" if person.takes_part else "out")


def _coarse(seconds: float) -> str:
    """So that a row does not change with every look."""
    return "under a minute" if seconds < 60 else duration(60 * round(seconds / 60))


def _leaders(parts: Mapping[str, str]) -> str:
    titles = [("Peer", ""), ("Tokens", "number"), ("Share", "number"), ("", "track")]
    table = _table("leaders", titles, body_of("leaders", parts))
    told = '<p class="dim">By tokens in the model since the run began.</p>'
    return _section("leaders", "Top contributors", told + table)


def _leader(rank: int, leader: Leader, key: str) -> str:
    track = (
        '<svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect class="rail" width="100" '
        f'height="8" rx="2"/><rect class="fill" width="{100 * leader.share:.1f}" height="8" rx="2"/></svg>'
    )
    gone = "" if leader.here else ' <span class="gone">gone</span>'
    name = f'<span class="rank">{rank}</span> {escape(leader.name)}{gone}'
    cells = [
        (_tokens(leader.tokens), "number"),
        (f"{leader.share:.1%}", "number"),
        (track, "track"),
    ]
    return _cells(key, name, cells)


def _stages(seen: PublicStatus, parts: Mapping[str, str]) -> str:
    if not seen.stages:
        return ""
    titles = [
        ("Stage", ""),
        ("Peers", "number"),
        ("Counted", "number"),
        ("Microbatches/s", "number"),
        ("Version", "number"),
    ]
    body = f"<tbody>{''.join(parts[f's{stage.number}'] for stage in seen.stages)}</tbody>"
    return _section("stages", "Stages", parts["narrow"] + _table("stages", titles, body), "wide")


def _stage(stage: PublicStage, key: str) -> str:
    rate = stage.micros_per_s
    narrow = ' <span class="chip warn">narrow</span>' if stage.narrow else ""
    cells = [
        (f"{stage.peers:,.0f}", "number"),
        (f"{stage.counted:,.0f} of {stage.of:,.0f}" if stage.of else "–", "number"),
        ("–" if rate is None else f"{rate:.2f}" if rate < 100 else si(rate), "number"),
        (f"{stage.version:,.0f}", "number"),
    ]
    return _cells(key, f"Stage {stage.number}{narrow}", cells)


def _narrow(stages: Sequence[PublicStage]) -> str:
    told = "The model is cut into stages; every batch passes through all of them."
    held = [f" Stage {stage.number} holds the others up: {stage.narrow}." for stage in stages if stage.narrow]
    return told + "".join(held)


def _join(seen: PublicStatus, url: str) -> str:
    if seen.finished:
        return _section(
            "join", "Take part", "<p>The run is complete: there is nothing left to train.</p>", "join"
        )
    told = f"<p>{_HOW.get(seen.admission, 'How to join is not known yet.')}</p>"
    if seen.admission == "open":
        script = "--script train.py " if seen.needs_script else ""
        told += f"<p>{_SCRIPT}</p>" if script else ""
        told += _command("Train until the run ends; Ctrl-C leaves cleanly:", f'farflung join {script}"{url}"')
        told += _command("Can this machine take part?", f'farflung doctor "{url}"')
    return _section("join", "Take part", told, "join")


def _command(why: str, words: str) -> str:
    return f'<p class="why">{why}</p><pre class="command" tabindex="0"><code>{escape(words)}</code></pre>'
