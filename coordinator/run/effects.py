"""What the run machine asks its shell to do, in this order.  `Write` must be durable before what follows it."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from farflung.coordinator.ledger.records import Record
from farflung.protocol.errors import NoteCause
from farflung.protocol.messages import ToDoor, ToMember
from farflung.protocol.round_words import Commit
from farflung.protocol.signed_words import SignedList


@dataclass(frozen=True, slots=True)
class Write:
    record: Record


@dataclass(frozen=True, slots=True)
class AnswerDoor:
    caller: bytes  # opaque to the machine: which connection asked
    message: ToDoor


@dataclass(frozen=True, slots=True)
class Tell:
    peer: str
    session: bytes
    message: ToMember


@dataclass(frozen=True, slots=True)
class Allow:
    """From now on the members' socket accepts this CURVE key."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Forbid:
    key: bytes
    cut: bool = False  # what it sends is not read any more, and its connections are closed


@dataclass(frozen=True, slots=True)
class DialBack:
    """Try to reach a member's data plane; `on_dialled` takes the answer."""

    peer: str
    session: bytes
    address: str
    key: bytes


class HandEffect:
    """Of a mode: its own hand carries it out (`ServerHand`)."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    routine: bool = False  # it happens in every round
    cause: NoteCause = NoteCause.NEWS


@dataclass(frozen=True, slots=True)
class KeepEvidence:
    """The signed hash lists that led to a commit: for the audit, not for going on."""

    commit: Commit
    said: tuple[SignedList, ...]


@dataclass(frozen=True, slots=True)
class KeepProof:
    """Somebody cheated, and this shows it to anybody.  The run's own signature, where it needs one, is the shell's."""

    proof: Struct  # of a mode (coordinator/court/proofs.py)
    peers: tuple[str, ...] = ()  # who is out for it, with whoever signed it


Effect = Write | AnswerDoor | Tell | Allow | Forbid | DialBack | HandEffect | Note | KeepEvidence | KeepProof
