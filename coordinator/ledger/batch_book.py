"""Who computes which microbatches of the batch that is due, and where the next batch begins.  Pure.

Part of the ledger: a fold over records; `coordinator/batches/` decides what is written.  A batch is a range of the
epoch's order, cut into microbatches; there is one cursor, and no sample is in two batches of an epoch.

A seat is one trainer process's place, and its number is never used again.  The sums of a seat die with it: when it is
gone, all that it was granted goes back to the pool, also what it had counted.  So each microbatch belongs to at most
one seat at any time, and what a commit takes are the shares of seats that were there: no microbatch counts twice.

Where a model is cut into stages a seat is a place in one of them.  Grants are for seats of the first stage; who has a
microbatch in a later one follows from the numbered table of seats (collectives/pipeline/seats.py), which is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farflung.collectives.pipeline.seats import Seat as Row
from farflung.collectives.pipeline.seats import Table
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
class BookedSeat:
    number: int
    peer: str
    process: bytes
    trainer: int  # the process's how-manieth trainer: its sums die with it
    granted: list[Span] = field(default_factory=list)
    stage: int = 0

    @property
    def mask(self) -> int:
        return mask_of_spans(self.granted)


@dataclass
class Batch:
    """Microbatch m is the samples [start + m * micro, start + (m + 1) * micro) before `stop`."""

    version: int  # from which the batch goes on
    epoch: int
    start: int
    stop: int
    count: int  # microbatches
    skipped: list[Span] = field(default_factory=list)  # nobody gets a gradient out of them

    @property
    def whole(self) -> int:
        """The mask of all that a commit must have."""
        return ((1 << self.count) - 1) & ~mask_of_spans(self.skipped)


@dataclass(frozen=True)
class _Places:
    """Who sits where, so that in a crowd not every question looks at every seat."""

    stamp: tuple[int, int]  # of the seats that it follows from
    of_stage: dict[int, list[BookedSeat]]
    of_peer: dict[str, BookedSeat]


@dataclass
class BatchBook:
    cursor: Cursor = (0, 0)
    batch: Batch | None = None
    seats: dict[int, BookedSeat] = field(default_factory=dict)
    last_seat: int = 0
    skipped_samples: int = 0  # ever
    moved_at_s: float = float("-inf")  # on the run's clock: when a peer was last sent to another stage
    # Of this batch: what seats had been granted that are gone.
    released: list[Span] = field(default_factory=list)
    # The numbered table, whose living rows are `seats`.
    table_no: int = 0
    rows: tuple[Row, ...] = ()
    _table: Table | None = field(default=None, compare=False, repr=False)
    _known_places: _Places | None = field(default=None, compare=False, repr=False)

    def after_unpacking(self) -> None:
        """A ledger that was folded before there were tables has seats alone."""
        if self.seats and not self.rows:
            for seat in sorted(self.seats.values(), key=lambda seat: seat.number):
                self._keep(self.table.seated(seat.number, seat.peer, seat.stage))

    # ---- questions ---------------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        if self._table is None or self._table.number != self.table_no:
            self._table = Table(self.table_no, self.rows)
        return self._table

    @property
    def stamp(self) -> tuple[int, int]:
        """Another one whenever somebody sits down or gets up."""
        return self.table_no, len(self.seats)

    @property
    def _places(self) -> _Places:
        if self._known_places is None or self._known_places.stamp != self.stamp:
            found = _Places(self.stamp, {}, {})
            for seat in self.seats.values():
                found.of_stage.setdefault(seat.stage, []).append(seat)
                found.of_peer.setdefault(seat.peer, seat)
            self._known_places = found
        return self._known_places

    def of_stage(self, stage: int) -> list[BookedSeat]:
        return list(self._places.of_stage.get(stage, ()))

    def again(self, seat: BookedSeat) -> int:
        """The mask of what it is to compute and a seat that is gone was to compute before."""
        return seat.mask & mask_of_spans(self.released)

    @property
    def free(self) -> int:
        """The mask of what nobody is to compute yet."""
        taken = 0
        for seat in self.seats.values():
            taken |= seat.mask
        return self.batch.whole & ~taken if self.batch is not None else 0

    def seat_of(self, peer: str) -> BookedSeat | None:
        return self._places.of_peer.get(peer)

    def next_batch(self, version: int, samples: int, most: int, micro: int) -> Batch:
        """Of a data set with so many samples; the last one of an epoch may be short."""
        epoch, start = self.cursor
        stop = min(start + most * micro, samples)
        return Batch(version, epoch, start, stop, -(-(stop - start) // micro))

    # ---- changes: called by the ledger only, for a record that is written -----------------------------------

    def begin(self, batch: Batch, shares: Mapping[int, float] | None = None) -> None:
        """`shares`: by seat, of those that change."""
        self.batch, self.released = batch, []
        for seat in self.seats.values():
            seat.granted.clear()
        if self.rows:
            self._keep(self.table.of_next_batch(shares or {}))

    def begin_again(self, ahead: int) -> None:
        """Nobody sits anywhere: what was granted of late is not known.  Numbers go on so far ahead."""
        self.batch, self.released = None, []
        self.seats, self.rows, self._known_places = {}, (), None
        self.last_seat += ahead
        self.table_no += ahead

    def sit_down(self, seat: BookedSeat) -> None:
        self.seats[seat.number] = seat
        self.last_seat = seat.number
        self._keep(self.table.seated(seat.number, seat.peer, seat.stage))

    def get_up(self, number: int) -> None:
        seat = self.seats.pop(number, None)
        if seat is None:
            return
        self._keep(self.table.unseated(number))
        if self.batch is not None:
            self.released = spans_of_mask(mask_of_spans(self.released) | seat.mask)

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
            self._clear_seats()
            self._pass(batch, of_epoch)

    def commit(self, stages: Sequence[Mapping[str, bytes]], samples: int) -> None:
        """The batch is learned from, in every stage.  ValueError if these shares are not the batch: such a journal is
        not ours."""
        if self.batch is None:
            raise ValueError("a commit of a batch that was not begun")
        for counted in stages:
            self._check_is_whole(self.batch, counted)
        self._pass(self.batch, samples)

    @staticmethod
    def _check_is_whole(batch: Batch, counted: Mapping[str, bytes]) -> None:
        seen = 0
        for raw in counted.values():
            mask = mask_from_bytes(raw)
            if mask & seen or mask & ~batch.whole:
                raise ValueError("a commit counts a microbatch twice, or one that is not of its batch")
            seen |= mask
        if seen != batch.whole:
            raise ValueError("a commit lacks microbatches of its batch")

    def start_at(self, cursor: Cursor) -> None:
        """The run went back or on to another state, or has another data set: what was counted is of no use."""
        self.cursor = cursor
        self._clear_seats()
        self._end()

    def _clear_seats(self) -> None:
        """All of them are gone: who has one reads of none in the next table."""
        if self.seats:
            self._keep(Table(self.table_no + 1))
        self.seats.clear()

    def _keep(self, table: Table) -> None:
        self.table_no, self.rows, self._table = table.number, tuple(table.seats.values()), table

    def _pass(self, batch: Batch, samples: int) -> None:
        self.cursor = (batch.epoch, batch.stop) if batch.stop < samples else (batch.epoch + 1, 0)
        self._end()

    def _end(self) -> None:
        self.batch, self.released = None, []
        for seat in self.seats.values():
            seat.granted.clear()
