"""Who computes which microbatches of the batch that is due, and where the next batch begins.  Pure.

The mode's part of the ledger: a fold over records; `batches.py` decides what is written.  A batch is a range of the
epoch's order, cut into microbatches; there is one cursor, and no sample is in two batches of an epoch.

A seat is one trainer process's place, and its number is never used again.  The sums of a seat die with it: when it is
gone, all that it was granted goes back to the pool, also what it had counted.  So each microbatch belongs to at most
one seat at any time, and what a commit takes are the shares of seats that were there: no microbatch counts twice.

Where a model is cut into stages a seat is a place in one of them.  Grants are for seats of the first stage; who has a
microbatch in a later one follows from the numbered table of seats (collectives/pipeline/seats.py), which is kept here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from statistics import median

import msgspec

from farflung.collectives.pipeline.seats import Seat as Row
from farflung.collectives.pipeline.seats import Table, Traffic, borders_of, seat_pace, traffic_of
from farflung.coordinator.ledger.ledger import NUMBERS_AHEAD, Ledger, LedgerPart
from farflung.coordinator.ledger.records import (
    CommittedBatch,
    CommittedRound,
    DataFixed,
    Genesis,
    Record,
    RolledBack,
)
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.model_schema import BOOKS_FRAGMENT, ModelSchema

Span = tuple[int, int]  # [first, stop) of microbatches
Cursor = tuple[int, int]  # (epoch, the first sample of it that is in no committed batch)


# ---- records ------------------------------------------------------------------------------------------


class BatchBegun(Record, frozen=True, kw_only=True, tag="batch"):
    """The next version is the exact gradient of these samples."""

    version: int  # from which it goes on
    epoch: int
    start: int  # samples [start, stop) of the epoch's order
    stop: int
    count: int  # of microbatches
    # By seat, where a model is cut and what seats can do has changed: see Seat.share in collectives/pipeline/seats.py.
    shares: dict[int, float] = msgspec.field(default_factory=dict)
    held_out: bool = False  # the loss of that version is found on windows of [eval]: there is no next version


class HeldOutEnded(Record, frozen=True, kw_only=True, tag="held_out_ended"):
    """The held-out batch is over, and its seats with it: nothing in their sums is ever taken."""

    version: int


class Seated(Record, frozen=True, kw_only=True, tag="seated"):
    """A trainer has a place in the batches; nothing that it counts is ever taken under another number."""

    number: int
    peer: str
    process: bytes
    trainer: int
    stage: int = 0


class Unseated(Record, frozen=True, kw_only=True, tag="unseated"):
    """It is gone, and its sums with it: what it was granted is granted again."""

    number: int
    peer: str
    reason: str
    contested: bool = False  # it named a microbatch that an older seat of its stage had named


class Moving(Record, frozen=True, kw_only=True, tag="moving"):
    """A peer is told to give its stage up and to serve another one."""

    peer: str
    stage: int  # that it leaves
    to: int
    at_s: float  # on the run's clock
    reason: str


class GrantedMicros(Record, frozen=True, kw_only=True, tag="granted_micros"):
    """Microbatches [first, stop) of the batch are this seat's."""

    seat: int
    first: int
    stop: int


class TakenBack(Record, frozen=True, kw_only=True, tag="taken_back"):
    """The seat gets no gradient out of these and has not counted them: another one tries."""

    seat: int
    first: int
    stop: int
    reason: str


class MicroSkipped(Record, frozen=True, kw_only=True, tag="skipped"):
    """Nobody gets a finite gradient out of it: the batch goes without these samples."""

    version: int
    micro: int
    samples: int
    reason: str


OfBatches = BatchBegun | HeldOutEnded | Seated | Unseated | Moving | GrantedMicros | TakenBack | MicroSkipped
OF_BATCHES: tuple[type[Record], ...] = (
    BatchBegun,
    HeldOutEnded,
    Seated,
    Unseated,
    Moving,
    GrantedMicros,
    TakenBack,
    MicroSkipped,
)


