"""Frames that a member of a stage sends to its neighbours, and what it has to know to write them.  Pure.

The lower half of the machine of microbatches (stage_scheduler.py), which is its only caller: that one decides, this
one writes it down.  Every frame names the seat that sends it, the table that it knew and the version that the batch
is learned from. Must not know why anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import (
    AGAIN,
    FOR_GOOD,
    MARK_AT,
    Effect,
    KeptPiece,
    SendCrossingFrame,
    SendKept,
    header_of,
)
from farflung.collectives.pipeline.microbatches import MicroState
from farflung.collectives.pipeline.seats import Seat, SeatPlace, Table
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.frames import Frame, FrameKind, Header, with_payload


class Sending:
    def __init__(self, place: SeatPlace, table: Table) -> None:
        self.place, self.table = place, table
        self.version, self.count = -1, 0
        self._me, self._stage = place.seat.number, place.seat.stage
        self._micros: dict[int, MicroState] = {}

    @property
    def _before(self) -> tuple[Seat, ...]:
        return self.table.living(self._stage - 1)

    @property
    def _after(self) -> tuple[Seat, ...]:
        return self.table.living(self._stage + 1)

    def _header(self, kind: FrameKind, micro: int = 0, mark: int = 0) -> Header:
        place = self.place
        return header_of(kind, place.run_tag, self._me, self.table.number, self.version, micro, mark)

    def _say(self, seat: int, kind: FrameKind, micro: int = 0, mark: int = 0) -> list[Effect]:
        return [SendCrossingFrame(self.table.seats[seat].peer, Frame(self._header(kind, micro, mark)))]

    def _say_room(self, seat: int, total: int) -> list[Effect]:
        return self._say(seat, CrossingKind.ROOM, total & (1 << MARK_AT) - 1, total >> MARK_AT)

    def _ask(self, seat: int, kind: FrameKind, micro: int) -> list[Effect]:
        """The question for a gradient says for which of two sendings of the microbatch."""
        record = self._micros.get(micro)
        for_good = kind == CrossingKind.WANT_GRADIENT and record is not None and record.out_for_good
        return self._say(seat, kind, micro, FOR_GOOD if for_good else 0)

    def _tell_held(self, seats: Iterable[Seat]) -> list[Effect]:
        """R3.  What was named once is not given back any more: whoever heard it may ask for it later."""
        lives = self.table.lives
        orphans = {m: each for m, each in self._micros.items() if each.has and not lives(each.prev)}
        for record in orphans.values():
            record.named = True
        frame = with_payload(self._header(CrossingKind.HELD), mask_to_bytes(mask_of(orphans)) or b"\0")
        return [SendCrossingFrame(seat.peer, frame) for seat in seats]

    def _pass_on(self, micro: int, record: MicroState) -> list[Effect]:
        mark = (AGAIN if record.again else 0) | (FOR_GOOD if record.out_for_good else 0)
        header = self._header(CrossingKind.ACTIVATION, micro, mark)
        return [SendKept(self.table.seats[record.next].peer, header, KeptPiece.OUTPUT)]

    def _give(self, micro: int, record: MicroState) -> list[Effect]:
        if not self.table.lives(record.prev):
            return []
        header = self._header(CrossingKind.GRADIENT, micro)
        return [SendKept(self.table.seats[record.prev].peer, header, KeptPiece.GIVEN)]
