"""What members and people hear of the batch: with every tick a seat, grants and the table of seats; in the status how
far it is, and what batches of this length cost.  Pure.

Called by `batches.py`, which decides all of it.  A table is told whole, of the member's own stage and of those beside
it, whenever the member names an older one; so a tick that is lost, or comes late, does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from farflung.collectives.pipeline.seats import Table
from farflung.coordinator.batches.batch_book import Batch, BatchBook, BookedSeat, mask_of_spans
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.limits import MEMBERS_PER_ROUND, SEATS_TOLD
from farflung.protocol.messages import BatchTick, SeatRow


def tick_of(batch: Batch, seat: BookedSeat | None, freeze: bool) -> BatchTick:
    """Of a model in one piece."""
    return BatchTick(
        version=batch.version,
        epoch=batch.epoch,
        start=batch.start,
        stop=batch.stop,
        count=batch.count,
        seat=seat.number if seat is not None else 0,
        granted=tuple(seat.granted) if seat is not None else (),
        freeze=freeze,
    )


def staged_tick_of(
    book: BatchBook,
    batch: Batch,
    seat: BookedSeat | None,
    freeze: bool,
    stage: int,
    knows: int,
    doubted: Sequence[int] = (),
) -> BatchTick:
    """Of a model in several stages.  `stage`: the member's; `knows`: the newest table that it has; `doubted`: seats
    that somebody complains of."""
    plain = tick_of(batch, seat, freeze)
    return BatchTick(
        version=plain.version,
        epoch=plain.epoch,
        start=plain.start,
        stop=plain.stop,
        count=plain.count,
        seat=plain.seat,
        granted=plain.granted,
        freeze=freeze,
        again=mask_to_bytes(book.again(seat)) if seat is not None else b"",
        table_no=book.table_no,
        table=_told(book.table, stage) if knows != book.table_no else None,
        skipped=mask_to_bytes(mask_of_spans(batch.skipped)),
        doubted=tuple(doubted)[:MEMBERS_PER_ROUND],
    )


# A table is the same object until another one takes its place, and all members of a stage are told the same.
@lru_cache(maxsize=64)
def _told(table: Table, stage: int) -> tuple[SeatRow, ...]:
    """All who are here; of those who are gone the newest, by which members know what they have to ask again."""
    near = [row for row in table.seats.values() if abs(row.stage - stage) <= 1]
    here = [row for row in near if row.lives]
    gone = sorted((row for row in near if not row.lives), key=lambda row: row.gone)
    room = max(0, SEATS_TOLD - len(here))
    told = sorted(here + (gone[-room:] if room else []), key=lambda row: row.number)
    return tuple(SeatRow(row.number, row.peer, row.stage, row.share, row.since, row.gone) for row in told)


def row_of(book: BatchBook, samples: int, counted: int, costs: dict[str, object] | None) -> dict[str, object]:
    """For the status.  `samples`: of an epoch; `counted`: the mask of what is counted in every stage."""
    batch = book.batch
    return {
        "samples": samples or None,
        "epoch": batch.epoch if batch is not None else book.cursor[0],
        "start": batch.start if batch is not None else book.cursor[1],
        "stop": batch.stop if batch is not None else None,
        "microbatches": batch.whole.bit_count() if batch is not None else None,
        "counted": (counted & batch.whole).bit_count() if batch is not None else 0,
        "skipped_samples": book.skipped_samples,  # ever: nobody got a finite gradient out of them
        "costs": costs,
    }
