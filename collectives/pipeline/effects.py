"""What the machine of microbatches asks its shell to do, what the trainer tells it, and how its frames are marked.

Returned by stage_scheduler.py and carried out in order by an agent, or by the world of the tests.  The machine holds
no bytes of crossings: it names pieces, and the shell keeps them, in memory or on disk.

A frame's header has its usual form, with meanings of this room: `version` is the state that the batch is learned from,
`decision_no` is the sender's seat and the number of the table that it knew, `chunk` is the microbatch with a mark above
it: of an activation AGAIN, where somebody who is gone may have passed it on, and FOR_GOOD, where it was taken back from
somebody once and is taken back from nobody any more; the latter too of a question for a gradient; of LATER and MISSING
the kind of the question; of IDLE and WANT_BACK how soon it would be done elsewhere, in hundredths of a second.
`round_no` stays 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farflung.protocol.frames import Frame, FrameKind, Header, Payload

MARK_AT = 16  # bits: microbatches of a batch fit below
_SEAT_AT = 32
AGAIN, FOR_GOOD = 1, 2  # marks


def header_of(
    kind: FrameKind, run_tag: bytes, seat: int, table: int, version: int, micro: int, mark: int = 0
) -> Header:
    return Header(
        kind, run_tag, decision_no=seat << _SEAT_AT | table, version=version, chunk=mark << MARK_AT | micro
    )


def seat_of(header: Header) -> int:
    return header.decision_no >> _SEAT_AT


def table_of(header: Header) -> int:
    return header.decision_no & (1 << _SEAT_AT) - 1


def micro_of(header: Header) -> int:
    return header.chunk & (1 << MARK_AT) - 1


def mark_of(header: Header) -> int:
    return header.chunk >> MARK_AT


class FlowDirection(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"  # the last stage: loss and gradient at once


class KeptPiece(StrEnum):
    """What is kept of a microbatch until its batch is committed."""

    INPUT = "input"  # the activation that came; of a source: nothing, it reads the samples
    OUTPUT = "output"  # the activation that was made
    RETURNED = "returned"  # the gradient that came back for it
    GIVEN = "given"  # the gradient that was made


class NoteReason(StrEnum):
    """Of a note: what the coordinator, or a person, should hear of."""

    DAMAGED = "damaged"  # a seat sent damaged frames again
    SILENT = "silent"  # it was asked again and again and said nothing
    CONTESTED = "contested"  # two living seats say that a microbatch is theirs
    UNUSABLE = "unusable"  # the trainer got nothing out of a microbatch


@dataclass(frozen=True, slots=True)
class SendCrossingFrame:
    to: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class SendKept:
    """The shell completes the header with length and hash of the piece."""

    to: str
    header: Header
    piece: KeptPiece


@dataclass(frozen=True, slots=True)
class GiveWork:
    """Work for the trainer: forward with the input; backward with input and returned gradient; both with the input."""

    way: FlowDirection
    version: int
    micro: int


@dataclass(frozen=True, slots=True)
class KeepCrossingPiece:
    version: int
    micro: int
    piece: KeptPiece
    payload: Payload


@dataclass(frozen=True, slots=True)
class Forget:
    """All that is kept of this version and of older ones: its batch is committed, or nobody needs it from here."""

    version: int


@dataclass(frozen=True, slots=True)
class FlowNote:
    cause: NoteReason
    seat: int
    micro: int


@dataclass(frozen=True, slots=True)
class SeatLost:
    """My seat is gone: the sums of the batch are of no use to anybody, and a new seat is asked for."""

    seat: int


Effect = SendCrossingFrame | SendKept | GiveWork | KeepCrossingPiece | Forget | FlowNote | SeatLost


@dataclass(frozen=True, slots=True)
class WorkMade:
    """The trainer's answer to a `GiveWork`.  Backward and both: the gradient is in its sums."""

    way: FlowDirection
    version: int
    micro: int
    payload: Payload = b""  # the activation or the gradient that goes on; none of a source's gradient
    problem: str = ""  # why there is nothing