# ---- what they make -------------------------------------------------------------------------------------


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
    held_out: bool = False  # samples are windows of [eval]

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
class BatchBook(LedgerPart):
    cursor: Cursor = (0, 0)
    version: int = 0  # that the newest batch led to
    cursors: dict[int, Cursor] = field(default_factory=dict)  # by version to which the run may go back
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

    @staticmethod
    def of(ledger: Ledger) -> BatchBook:
        book: BatchBook = ledger.parts["batches"]
        return book

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

    def held_out_batch(self, version: int, windows: int, micro: int) -> Batch:
        return Batch(version, 0, 0, windows, -(-windows // micro), held_out=True)

    def next_batch(self, version: int, samples: int, most: int, micro: int) -> Batch:
        """Of a data set with so many samples; the last one of an epoch may be short."""
        epoch, start = self.cursor
        stop = min(start + most * micro, samples)
        return Batch(version, epoch, start, stop, -(-(stop - start) // micro))

    # ---- changes: called by the ledger only, for a record that is written -----------------------------------

    def apply(self, record: Record, ledger: Ledger) -> None:
        match record:
            case Genesis() | DataFixed():
                self.start_at((0, 0))
            case CommittedRound():
                self._on_commit((record,), ledger)
            case CommittedBatch(rounds=rounds):
                self._on_commit(rounds, ledger)
            case RolledBack(versions=versions):
                self._go_back(versions[BOOKS_FRAGMENT])
            case _ if isinstance(record, OfBatches):
                self._on_own(record, ledger.leases.samples)
            case _:
                pass

    def _on_own(self, record: OfBatches, samples: int) -> None:
        match record:
            case BatchBegun(version=version, epoch=epoch, start=start, stop=stop, count=count):
                batch = Batch(version, epoch, start, stop, count, held_out=record.held_out)
                self.begin(batch, record.shares)
            case HeldOutEnded():
                self.end_held_out()
            case Seated(number=number, peer=peer, process=process, trainer=trainer, stage=stage):
                self.sit_down(BookedSeat(number, peer, process, trainer, stage=stage))
            case Unseated(number=number):
                self.get_up(number)
            case Moving(at_s=at_s):
                self.moved_at_s = at_s
            case GrantedMicros(seat=number, first=first, stop=stop):
                self.grant(number, (first, stop))
            case TakenBack(seat=number, first=first, stop=stop):
                self.take_back(number, (first, stop))
            case MicroSkipped(micro=micro, samples=of_it):
                self.skip(micro, of_it, samples)

    def _on_commit(self, rounds: Sequence[CommittedRound], ledger: Ledger) -> None:
        counted = [record.counted for record in rounds]
        if not any(counted):
            return
        self.commit(counted, ledger.leases.samples)
        self.version = rounds[0].commit.version
        self.cursors[self.version] = self.cursor
        for old in self.cursors.keys() - ledger.books[BOOKS_FRAGMENT].marks.keys():
            del self.cursors[old]

    def _go_back(self, version: int) -> None:
        stays = version == self.version  # then batches may have been passed over since
        self.start_at(self.cursor if stays else self.cursors.get(version, (0, 0)))
        self.version = version
        self.cursors = {known: cursor for known, cursor in self.cursors.items() if known <= version}

    def kept(self) -> bytes:
        return msgspec.msgpack.encode((self.cursor, self.last_seat, self.table_no))

    def on_restored(self) -> None:
        """It may lack the last grants and seats, by which members count: the batch begins again."""
        self.begin_again(NUMBERS_AHEAD)

    def put_back(self, version: int, kept: bytes, newest: bool) -> None:
        if not kept:
            return  # by a coordinator without batches
        cursor, last_seat, table_no = msgspec.msgpack.decode(kept, type=tuple[Cursor, int, int])
        if newest:
            self.cursor, self.last_seat, self.table_no = cursor, last_seat, table_no
            self.version, self.cursors = version, {version: cursor}
        self.cursors.setdefault(version, cursor)

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
        if batch.held_out:
            return
        self.skipped_samples += samples
        if not batch.whole:
            self._clear_seats()
            self._pass(batch, of_epoch)

    def end_held_out(self) -> None:
        """With other seats, what is said of it is not taken for the batch that is learned from the same version."""
        self._clear_seats()
        self._end()

    def commit(self, stages: Sequence[Mapping[str, bytes]], samples: int) -> None:
        """The batch is learned from, in every stage.  ValueError if these shares are not the batch: such a journal is
        not ours."""
        if self.batch is None or self.batch.held_out:
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


# ---- grants ------------------------------------------------------------------------------------------------
# How many microbatches a seat is granted now: enough to be busy, and at the end so that all end together; and
# what is counted of them. Pure.
#
# Called by `batches.py` at every beat. It knows rates and counts, and nothing of seats, members or records.

BEATS_AHEAD = 2.0  # a seat has work for so many heartbeats
AHEAD_LEAST = 2  # microbatches
PATIENCE_UNITS = 10.0  # a seat may take so many times its usual for one microbatch
PATIENCE_FIRST = 5.0  # and so many times the deadline for its first one, before which a trainer may compile
BELIEVED = 4.0  # nobody is believed to be so many times faster or slower than others in the middle
UNIT_LEAST_S = 1e-6  # nobody is believed to be faster
SHARE_MOST = 4.0  # nobody holds more than so many times its equal share, however fast it says it is


def believed_unit_s(said_s: float) -> float:
    """Busy seconds for one microbatch as a seat says them; 0: not known.  The smallest numbers that there are have no
    finite rate, and one that has none could be told to nobody."""
    return max(UNIT_LEAST_S, said_s) if said_s > 0 else 0.0


def patience_s(deadline_s: float, unit_s: float, others: Iterable[float]) -> float:
    """How long a seat that holds microbatches may count none.  What it says of itself could hold its batch for ever, so
    the `others` of its stage are the measure, and where nobody else has counted one, what a first one may take."""
    known = [each for each in others if each > 0.0]
    first_s = PATIENCE_FIRST * deadline_s
    if not unit_s:
        return first_s
    most_s = PATIENCE_UNITS * BELIEVED * median(known) if known else first_s
    return max(deadline_s, min(PATIENCE_UNITS * unit_s, most_s))


@dataclass(frozen=True)
class GrantPace:
    """One seat."""

    open: int  # granted and not counted
    unit_s: float  # busy seconds for one microbatch; 0: not known

    def unit(self, usual_s: float) -> float:
        return max(UNIT_LEAST_S, self.unit_s or usual_s)

    def ahead(self, heartbeat_s: float, usual_s: float, on_the_way: int) -> int:
        return on_the_way + max(AHEAD_LEAST, math.ceil(BEATS_AHEAD * heartbeat_s / self.unit(usual_s)))


def first_of(free: int, count: int) -> list[tuple[int, int]]:
    """The first so many microbatches of a mask, as ranges [first, stop)."""
    spans = []
    for first, stop in spans_of_mask(free):
        if count <= 0:
            break
        spans.append((first, min(stop, first + count)))
        count -= stop - first
    return spans


def to_grant(
    asking: int, paces: Mapping[int, GrantPace], free: int, heartbeat_s: float, on_the_way: int = 0
) -> int:
    """To the seat `asking`, one of `paces`; `free`: microbatches that nobody has; `on_the_way`: so many of a seat's own
    may be in other stages, where it has no work with them.

    While there is plenty each seat gets what keeps it busy.  When there is not, each microbatch belongs to the seat
    that would end it first, and a slow one gets none that the others would have to wait for.
    """
    known = sorted(pace.unit_s for pace in paces.values() if pace.unit_s)
    usual_s = known[len(known) // 2] if known else heartbeat_s
    left = free + sum(pace.open for pace in paces.values())
    most = max(AHEAD_LEAST, math.ceil(SHARE_MOST * left / len(paces)))
    room = {
        number: max(0, min(pace.ahead(heartbeat_s, usual_s, on_the_way), most) - pace.open)
        for number, pace in paces.items()
    }
    if sum(room.values()) <= free:
        return room[asking]
    ends = [((pace.open + 1) * pace.unit(usual_s), number, pace.open + 1) for number, pace in paces.items()]
    heapq.heapify(ends)
    mine = 0
    for _ in range(free):
        _, number, done = ends[0]
        unit_s = paces[number].unit(usual_s)
        heapq.heapreplace(ends, ((done + 1) * unit_s, number, done + 1))
        mine += number == asking
    return min(mine, room[asking])


@dataclass
class Masks:
    """What is counted.  Asked for with every beat, so it is not made of all seats each time."""

    stamp: object  # of which seats
    of_stage: list[int]
    _everywhere: int | None = None

    @property
    def everywhere(self) -> int:
        """In every stage."""
        if self._everywhere is None:
            self._everywhere = reduce(and_, self.of_stage)
        return self._everywhere

    def add(self, stage: int, counted: int) -> None:
        if counted & ~self.of_stage[stage]:
            self.of_stage[stage] |= counted
            self._everywhere = None


# ---- rates -------------------------------------------------------------------------------------------------
# How many microbatches a second a peer does in a stage, and all seats of it together. Pure.
#
# Called by whoever moves peers between stages (rebalancing.py) and by the batches, which tell the wiring of
# each seat's share. Must not know seats, records or members: it is given what each peer says of itself.
#
# A peer's rate is one over the slowest of three: computing a microbatch, sending what it gives, receiving
# what it gets. What members say of themselves is believed within bounds of what is usual, so that a liar
# gains nothing by it: nobody counts for more than `BELIEVED` times the median of its stage, and no line for
# more than so many times the usual one.

SHARE_STEADY = 1.25  # the wiring is told of new shares when one differs by this factor


@dataclass(frozen=True)
class Mate:
    """One peer in its stage, as it describes itself."""

    peer: str
    stage: int
    unit_s: float = 0.0  # busy seconds for one microbatch; 0: not known
    up_bytes_per_s: float = 0.0  # 0: not known
    down_bytes_per_s: float = 0.0


def traffic_of_stages(model: ModelSchema | None, pipeline: PipelineSection) -> list[Traffic]:
    """Of one seat of each stage, for one microbatch."""
    borders = borders_of(model, pipeline.micro) if model is not None and model.stages else ()
    return [traffic_of(borders, stage, pipeline.codec) for stage in range(pipeline.stages)]


class SeatRates:
    def __init__(self, crew: Iterable[Mate], traffic: Sequence[Traffic]) -> None:
        """`crew`: of all stages; `traffic`: of each."""
        self.crew, self._traffic = tuple(crew), traffic
        units = [
            [believed_unit_s(mate.unit_s) for mate in self.of_stage(n) if mate.unit_s > 0]
            for n in range(self.stages)
        ]
        # Before each stage that is served has measured something, peers and stages count alike.
        self.measured = all(units[mate.stage] for mate in self.crew)
        self._costs = [median(each) if each and self.measured else 1.0 for each in units]
        self._up, self._down = (
            _most(getattr(mate, name) for mate in self.crew)
            for name in ("up_bytes_per_s", "down_bytes_per_s")
        )
        self.sums = [sum(self.of(mate, n) for mate in self.of_stage(n)) for n in range(self.stages)]

    @property
    def stages(self) -> int:
        return len(self._traffic)

    def of_stage(self, stage: int) -> list[Mate]:
        return [mate for mate in self.crew if mate.stage == stage]

    def of(self, mate: Mate, stage: int) -> float:
        """That it has, or would have, in this stage."""
        here = self._costs[mate.stage]
        unit_s = mate.unit_s if self.measured and mate.unit_s > 0 else here
        unit_s = max(unit_s, here / BELIEVED, UNIT_LEAST_S) / here * self._costs[stage]
        if not self.measured:  # a unit is no second then
            return 1.0 / unit_s
        up, down = min(mate.up_bytes_per_s, self._up), min(mate.down_bytes_per_s, self._down)
        return seat_pace(unit_s, self._traffic[stage], up, down).micros_per_s or 0.0

    def after(self, mate: Mate, to: int) -> float:
        """The slowest stage's rate once it has moved there."""
        moved = list(self.sums)
        moved[mate.stage] -= self.of(mate, mate.stage)
        moved[to] += self.of(mate, to)
        return min(moved)

    def shares(self) -> dict[str, float]:
        """By peer: of the microbatches of its stage, as the wiring is to spread them; 1 is a usual one's."""
        found: dict[str, float] = {}
        for stage in range(self.stages):
            rates = {mate.peer: self.of(mate, stage) for mate in self.of_stage(stage)}
            usual = median(rates.values()) if rates else 1.0
            for peer, rate in rates.items():
                found[peer] = round(min(BELIEVED, max(1 / BELIEVED, rate / usual)), 3)
        return found


def news_of_shares(told: Mapping[str, float], due: Mapping[str, float]) -> dict[str, float]:
    """All of `due`, if one of them is worth a table; nothing while what was told is near enough."""
    far = any(
        not 1 / SHARE_STEADY < share / told[peer] < SHARE_STEADY
        for peer, share in due.items()
        if peer in told
    )
    return {peer: share for peer, share in due.items() if peer in told} if far else {}


def _most(rates: Iterable[float]) -> float:
    """That a line is believed to carry."""
    known = [rate for rate in rates if rate > 0]
    return BELIEVED * median(known) if known else 0.0
