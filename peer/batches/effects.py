"""What the mode asks its hand to do (peer/crossings, or the simulator)."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.collectives.pipeline.effects import KeptPiece
from farflung.peer.local.words import MicrobatchWork
from farflung.peer.machine.effects import ModeEffect
from farflung.protocol.frames import Header, Payload


@dataclass(frozen=True, slots=True)
class HandOver(ModeEffect):
    """Work for the trainer of a stage: copy the kept pieces that it names into the belt, then tell it."""

    hand: MicrobatchWork


@dataclass(frozen=True, slots=True)
class KeepCrossing(ModeEffect):
    """Until `ForgetCrossings`.  A piece that is kept already stands for another seat: the new one takes its place."""

    version: int
    micro: int
    piece: KeptPiece
    payload: Payload


@dataclass(frozen=True, slots=True)
class ForgetCrossings(ModeEffect):
    """All that is kept of this version and of older ones."""

    version: int


@dataclass(frozen=True, slots=True)
class SendCrossing(ModeEffect):
    """Complete the header with length and hash of a kept piece, and send it."""

    to: str
    header: Header
    piece: KeptPiece
