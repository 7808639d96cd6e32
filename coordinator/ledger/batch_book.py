"""Who computes which microbatches of the batch that is due, and where the next batch begins.  Pure.

Part of the ledger: a fold over records; `coordinator/batches/` decides what is written.  A batch is a range of the
epoch's order, cut into microbatches; there is one cursor, and no sample is in two batches of an epoch.

A seat is one trainer process's place, and its number is never used again.  The sums of a seat die with it: when it is
gone, all that it was granted goes back to the pool, also what it had counted.  So each microbatch belongs to at most
one seat at any time, and what a commit takes are the shares of seats that were there: no microbatch counts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.protocol.digests import mask_from_bytes

Span = tuple[int, int]  # [first, stop) of microbatches
Cursor = tuple[int, int]  # (epoch, the first sample of it that is in no committed batch)


def mask_of_spans(spans: list[Span]) -> int:
    mask = 0
    for first, stop in spans:
        mask |= (1 << stop) - (1 << first)
    return mask


def spans_of_mask(mask: int) -> list[Span]:
    spans, at = [], 0
    while mask >> at:
        at += ((mask >> at) & -(mask >> at)).bit_length() - 1
        length = (~(mask >> at) & (mask >> at) + 1).bit_length() - 1
        spans.append((at, at + length))
        at += length
    return spans


@dataclass
class Seat:
    number: int
    peer: str
    process: bytes
    trainer: int  # the process's how-manieth trainer: its sums die with it
    granted: list[Span] = field(default_factory=list)

    @property
    def mask(self) -> int:
        return mask_of_spans(self.granted)


@dataclass
class Batch:
    """Microbatch m is the samples [start + m * micro, start + (m + 1) * micro) before `stop`."""

    version: int  # that the batch is learned from
    epoch: int
    start: int
    stop: int
    count: int  # microbatches
    skipped: list[Span] = field(default_factory=list)  # nobody gets a gradient out of them

    @property
    def whole(self) -> int:
        """The mask of all that a commit must have."""
        return ((1 << self.count) - 1) & ~mask_of_spans(self.skipped)


@dataclass
class BatchBook:
    cursor: Cursor = (0, 0)
    batch: Batch | None = None
    seats: dict[int, Seat] = field(default_factory=dict)
    last_seat: int = 0
    skipped_samples: int = 0  # ever

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """The mask of what nobody is to compute yet."""
        taken = 0
        for seat in self.seats.values():
            taken |= seat.mask
        return self.batch.whole & ~taken if self.batch is not None else 0

    def seat_of(self, peer: str) -> Seat | None:
        return next((seat for seat in self.seats.values() if seat.peer == peer), None)

    def next_batch(self, version: int, samples: int, most: int, micro: int) -> Batch:
        """Of a data set with so many samples; the last one of an epoch may be short."""
        epoch, start = self.cursor
        stop = min(start + most * micro, samples)
        return Batch(version, epoch, start, stop, -(-(stop - start) // micro))

    # ---- changes: called by the ledger only, for a record that is written -----------------------------------

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        for seat in self.seats.values():
            seat.granted.clear()

    def sit_down(self, seat: Seat) -> None:
        self.seats[seat.number] = seat
        self.last_seat = seat.number

    def get_up(self, number: int) -> None:
        self.seats.pop(number, None)

    def grant(self, number: int, span: Span) -> None:
        seat = self.seats[number]
        seat.granted = spans_of_mask(seat.mask | mask_of_spans([span]))

    def take_back(self, number: int, span: Span) -> None:
        """It says that it has not counted these and will not."""
        seat = self.seats[number]
        seat.granted = spans_of_mask(seat.mask & ~mask_of_spans([span]))

    def skip(self, micro: int, samples: int, of_epoch: int) -> None:
        """`samples`: that nobody learns from for it.  A batch of which nothing is left is passed over, and the next one
        is from the same version: with other seats, so that nothing said of the one is taken for the other."""
        batch = self.batch
        if batch is None:
            raise ValueError("a microbatch of no batch is skipped")
        batch.skipped = spans_of_mask(mask_of_spans(batch.skipped) | 1 << micro)
        self.skipped_samples += samples
        if not batch.whole:
            self.seats.clear()
            self._pass(batch, of_epoch)

    def commit(self, counted: Mapping[str, bytes], samples: int) -> None:
        """The batch is learned from.  ValueError if these shares are not the batch: such a journal is not ours."""
        batch, seen = self.batch, 0
        if batch is None:
            raise ValueError("a commit of a batch that was not begun")
        for raw in counted.values():
            mask = mask_from_bytes(raw)
            if mask & seen or mask & ~batch.whole:
                raise ValueError("a commit counts a microbatch twice, or one that is not of its batch")
            seen |= mask
        if seen != batch.whole:
            raise ValueError("a commit lacks microbatches of its batch")
        self._pass(batch, samples)

    def start_at(self, cursor: Cursor) -> None:
        """The run went back or on to another state, or has another data set: what was counted is of no use."""
        self.cursor = cursor
        self.seats.clear()
        self._end()

    def _pass(self, batch: Batch, samples: int) -> None:
        self.cursor = (batch.epoch, batch.stop) if batch.stop < samples else (batch.epoch + 1, 0)
        self._end()

    def _end(self) -> None:
        self.batch = None
        for seat in self.seats.values():
            seat.granted.clear()
