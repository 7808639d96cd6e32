"""Transcripts of a machine that a person can read: each event, and below it the effects, one a line.

A test keeps the whole transcript as text.  Lines that begin with "> " are events; the test says how to read them.

    > step
    > hear Resume spare=1
        GoOn

    def play(event: str) -> list[Effect]: ...      # of the test: one line in, what the machine answers

    check_transcript(text, play)

Any machine whose effects are dataclasses or msgspec structs can be told like that.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

MOST_BYTES = 4  # of a long value of bytes that are shown


def told(thing: object, hidden: Iterable[str] = ()) -> str:
    """`Name field=value ...`, without the fields that have their defaults; `hidden` ones are left out too."""
    left_out = set(hidden)
    fields = {name: value for name, value in _fields(thing).items() if name not in left_out}
    name, only = type(thing).__name__, next(iter(fields.values()), None)
    if len(fields) == 1 and _is_record(only):
        return f"{name} {told(only, hidden)}"
    return " ".join([name, *(f"{field}={_value(value)}" for field, value in fields.items())])


def check_transcript(text: str, play: Callable[[str], Iterable[object]], hidden: Iterable[str] = ()) -> None:
    """Plays the events of the text; the effects must be those that stand below them.

    `play` answers with effects, or with lines of text where an event shows something of the machine's state.
    """
    expected = textwrap.dedent(text).strip("\n").splitlines()
    happened: list[str] = []
    for line in expected:
        if line.startswith("> "):
            answers = play(line[2:].partition("  #")[0].strip())
            happened.append(line)
            happened += [f"    {each}" for answer in answers for each in _lines(answer, hidden)]
    assert "\n".join(happened) == "\n".join(line.rstrip() for line in expected if line.strip())


def _lines(answer: object, hidden: Iterable[str]) -> list[str]:
    """What holds nothing but several records is told over several lines."""
    if isinstance(answer, str):
        return [answer]
    values = list(_fields(answer).values())
    inner = values[0] if len(values) == 1 else None
    if isinstance(inner, tuple) and inner and all(map(_is_record, inner)):
        if len(inner) == 1:
            return [f"{type(answer).__name__} {told(inner[0], hidden)}"]
        return [type(answer).__name__, *(f"    {told(each, hidden)}" for each in inner)]
    return [told(answer, hidden)]


def _fields(thing: object) -> dict[str, object]:
    if isinstance(thing, msgspec.Struct):
        defaults = {each.name: each.default for each in msgspec.structs.fields(thing)}
    elif dataclasses.is_dataclass(thing):
        defaults = {each.name: each.default for each in dataclasses.fields(thing)}
    else:
        raise TypeError(f"{thing!r} is no record")
    values = {name: getattr(thing, name) for name in defaults}
    # By type too: 0 is equal to False.
    return {n: v for n, v in values.items() if type(v) is not type(defaults[n]) or v != defaults[n]}


def _is_record(value: object) -> bool:
    return isinstance(value, msgspec.Struct) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _value(value: object) -> str:
    match value:
        case Enum():
            return _value(value.value)
        case bool():
            return "true" if value else "false"
        case bytes():
            return value[:MOST_BYTES].hex() + ("..." if len(value) > MOST_BYTES else "")
        case str():
            return repr(value) if not value or " " in value else value
        case tuple() | list():
            return f"[{', '.join(_value(each) for each in value)}]"
        case _ if _is_record(value):
            return f"({told(value)})"
        case _:
            return repr(value)
