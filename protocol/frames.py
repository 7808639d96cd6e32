"""The bulk frame: a fixed header and a raw payload, exactly two parts.

Built and read by the round, the state transfer and the data plane.  `parse` looks at nothing but the
header and the payload's length, so a frame is refused before its payload is touched.
Knows nothing of sockets, rounds or tensors.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import FrameError
from farflung.protocol.limits import BULK_HEADER_BYTES
from farflung.protocol.verdicts import Verdict

# Magic, kind, protocol, run, round, decision, version, chunk, ...
_LAYOUT = struct.Struct("<4sBxH8sQQQII32s16x")
_MAGIC = b"FFB\x01"
_NO_HASH = bytes(32)

assert _LAYOUT.size == BULK_HEADER_BYTES

Payload = bytes | bytearray | memoryview


class Kind(IntEnum):
    CONTRIBUTION = 1  # member -> owner: one chunk of an encoded pseudo-gradient
    RESULT = 2  # owner -> members: one merged chunk of the round in flight
    LOGGED = 3  # anyone -> anyone: a committed result, out of the result log
    MANIFEST = 4  # donor -> joiner: the chunk hashes of the donor's version
    STATE = 5  # donor -> joiner: one chunk of outer state (parameters, then momentum)
    MISSING = 6  # "I do not have what you asked for"; `version` says where I am
    PING = 7  # "answer me": `chunk` is its number; a longer payload probes the line
    PONG = 8
    LATER = 9  # donor -> joiner: "a round goes first; what you asked for of this chunk comes after it"
    ACTIVATION = 11  # stage s -> s + 1: what one microbatch sends over their border
    GRADIENT = 12  # stage s + 1 -> s: the gradient of it
    HELD = 13  # stage s + 1 -> s: the microbatches here whose holder in stage s is gone
    ROOM = 14  # stage s + 1 -> s: `chunk` activations of this batch you may have sent me in all
    IDLE = (
        15  # stage s + 1 -> s: "I have next to nothing to do"; `chunk` says how soon one more would be done
    )
    GIVEN_BACK = 16  # stage s + 1 -> s: "I have not begun it and never will: give it to somebody else"
    WANT_CONTRIBUTION = 17
    WANT_RESULT = 18
    WANT_LOGGED = 19
    WANT_MANIFEST = 20
    WANT_STATE = 21
    WANT_ACTIVATION = 23
    WANT_GRADIENT = 24
    WANT_HELD = 25
    WANT_BACK = 26  # stage s -> s + 1: "if you have not begun it, another seat can do it sooner"
    WANT_HAVE = 27  # joiner -> joiner: "which pieces have you?  I know your word `decision_no`; answer when it is old"
    HAVE = (
        28  # joiner -> joiner: masks of the pieces of `version` that I have, and of those that donors owe me
    )
    AHEAD = 29  # member -> owner: one chunk of an encoded pseudo-gradient, before the round that it is for
    AHEAD_HELD = 30  # owner -> member: "of this chunk I keep the bytes with this hash"
    AHEAD_COUNTS = 31  # member -> owner: "those bytes are my contribution to this round"
    # "I lost the coordinator: where is it?  I know the list `version`; answer when yours is newer."
    WANT_WHERE = 32
    WHERE = 33  # the list that the coordinator signed: Whereabouts in join_url.py
    LEAN_ASKED = 34  # link to link (lean_side.py): "let me open a lean connection: my half of its secret"
    LEAN_GRANTED = 35  # "at this port, with this ticket: my half"
    SUM = 36  # owner -> root, in a mesh: what my group's contributions to one chunk add up to
    WANT_SUM = 37


WANTS = frozenset(kind for kind in Kind if Kind.WANT_CONTRIBUTION <= kind <= Kind.WANT_HAVE) | {
    Kind.WANT_WHERE,
    Kind.WANT_SUM,
}
ANSWERS = frozenset({Kind.STATE, Kind.LOGGED, Kind.MANIFEST})  # of who serves somebody that catches up
CROSSING_KINDS = frozenset(
    {
        Kind.ACTIVATION,
        Kind.GRADIENT,
        Kind.HELD,
        Kind.ROOM,
        Kind.IDLE,
        Kind.GIVEN_BACK,
        Kind.WANT_ACTIVATION,
        Kind.WANT_GRADIENT,
        Kind.WANT_HELD,
        Kind.WANT_BACK,
    }
)
# Where the model is in one piece nobody has a use for crossings: they are unknown there, and refused as such.
ONE_STAGE_KINDS = frozenset(Kind) - CROSSING_KINDS
ALL_KINDS = frozenset(Kind)
_ABOUT_CROSSINGS = {Kind.ROOM, Kind.IDLE, Kind.GIVEN_BACK}
_BARE = WANTS | _ABOUT_CROSSINGS | {Kind.MISSING, Kind.PONG, Kind.LATER, Kind.AHEAD_HELD, Kind.AHEAD_COUNTS}


@dataclass(frozen=True, slots=True)
class Header:
    kind: Kind
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
    kinds: frozenset[Kind] = ONE_STAGE_KINDS,
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
    if kind not in kinds:
        raise FrameError(Verdict.MALFORMED, f"unknown bulk kind {kind}")
    known = Kind(kind)
    if (known in _BARE) != (length == 0):
        raise FrameError(Verdict.MALFORMED, f"{known.name} with {length} bytes of payload")
    return Header(known, tag, round_no, decision_no, version, chunk, length, digest)


def claimed(raw: Payload, run_tag: bytes, kinds: frozenset[Kind] = ONE_STAGE_KINDS) -> Header | None:
    """What a frame that was refused says of itself: enough to ask for it again, and for nothing else."""
    if len(raw) != BULK_HEADER_BYTES:
        return None
    magic, kind, protocol, tag, round_no, decision_no, version, chunk, length, digest = _LAYOUT.unpack(raw)
    if magic != _MAGIC or protocol != 1 or tag != run_tag or kind not in kinds:
        return None
    return Header(Kind(kind), tag, round_no, decision_no, version, chunk, length, digest)


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


def bare_answer(kind: Kind, asked: Header) -> Frame:
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
