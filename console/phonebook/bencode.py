"""Bencoding, and the messages of the BitTorrent DHT that a phone book needs: BEP 5's `get` and `put` of BEP 44.  Pure.

Written and read by bittorrent.py.  What arrives comes from strangers: it is short, it is read strictly, and nothing
of it is believed.  A record of BEP 44 is signed by the key that names it; here the signature comes from elsewhere,
so that the run's key is never in a process that speaks with strangers.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from farflung.protocol.join_url import Address

DATAGRAM_BYTES = 2000
DEPTH_MOST = 6
ID_BYTES = 20
SALT = b"farflung"
NODES_MOST = 16  # of one answer
_NODE_BYTES = ID_BYTES + 6

Value = int | bytes | list["Value"] | dict[bytes, "Value"]


class NoBencode(ValueError):
    """These bytes are none."""


def encoded(value: Value) -> bytes:
    match value:
        case int():
            return b"i%de" % value
        case bytes():
            return b"%d:%s" % (len(value), value)
        case list():
            return b"l" + b"".join(encoded(each) for each in value) + b"e"
        case dict():
            return b"d" + b"".join(encoded(key) + encoded(value[key]) for key in sorted(value)) + b"e"


def decoded(raw: bytes) -> Value:
    value, end = _read(raw, 0, 0)
    if end != len(raw):
        raise NoBencode("there is more behind it")
    return value


def _read(raw: bytes, at: int, depth: int) -> tuple[Value, int]:
    mark = raw[at : at + 1]
    if depth > DEPTH_MOST:
        raise NoBencode("too deep")
    if mark == b"i":
        end = raw.find(b"e", at, at + 22)
        return _number(raw[at + 1 : end] if end > 0 else b""), end + 1
    if mark in (b"l", b"d"):
        return _read_many(raw, at + 1, depth + 1, is_map=mark == b"d")
    colon = raw.find(b":", at, at + 6)
    size = _number(raw[at:colon] if colon > 0 else b"")
    if size < 0 or colon + 1 + size > len(raw):
        raise NoBencode("cut off")
    return raw[colon + 1 : colon + 1 + size], colon + 1 + size


def _read_many(raw: bytes, at: int, depth: int, is_map: bool) -> tuple[Value, int]:
    found: list[Value] = []
    while raw[at : at + 1] != b"e":
        value, at = _read(raw, at, depth)
        found.append(value)
    if not is_map:
        return found, at + 1
    keys = [each for each in found[::2] if isinstance(each, bytes)]
    if len(keys) * 2 != len(found):
        raise NoBencode("a map needs a value for each name")
    return dict(zip(keys, found[1::2], strict=True)), at + 1


def _number(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit():
        raise NoBencode("no number")
    return int(digits)


# ---- BEP 44 -------------------------------------------------------------------------------------------------------


def target_of(key: bytes) -> bytes:
    """Where in the DHT the record of that ed25519 key lies."""
    return hashlib.sha1(key + SALT, usedforsecurity=False).digest()


def to_sign(number: int, record: bytes) -> bytes:
    """What the signature of a record covers."""
    return b"4:salt" + encoded(SALT) + b"3:seq" + encoded(number) + b"1:v" + encoded(record)


class Node(NamedTuple):
    number: bytes  # its id; empty: not known yet
    at: tuple[str, int]


class Answer(NamedTuple):
    """Of a node, to a `get` or a `put`."""

    number: bytes
    nodes: tuple[Node, ...]
    token: bytes
    record: bytes


def question(tag: bytes, mine: bytes, kind: bytes, words: dict[bytes, Value]) -> bytes:
    """`ro`: this is no node, and nobody is to remember it."""
    arguments: Value = {b"id": mine, **words}
    return encoded({b"t": tag, b"y": b"q", b"q": kind, b"a": arguments, b"ro": 1})


def answer_in(raw: bytes) -> tuple[bytes, Answer | None] | None:
    """(the tag of the question, the answer; None for an error); None: it is no message of the DHT."""
    try:
        said = decoded(raw)
    except (NoBencode, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(tag := said.get(b"t"), bytes):
        return None
    body = said.get(b"r")
    if said.get(b"y") != b"r" or not isinstance(body, dict):
        return (tag, None) if said.get(b"y") == b"e" else None
    number, nodes, token, record = (body.get(name) for name in (b"id", b"nodes", b"token", b"v"))
    if not isinstance(number, bytes) or len(number) != ID_BYTES:
        return None
    return tag, Answer(
        number,
        _nodes_in(nodes) if isinstance(nodes, bytes) else (),
        token if isinstance(token, bytes) else b"",
        record if isinstance(record, bytes) else b"",
    )


def _nodes_in(raw: bytes) -> tuple[Node, ...]:
    found = []
    for at in range(0, min(len(raw), NODES_MOST * _NODE_BYTES) - _NODE_BYTES + 1, _NODE_BYTES):
        number, where = raw[at : at + ID_BYTES], raw[at + ID_BYTES : at + _NODE_BYTES]
        place = Address(".".join(map(str, where[:4])), int.from_bytes(where[4:], "big"))
        if place.port:
            found.append(Node(number, (place.host, place.port)))
    return tuple(found)
