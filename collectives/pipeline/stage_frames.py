"""The frames of crossings: those that came before their explanation or are of no use, and those sent.  Pure."""

from __future__ import annotations

from collections import Counter
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
    mark_of,
    seat_of,
    table_of,
)
from farflung.collectives.pipeline.microbatches import MicroState
from farflung.collectives.pipeline.seats import Seat, SeatPlace, Table
from farflung.protocol.digests import mask_of, mask_to_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, with_payload
from farflung.protocol.limits import BULK_HEADER_BYTES

# ---- early frames ------------------------------------------------------------------------------------------
# Which frames of crossings are of any use by their header alone, and which ones came before their
# explanation. Pure.
#
# Asked by the machine of microbatches (stage_scheduler.py) for every frame, before a payload is looked at:
# rule R5. An early frame waits for the next table or version, in bounds: a flood pushes out nobody else's,
# and what is dropped is asked for again like anything that is lost. Must not know microbatches, or what
# follows from a frame.

_FROM_BEFORE = frozenset(
    {CrossingKind.ACTIVATION, CrossingKind.WANT_GRADIENT, CrossingKind.WANT_HELD, CrossingKind.WANT_BACK}
)
_FROM_AFTER = frozenset(
    {
        CrossingKind.GRADIENT,
        CrossingKind.HELD,
        CrossingKind.ROOM,
        CrossingKind.IDLE,
        CrossingKind.GIVEN_BACK,
        CrossingKind.WANT_ACTIVATION,
    }
)
_ANSWERS = frozenset({Kind.LATER, Kind.MISSING})  # of the stage after, to a question for a gradient
# These may give a microbatch to another holder, or say that it has none: only by a table that both know.
_MOVING = frozenset({CrossingKind.WANT_GRADIENT, CrossingKind.WANT_HELD, CrossingKind.HELD})


def refusal(mine: Seat, table: Table, version: int, sender: str, header: Header) -> Verdict | None:
    """Why a frame to this seat is of no use, whatever it carries; None: it may be.  `version`: below 0, none yet."""
    if header.version < version:
        return Verdict.STALE
    if header.version > version + 1 and version >= 0:
        return Verdict.STALE  # I am far behind, and hear of it from the coordinator
    if table_of(header) < mine.since:
        return Verdict.STALE  # meant for a seat that my peer had before this one
    seat = table.seats.get(seat_of(header))
    if seat is None:
        return None if table_of(header) > table.number else Verdict.STALE
    if seat.peer != sender:
        return Verdict.UNAUTHORISED
    if not seat.lives:
        return Verdict.STALE
    return None if _fits(seat.stage - mine.stage, header) else Verdict.UNAUTHORISED


def _fits(stages_on: int, header: Header) -> bool:
    """Whether the stage that is so far on from mine sends me this kind."""
    if header.kind in _ANSWERS:
        return stages_on == 1 and mark_of(header) == CrossingKind.WANT_GRADIENT
    return (header.kind in _FROM_BEFORE and stages_on == -1) or (
        header.kind in _FROM_AFTER and stages_on == 1
    )


def is_early(table: Table, version: int, header: Header) -> bool:
    """Of a frame that is not refused: its reader can't judge it before its next version or table."""
    if header.version > version or seat_of(header) not in table.seats:
        return True
    moving = header.kind in _MOVING or (
        header.kind == CrossingKind.ACTIVATION and mark_of(header) & AGAIN != 0
    )
    return moving and table_of(header) > table.number


# ---- early frames ------------------------------------------------------------------------------------------------

EARLY_FRAMES = 512
EARLY_BYTES = 256 * 1024 * 1024


class EarlyFrames:
    def __init__(self, frames: int = EARLY_FRAMES, bytes_most: int = EARLY_BYTES) -> None:
        self._frames, self._bytes_most = frames, bytes_most
        self._kept: list[tuple[str, Frame]] = []
        self._held: Counter[str] = Counter()  # bytes, by sender

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sender: str, frame: Frame) -> int:
        """How many were dropped for it: the sender with most bytes here loses its oldest one first."""
        self._kept.append((sender, frame))
        self._held[sender] += _size(frame)
        dropped = 0
        while len(self._kept) > self._frames or self._held.total() > self._bytes_most:
            greedy = max(sorted(self._held), key=lambda each: self._held[each])
            place = next(at for at, (each, _) in enumerate(self._kept) if each == greedy)
            self._held[greedy] -= _size(self._kept.pop(place)[1])
            dropped += 1
        return dropped

    def take_all(self) -> list[tuple[str, Frame]]:
        taken, self._kept = self._kept, []
        self._held.clear()
        return taken


def _size(frame: Frame) -> int:
    return BULK_HEADER_BYTES + len(frame.payload)


# ---- frame sender ------------------------------------------------------------------------------------------
# Frames that a member of a stage sends to its neighbours, and what it has to know to write them. Pure.
#
# The lower half of the machine of microbatches (stage_scheduler.py), which is its only caller: that one
# decides, this one writes it down. Every frame names the seat that sends it, the table that it knew and the
# version that the batch is learned from. Must not know why anything is sent.


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
