"""Crossings between the line, what is kept and the belt: whose bytes lie where, and what a trainer's word may claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import KeptPiece, header_of
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.crossings.crossing_hand import CrossingHand, KeptCrossings
from farflung.peer.crossings.shared_slots import MADE, PLACES, SharedSlots, slot_of
from farflung.peer.local.words import MicrobatchWork, WorkDone
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, check_payload

SLOT_BYTES = 100


class Stage:
    def __init__(self, folder: Path) -> None:
        self.sent: list[tuple[str, Frame]] = []
        self.told: list[MicrobatchWork] = []
        kept = KeptCrossings(folder, 10_000)
        self.hand = CrossingHand(
            folder / "belt", kept, lambda to, frame: self.sent.append((to, frame)), self.told.append
        )
        self.trainer = self.come()

    def come(self) -> SharedSlots:
        """A trainer, which opens what it is told of."""
        return SharedSlots.open(self.hand.begin(SLOT_BYTES), PLACES, SLOT_BYTES)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def work(place: int, given: int, returned: int = 0) -> MicrobatchWork:
    return MicrobatchWork(
        way="backward" if returned else "forward",
        version=3,
        micro=7,
        epoch=0,
        start=14,
        stop=16,
        place=place,
        given_bytes=given,
        returned_bytes=returned,
    )


def made(nbytes: int) -> WorkDone:
    return WorkDone(way="forward", version=3, micro=7, bytes_made=nbytes, tokens=1, loss=None, problem="")


def test_work_is_told_when_its_pieces_lie_in_its_place(stage: Stage) -> None:
    stage.hand.carry_out(KeepCrossing(3, 7, KeptPiece.INPUT, b"activation"))
    stage.hand.carry_out(KeepCrossing(3, 7, KeptPiece.RETURNED, memoryview(b"gradient")))
    stage.hand.carry_out(HandOver(work(1, 10, 8)))
    assert stage.told == [work(1, 10, 8)]
    assert (stage.trainer.read(3, 10), stage.trainer.read(4, 8)) == (b"activation", b"gradient")
    stage.hand.carry_out(HandOver(work(0, 0)))
    assert stage.trainer.read(0, 10) == bytes(10), "a source reads its samples itself"


def test_what_was_made_is_copied_before_the_slot_is_written_again(stage: Stage) -> None:
    stage.trainer.write(slot_of(1, MADE), b"made")
    taken = stage.hand.take(made(4), 1)
    stage.trainer.write(slot_of(1, MADE), b"next")
    assert taken == b"made"


@pytest.mark.parametrize(("nbytes", "place"), [(0, 0), (-1, 0), (SLOT_BYTES + 1, 0), (4, None)])
def test_P8_nothing_is_taken_that_can_not_lie_there(stage: Stage, nbytes: int, place: int | None) -> None:
    assert stage.hand.take(made(nbytes), place) == b""


def test_a_trainer_that_is_ending_writes_into_nothing_that_the_next_one_uses(stage: Stage) -> None:
    old = stage.trainer
    new = stage.come()
    old.write(slot_of(0, MADE), b"late")
    assert stage.hand.take(made(4), 0) == bytes(4)
    new.write(slot_of(0, MADE), b"good")
    assert stage.hand.take(made(4), 0) == b"good"


def test_a_kept_piece_is_sent_with_its_length_and_hash_until_it_is_forgotten(stage: Stage) -> None:
    header = header_of(CrossingKind.ACTIVATION, bytes(8), 5, 2, 3, 7, 1)
    stage.hand.carry_out(KeepCrossing(3, 7, KeptPiece.OUTPUT, b"activation"))
    stage.hand.carry_out(SendCrossing("bob", header, KeptPiece.OUTPUT))
    [(to, frame)] = stage.sent
    assert to == "bob" and frame.header.length == 10 and frame.header.chunk == header.chunk
    check_payload(frame.header, frame.payload)
    stage.hand.carry_out(ForgetCrossings(3))
    with pytest.raises(StoreError, match="the output of microbatch 7 at version 3 was kept, and is gone"):
        stage.hand.carry_out(SendCrossing("bob", header, KeptPiece.OUTPUT))
