"""Which frames of crossings are of any use by their header alone, and which ones came before their explanation.  Pure.

Asked by the machine of microbatches (stage_scheduler.py) for every frame, before a payload is looked at: rule R5.  An
early frame waits for the next table or version, in bounds: a flood pushes out nobody else's, and what is dropped is
asked for again like anything that is lost.  Must not know microbatches, or what follows from a frame.
"""

from __future__ import annotations

from collections import Counter

from farflung.collectives.pipeline.crossing import CrossingKind
from farflung.collectives.pipeline.effects import AGAIN, mark_of, seat_of, table_of
from farflung.collectives.pipeline.seats import Seat, Table
from farflung.protocol.frames import Frame, Header, Kind
from farflung.protocol.limits import BULK_HEADER_BYTES
from farflung.protocol.verdicts import Verdict

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
