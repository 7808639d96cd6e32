"""What a machine did, as text that a person can read: each event, the state that it led to, and its effects.

Used by tests of machines whose effects are plain data (a peer's replica, the coordinator's driver).
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, structs

from farflung.collectives.round.effects import SendFrame
from farflung.protocol.frames import Frame


class Transcript:
    """`state`: of the machine, in a few words; it is written down where an event changed it."""

    def __init__(self, state: Callable[[], str]) -> None:
        self._state = state
        self._last = state()
        self.lines: list[str] = []

    def __call__(self, event: str, effects: Iterable[object] = ()) -> None:
        self.lines.append(event)
        if self._state() != self._last:
            self.lines.append(f"    {self._last} -> {self._state()}")
            self._last = self._state()
        self.lines += [f"    {line_of(effect)}" for effect in effects]

    @property
    def text(self) -> str:
        return "\n".join(["", *self.lines, ""])


def told(text: str) -> str:
    """A transcript as it stands in a test, indented with it."""
    return textwrap.dedent(text)


def line_of(effect: object) -> str:
    if isinstance(effect, SendFrame):
        return f"to {effect.to}: {line_of(effect.frame)}"
    if isinstance(effect, Frame):
        header = effect.header
        place = [f"chunk {header.chunk}"] + [f"version {header.version}"] * (header.round_no == 0)
        return f"{header.kind.name} {', '.join(place)}"
    return f"{type(effect).__name__} {', '.join(_fields(effect))}".rstrip()


def _fields(effect: object) -> Iterable[str]:
    """Those that are not empty.  Bytes are told by their beginning, and a message within an effect by its name."""
    named: dict[str, Any] = (
        structs.asdict(effect)
        if isinstance(effect, Struct)
        else {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}  # type: ignore[arg-type]
    )
    for name, value in named.items():
        if name in ("session", "seq") or value is None or value in ("", b"", ()):
            continue
        if isinstance(value, bool):
            yield name if value else f"not {name}"
            continue
        yield f"{name} {_told(value)}"


def _told(value: object) -> str:
    if isinstance(value, bytes):
        return repr(value[:8])[2:-1] if value.isascii() else value[:4].hex()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return f"[{' '.join(map(_told, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_told(key)}: {_told(each)}' for key, each in value.items())}}}"
    return line_of(value) if isinstance(value, Struct) or dataclasses.is_dataclass(value) else str(value)
