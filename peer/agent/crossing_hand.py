"""The agent's hand for crossings: keeps them, sends them, and passes them to the trainer over the belt and back.

Owned by the agent of a stage, which carries out here what the peer machine says of microbatches.  Nothing is decided:
the machine names pieces, this hand has their bytes.  A trainer that comes gets a belt of its own, so that one that is
just ending writes into nothing that anybody reads.  Must not know seats, stages, or what is in a crossing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from farflung.collectives.pipeline.effects import KeptPiece, micro_of
from farflung.peer.agent.kept_crossings import KeptCrossings
from farflung.peer.local.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.peer.local.words import MicrobatchWork, WorkDone
from farflung.peer.machine import effects as do
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, Payload, with_payload


class CrossingHand:
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

    def begin(self, crossing_bytes: int) -> str:
        """A trainer came, which says how long a slot is; UserError if there is no room.  Where its belt lies."""
        self._belt = SharedSlots.create(self.path, PLACES, crossing_bytes)
        return str(self.path)

    def take(self, word: WorkDone, place: int | None) -> Payload:
        """What lies there: a copy, since the slot is soon written again.  Empty where there is nothing to take."""
        belt = self._belt
        if belt is None or place is None or not 0 < word.bytes_made <= belt.slot_bytes:
            return b""  # the machine compares it with what is due
        return belt.read(slot_of(place, MADE), word.bytes_made)

    def carry_out(self, effect: do.HandOver | do.KeepCrossing | do.ForgetCrossings | do.SendCrossing) -> None:
        """StoreError where the disk fails: what others may need is not here then, and this peer can't go on."""
        match effect:
            case do.KeepCrossing(version=version, micro=micro, piece=piece, payload=payload):
                self.kept.keep(version, micro, piece, payload)
            case do.ForgetCrossings(version=version):
                self.kept.forget(version)
            case do.SendCrossing(to=to, header=header, piece=piece):
                payload = self._kept(header.version, micro_of(header), piece)
                self._send(to, with_payload(header, payload))
            case do.HandOver(hand=hand):
                self._hand_over(hand)

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
