"""The bulk frame: a fixed header and a raw payload, exactly two parts.

Built and read by the round, the state transfer and the data plane.  `parse` looks at nothing but the
header and the payload's length, so a frame is refused before its payload is touched.
Knows nothing of sockets, rounds or tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Flag, IntEnum, auto
from itertools import chain
from types import MappingProxyType
from typing import Self

from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError, Verdict
from farflung.protocol.limits import BULK_HEADER_BYTES

# Magic, kind, protocol, run, round, decision, version, chunk, ...
_LAYOUT = struct.Struct("<4sBxH8sQQQII32s16x")
_MAGIC = b"FFB\x01"
_NO_HASH = bytes(32)

assert _LAYOUT.size == BULK_HEADER_BYTES

Payload = bytes | bytearray | memoryview


class Trait(Flag):
    """What must be known of a kind by whoever carries its frames."""

    BARE = auto()  # a header alone
    ANSWER = auto()  # drawn by the other side's question: of such frames only so many wait
    CROSSING = auto()  # somebody computes nothing until it is there: it leaves before what is large
    OF_ROUND = auto()  # a part of a round, which may overtake what explains it; if bare, a question for one


NO_TRAITS = Trait(0)
ASKS = "WANT_"


class FrameKind(IntEnum):
    """A frame's number on the wire, given out once.  A mode has its own kinds in its folder, and tells of them where it
    begins (peer/machine/modes.py); whoever lacks the mode refuses them as unknown."""

    traits: Trait
    bare: bool
    crossing: bool
    of_round: bool

    def __new__(cls, number: int, traits: Trait = NO_TRAITS) -> Self:
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.traits = traits
        kind.bare, kind.crossing = Trait.BARE in traits, Trait.CROSSING in traits
        kind.of_round = Trait.OF_ROUND in traits
        return kind

    @property
    def overtakes(self) -> bool:
        """It may come before what explains it."""
        return self.of_round and not self.bare

    @property
    def question(self) -> FrameKind | None:
        """That asks for such a frame, which its name says."""
        return type(self).__members__.get(f"{ASKS}{self.name}")

    @property
    def answer(self) -> FrameKind | None:
        """Of a question: what it asks for."""
        return (
            type(self).__members__.get(self.name.removeprefix(ASKS)) if self.name.startswith(ASKS) else None
        )


Kinds = Mapping[int, FrameKind]  # that are known, by number


class Kind(FrameKind):
    """Those of the core."""

    CONTRIBUTION = 1, Trait.OF_ROUND  # member -> owner: one chunk of an encoded pseudo-gradient
    RESULT = 2, Trait.OF_ROUND  # owner -> members: one merged chunk of the round in flight
    LOGGED = 3, Trait.ANSWER  # anyone -> anyone: a committed result, out of the result log
    MANIFEST = 4, Trait.ANSWER  # donor -> joiner: the chunk hashes of the donor's version
    STATE = 5, Trait.ANSWER  # donor -> joiner: one chunk of outer state (parameters, then momentum)
    MISSING = 6, Trait.BARE | Trait.ANSWER  # "I do not have what you asked for"; `version` says where I am
    PING = 7  # "answer me": `chunk` is its number; a longer payload probes the line
    PONG = 8, Trait.BARE | Trait.ANSWER
    # donor -> joiner: "a round goes first; what you asked for of this chunk comes after it"
    LATER = 9, Trait.BARE | Trait.ANSWER
    WANT_CONTRIBUTION = 17, Trait.BARE | Trait.OF_ROUND
    WANT_RESULT = 18, Trait.BARE | Trait.OF_ROUND
    WANT_LOGGED = 19, Trait.BARE
    WANT_MANIFEST = 20, Trait.BARE
    WANT_STATE = 21, Trait.BARE
    # joiner -> joiner: "which pieces have you?  I know your word `decision_no`; answer when it is old"
    WANT_HAVE = 27, Trait.BARE
    # joiner -> joiner: masks of the pieces of `version` that I have, and of those that donors owe me
    HAVE = 28, Trait.ANSWER
    LEAN_ASKED = 34  # link to link (lean.py): "let me open a lean connection: my half of its secret"
    LEAN_GRANTED = 35, Trait.ANSWER  # "at this port, with this ticket: my half"


CORE_KINDS: Kinds = MappingProxyType({int(kind): kind for kind in Kind})
SERVED_KINDS = frozenset({Kind.STATE, Kind.LOGGED, Kind.MANIFEST})  # to somebody that catches up


def known_kinds(*of_modes: Iterable[FrameKind]) -> Kinds:
    """The core's and these."""
    known = dict(CORE_KINDS)
    for kind in chain(*of_modes):
        if known.setdefault(int(kind), kind) is not kind:
            raise ValueError(f"{kind.name} and {known[kind].name} have the same number, {int(kind)}")
    return known


