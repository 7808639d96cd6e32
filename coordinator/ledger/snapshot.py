"""The ledger as bytes and back: what a long journal is folded into, so that a run of months has a journal of megabytes.

Called by the ledger, for the record `Folded`.  The bytes are plain data (msgpack), written and read along the types of
the dataclasses; fields with a leading underscore follow from the others and are not in it.  Pure.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec


def packed(whole: object) -> bytes:
    return msgspec.msgpack.encode(_plain(whole))


def unpacked(raw: bytes, kind: type[Any]) -> Any:
    """What was packed, which was of this kind.  Errors: those of a record that cannot be read."""
    return built(kind, msgspec.msgpack.decode(raw))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {each: _plain(getattr(value, each)) for each in _fields(type(value))}
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, deque):
        return [value.maxlen, [_plain(each) for each in value]]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value  # msgspec's own structures, numbers, texts and bytes


@cache
def _fields(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if not each.name.startswith("_")}


def built(kind: Any, raw: Any) -> Any:
    if is_dataclass(kind):
        return _object(kind, raw)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        [other] = [each for each in inner if each is not types.NoneType]
        return None if raw is None else built(other, raw)
    build: Callable[[Any, Any], Any] | None = _CONTAINERS.get(origin)
    if build is not None:
        return build(kind, raw)
    if isinstance(origin, type) and issubclass(origin, dict):
        # A Counter names the type of its keys alone.
        of_key, of_value = inner if len(inner) == 2 else (*inner, int)
        return origin({built(of_key, key): built(of_value, each) for key, each in raw})
    return msgspec.convert(raw, kind)


def _object(kind: Any, raw: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, of_field in _fields(kind).items():
        # A snapshot from before the field was thought of says nothing of it.
        value = built(of_field, raw[name]) if name in raw else _default(kind, name)
        object.__setattr__(made, name, value)
    after = getattr(made, "after_unpacking", None)
    if after is not None:
        after()
    return made


def _default(kind: type[Any], name: str) -> Any:
    field = next(each for each in fields(kind) if each.name == name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        raise msgspec.ValidationError(f"the folded ledger has no {name}")
    return field.default


def _tuple(kind: Any, raw: Any) -> tuple[Any, ...]:
    inner = get_args(kind)
    if inner[-1] is Ellipsis:
        return tuple(built(inner[0], each) for each in raw)
    return tuple(built(each, value) for each, value in zip(inner, raw, strict=True))


def _deque(kind: Any, raw: Any) -> deque[Any]:
    most, found = raw
    return deque((built(get_args(kind)[0], each) for each in found), maxlen=most)


_CONTAINERS: dict[Any, Callable[[Any, Any], Any]] = {
    list: lambda kind, raw: [built(get_args(kind)[0], each) for each in raw],
    set: lambda kind, raw: {built(get_args(kind)[0], each) for each in raw},
    tuple: _tuple,
    deque: _deque,
}
