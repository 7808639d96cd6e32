"""The agent's hand for crossings: keeps them, sends them, and passes them to the trainer over the belt and back.

Owned by the agent of a stage, which carries out here what the peer machine says of microbatches.  Nothing is decided:
the machine names pieces, this hand has their bytes.  A trainer that comes gets a belt of its own, so that one that is
just ending writes into nothing that anybody reads.  Must not know seats, stages, or what is in a crossing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from farflung.collectives.pipeline.effects import KeptPiece, micro_of
from farflung.compression.codec import payload_bytes
from farflung.peer.agent.mode_hand import ModeHand
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.batches.stage_transfers import crossing_bytes_most
from farflung.peer.crossings.shared_slots import GIVEN, MADE, PLACES, RETURNED, SharedSlots, slot_of
from farflung.peer.local.words import MicrobatchWork, WorkDone
from farflung.peer.machine.effects import ModeEffect
from farflung.peer.state.outer_state import unnamed_file
from farflung.protocol.caps import CROSSINGS_BYTES
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import StoreError, UserError
from farflung.protocol.frames import Frame, Payload, with_payload
from farflung.protocol.run_terms import Attached

# ---- kept crossings ----------------------------------------------------------------------------------------
# What a member of a stage keeps of microbatches until their batch commits: what came, what was made, both
# ways.
#
# Used by the agent's loop, which carries out `Keep`, `SendKept` and `Forget` of
# collectives/pipeline/stage_scheduler.py here. Nothing is dropped earlier: before the commit somebody may
# need any of it, and after it nobody could make it again. Up to a limit it lies in memory; what comes beyond
# that goes into a file beside the peer's key, one for each version. The file has no name, so it is gone with
# the process, however that ends. What comes back from it is compared with its hash. Writing is done in the
# loop: it is a copy into the kernel's cache, as long as the disk keeps up with the line.
#
# What can't be kept is an error, and nothing that was kept before is lost by it. Must not know who asks for a
# piece, nor what is in it.

What = tuple[int, KeptPiece]  # microbatch, and which piece of it


class _Place(NamedTuple):
    at: int
    length: int
    hash: bytes


@dataclass
class _KeptVersion:
    in_memory: dict[What, Payload] = field(default_factory=dict)
    on_disk: dict[What, _Place] = field(default_factory=dict)
    file: BinaryIO | None = None
    file_bytes: int = 0


class KeptCrossings:
    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """`folder`: where a file may lie, made when one is needed.  `limit_bytes`: so much stays in memory."""
        self._folder, self._limit_bytes = folder, limit_bytes
        self._versions: dict[int, _KeptVersion] = {}
        self.memory_bytes = 0
        self._closed = False

    @property
    def disk_bytes(self) -> int:
        """As long as the files are, with pieces in them that were kept anew since."""
        return sum(kept.file_bytes for kept in self._versions.values())

    def keep(self, version: int, micro: int, piece: KeptPiece, payload: Payload) -> None:
        """The payload is not copied where it stays in memory: nobody may change it.  What was kept there before goes.

        StoreError if it fits nowhere; then all that was kept before still is.
        """
        if self._closed:
            raise StoreError("crossings are not kept any more: this peer is about to end")
        kept, what = self._versions.setdefault(version, _KeptVersion()), (micro, piece)
        before = len(kept.in_memory.get(what, b""))
        if self.memory_bytes - before + len(payload) <= self._limit_bytes:
            kept.in_memory[what] = payload
            kept.on_disk.pop(what, None)
            self.memory_bytes += len(payload) - before
            return
        kept.on_disk[what] = self._written(kept, payload)
        kept.in_memory.pop(what, None)
        self.memory_bytes -= before

    def get(self, version: int, micro: int, piece: KeptPiece) -> Payload | None:
        """None: it was never kept, or its version is forgotten.  StoreError if the disk does not give it back."""
        kept, what = self._versions.get(version), (micro, piece)
        if kept is None:
            return None
        place = kept.on_disk.get(what)
        if place is None or kept.file is None:
            return kept.in_memory.get(what)
        try:
            kept.file.seek(place.at)
            payload = kept.file.read(place.length)
        except OSError as error:
            raise self._failed("can't be read back", error.strerror or str(error)) from None
        if hash_bytes(payload) != place.hash:
            raise self._failed("came back damaged", f"the {piece} of microbatch {micro} at version {version}")
        return payload

    def forget(self, version: int) -> None:
        """All that is kept of this version and of older ones: memory, and room on the disk."""
        for old in [each for each in self._versions if each <= version]:
            kept = self._versions.pop(old)
            self.memory_bytes -= sum(map(len, kept.in_memory.values()))
            if kept.file is not None:
                kept.file.close()

    def close(self) -> None:
        """Nothing is kept any more.  A second time does nothing."""
        self.forget(max(self._versions, default=-1))
        self._closed = True

    def _written(self, kept: _KeptVersion, payload: Payload) -> _Place:
        """At the end of the version's file.  What a failed attempt left there is written over by the next one."""
        place = _Place(kept.file_bytes, len(payload), hash_bytes(payload))
        try:
            if kept.file is None:
                kept.file = unnamed_file(self._folder)
            kept.file.seek(place.at)
            left = memoryview(payload).cast("B")
            while left:  # a file that fills the disk takes a part, and says why when it is asked again
                left = left[kept.file.write(left) :]
        except OSError as error:
            raise self._failed("can't be written", error.strerror or str(error)) from None
        kept.file_bytes += place.length
        return place

    def _failed(self, what: str, why: str) -> StoreError:
        held = f"{self.memory_bytes / 1e6:.0f} MB in memory, {self.disk_bytes / 1e6:.0f} MB on disk"
        return StoreError(
            f"{self._folder}: crossings of a batch that is not committed {what}: {why}. Kept now: {held}. "
            "Make room on this disk"
        )


# ---- crossing hand -----------------------------------------------------------------------------------------


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