@dataclass(frozen=True, slots=True)
class Header:
    kind: FrameKind
    run_tag: bytes  # first 8 bytes of the run id: frames of another run are refused
    round_no: int = 0
    decision_no: int = 0
    version: int = 0
    chunk: int = 0
    length: int = 0
    hash: bytes = _NO_HASH

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            _MAGIC,
            self.kind,
            1,
            self.run_tag,
            self.round_no,
            self.decision_no,
            self.version,
            self.chunk,
            self.length,
            self.hash,
        )


def parse(
    raw: Payload,
    payload_bytes: int,
    run_tag: bytes,
    payload_max: int,
    kinds: Kinds = CORE_KINDS,
) -> Header:
    """Header of a frame whose payload has `payload_bytes`; raises FrameError before the payload is read."""
    if len(raw) != BULK_HEADER_BYTES:
        raise FrameError(
            Verdict.MALFORMED, f"a bulk header has {BULK_HEADER_BYTES} bytes, this one {len(raw)}"
        )
    magic, kind, protocol, tag, round_no, decision_no, version, chunk, length, digest = _LAYOUT.unpack(raw)
    if magic != _MAGIC or protocol != 1:
        raise FrameError(Verdict.MALFORMED, "not a farflung bulk frame of protocol 1")
    if tag != run_tag:
        raise FrameError(Verdict.UNAUTHORISED, "a frame of another run")
    if payload_bytes > payload_max:
        raise FrameError(
            Verdict.OVERSIZE, f"payload of {payload_bytes} bytes, at most {payload_max} are expected"
        )
    if length != payload_bytes:
        raise FrameError(Verdict.MALFORMED, f"header says {length} bytes of payload, {payload_bytes} came")
    known = kinds.get(kind)
    if known is None:
        raise FrameError(Verdict.MALFORMED, f"unknown bulk kind {kind}")
    if known.bare != (length == 0):
        raise FrameError(Verdict.MALFORMED, f"{known.name} with {length} bytes of payload")
    return Header(known, tag, round_no, decision_no, version, chunk, length, digest)


def claimed(raw: Payload, run_tag: bytes, kinds: Kinds = CORE_KINDS) -> Header | None:
    """What a frame that was refused says of itself: enough to ask for it again, and for nothing else."""
    if len(raw) != BULK_HEADER_BYTES:
        return None
    magic, kind, protocol, tag, round_no, decision_no, version, chunk, length, digest = _LAYOUT.unpack(raw)
    if magic != _MAGIC or protocol != 1 or tag != run_tag or kind not in kinds:
        return None
    return Header(kinds[kind], tag, round_no, decision_no, version, chunk, length, digest)


def check_payload(header: Header, payload: Payload) -> None:
    if header.length and hash_bytes(payload) != header.hash:
        raise FrameError(
            Verdict.BAD_HASH, f"{header.kind.name} chunk {header.chunk}: payload does not match its hash"
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """What machines exchange: the simulator and the data plane turn it into two parts."""

    header: Header
    payload: Payload = b""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A frame of a contact that is not what it claims to be; `header` is None if not even that could be read."""

    verdict: Verdict
    header: Header | None


def bare_answer(kind: FrameKind, asked: Header) -> Frame:
    """MISSING or LATER: which question it answers, and nothing else."""
    return Frame(
        Header(kind, asked.run_tag, decision_no=int(asked.kind), version=asked.version, chunk=asked.chunk)
    )


def with_payload(header: Header, payload: Payload, payload_hash: bytes | None = None) -> Frame:
    """Complete a header with the length and hash of its payload."""
    digest = payload_hash if payload_hash is not None else hash_bytes(payload)
    full = Header(
        header.kind,
        header.run_tag,
        header.round_no,
        header.decision_no,
        header.version,
        header.chunk,
        len(payload),
        digest,
    )
    return Frame(full, payload)
