"""The agent's hand for crossings: keeps them, sends them, and passes them to the trainer over the belt and back.

Owned by the agent of a stage, which carries out here what the peer machine says of microbatches.  Nothing is decided:
the machine names pieces, this hand has their bytes.  A trainer that comes gets a belt of its own, so that one that is
just ending writes into nothing that anybody reads.  Must not know seats, stages, or what is in a crossing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from farflung.collectives.pipeline.effects import KeptPiece, micro_of
from farflung.compression.codec import payload_bytes
from farflung.peer.agent.mode_hand import ModeHand
from farflung.peer.batches.effects import (
    ForgetCrossings,
    HandOver,
    KeepCrossing,
    SendCrossing,
)
from farflung.peer.batches.stage_boundaries import crossing_bytes_most
from farflung.peer.crossings.kept_crossings import KeptCrossings
from farflung.peer.crossings.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.peer.local.words import MicrobatchWork, WorkDone
from farflung.peer.machine.effects import ModeEffect
from farflung.protocol.caps import CROSSINGS_BYTES
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.frames import Frame, Payload, with_payload
from farflung.protocol.run_terms import Attached


def largest_bytes(attached: Attached) -> int:
    """Of all crossings of this run, whichever stage this peer holds.  UserError for what can't be sent."""
    try:
        return crossing_bytes_most(attached.model, attached.known.manifest.pipeline, payload_bytes)
    except ValueError as error:
        raise UserError(f"what goes from one stage to the next can't be sent: {error}") from None


def made(
    belt: Path, folder: Path, send: Callable[[str, Frame], object], tell: Callable[[MicrobatchWork], None]
) -> CrossingHand:
    return CrossingHand(belt, KeptCrossings(folder, CROSSINGS_BYTES), send, tell)


class CrossingHand(ModeHand):
    def __init__(
        self,
        path: Path,
        kept: KeptCrossings,
        send: Callable[[str, Frame], object],
        tell: Callable[[MicrobatchWork], None],
    ) -> None:
        """`path`: of the belt.  `send`: a frame to a peer; `tell`: a word to the trainer."""
        self.path = path
        self.kept = kept
        self._send, self._tell = send, tell
        self._belt: SharedSlots | None = None

    @property
    def memory_bytes(self) -> int:
        return self.kept.memory_bytes

    @property
    def disk_bytes(self) -> int:
        return self.kept.disk_bytes

    def begin(self, slot_bytes: int) -> str:
        """UserError if there is no room."""
        self._belt = SharedSlots.create(self.path, PLACES, slot_bytes)
        return str(self.path)

    def take(self, word: WorkDone, place: int | None) -> Payload:
        """What lies there: a copy, since the slot is soon written again.  Empty where there is nothing to take."""
        belt = self._belt
        if belt is None or place is None or not 0 < word.bytes_made <= belt.slot_bytes:
            return b""  # the machine compares it with what is due
        return belt.read(slot_of(place, MADE), word.bytes_made)

    def carry_out(self, effect: ModeEffect) -> None:
        """StoreError where the disk fails: what others may need is not here then, and this peer can't go on."""
        match effect:
            case KeepCrossing(version=version, micro=micro, piece=piece, payload=payload):
                self.kept.keep(version, micro, piece, payload)
            case ForgetCrossings(version=version):
                self.kept.forget(version)
            case SendCrossing(to=to, header=header, piece=piece):
                payload = self._kept(header.version, micro_of(header), piece)
                self._send(to, with_payload(header, payload))
            case HandOver(hand=hand):
                self._hand_over(hand)
            case _:
                super().carry_out(effect)

    def _hand_over(self, hand: MicrobatchWork) -> None:
        belt = self._belt
        if belt is None:
            raise RuntimeError("work for a trainer that has not come yet")
        for which, piece, length in (
            (GIVEN, KeptPiece.INPUT, hand.given_bytes),
            (RETURNED, KeptPiece.RETURNED, hand.returned_bytes),
        ):
            if length:
                belt.write(slot_of(hand.place, which), self._kept(hand.version, hand.micro, piece))
        self._tell(hand)

    def _kept(self, version: int, micro: int, piece: KeptPiece) -> Payload:
        payload = self.kept.get(version, micro, piece)
        if payload is None:
            raise StoreError(f"the {piece} of microbatch {micro} at version {version} was kept, and is gone")
        return payload

    def close(self) -> None:
        self.kept.close()
