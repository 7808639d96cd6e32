"""What the batches see of the other parts of the run machine, and what they keep of a seat's words.  Pure.

Read by the modules of this room, and by the run machine, which fills `BatchMembers` in.  Interfaces and data; what
follows from them is decided in `batches.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Protocol

from farflung.collectives.pipeline.seats import (
    BorderTraffic,
    SeatPace,
    Table,
    border_after,
    borders_of,
    narrowest,
    seat_pace,
    stage_rate,
    traffic_of,
)
from farflung.coordinator.batches.batch_book import Batch, BatchBook, BookedSeat, mask_of_spans
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import Record
from farflung.coordinator.modes.registry import LossMode
from farflung.protocol.digests import bits, mask_from_bytes, mask_to_bytes
from farflung.protocol.limits import MEMBERS_PER_ROUND, SEATS_TOLD
from farflung.protocol.manifest import Manifest, PipelineSection
from farflung.protocol.messages import Beat
from farflung.protocol.mode_words import BatchBeat, BatchTick, SeatRow, losses_of
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import section

NAMED_MOST = 4  # peers in one sentence
AWAIT_DEAD = 2.0  # times dead_after_s


class BatchWorker(Protocol):
    """A living member, as the batches see it."""

    @property
    def peer(self) -> str: ...
    @property
    def process(self) -> bytes: ...
    @property
    def stage(self) -> int: ...
    @property
    def verified(self) -> bool: ...
    @property
    def leaving(self) -> bool: ...
    @property
    def dialable(self) -> bool: ...
    @property
    def fits(self) -> tuple[int, ...]: ...  # the stages that it could hold
    @property
    def beat(self) -> Beat | None: ...


class BatchDesk(Protocol):
    """What the batches need of the run machine's core."""

    ledger: Ledger
    now: float
    began_at: float

    @property
    def manifest(self) -> Manifest: ...  # as it holds now
    @property
    def clock_s(self) -> float: ...  # the run's own
    @property
    def held(self) -> str: ...
    @property
    def finished(self) -> bool: ...
    def write(self, record: Record) -> None: ...
    def note(self, text: str) -> None: ...
    def name(self, peer: str) -> str: ...
    def strike(self, peer: str, reason: str) -> None: ...


@dataclass(frozen=True)
class BatchMembers:
    """What the batches ask the other parts of the run machine."""

    living: Callable[[], Mapping[str, BatchWorker]]
    fits: Callable[[str], bool]  # the peer has the run's data
    in_round: Callable[[str], bool]  # a round in flight may use what it counted
    flying: Callable[[int], bool]  # a round of this stage is in flight
    abort: Callable[[int, str], None]  # that round: what it merges has no part in the batch any more
    saved_by: Callable[[int], Collection[str]] = lambda stage: ()  # who wrote a checkpoint of this stage
    # These two have a way, though neither can be dialled: past their routers, or at a relay.
    meet: Callable[[str, str], bool] = lambda one, other: False
    losses_for: Callable[[], Sequence[LossMode]] = lambda: ()  # who may want those of a held-out batch

    @property
    def is_evaluated_next(self) -> bool:
        return any(mode.is_evaluated_next() for mode in self.losses_for())

    def on_losses(self, losses: Mapping[str, Mapping[int, float]]) -> None:
        for mode in self.losses_for():
            mode.on_losses(losses)


@dataclass
class SeatWord:
    """What a seat has said."""

    counted: int = 0  # mask
    unit_s: float = 0.0
    since: float = 0.0  # it has counted nothing since then, while it could
    at_all: bool = False  # by this coordinator
    ready: bool = False  # its sums stand frozen
    holds: int = 0  # microbatches that wait for its trainer
    made: int = 0  # works that its trainer has made
    losses: dict[int, float] = field(default_factory=dict)  # of a held-out batch, by microbatch

    def forget(self) -> None:
        """What it said of a batch is not said of the next one."""
        self.counted, self.ready, self.holds, self.made, self.losses = 0, False, 0, 0, {}


@dataclass
class UnusableMicros:
    """Microbatches without a finite gradient: who tried which.

    What one trainer gets no gradient out of another one tries; after two, or where there is no other, the batch goes
    without it.  Of a model in one piece a grant changes hands.  In a stage of several nobody can take a microbatch from
    a living seat (collectives/pipeline/seats.py), so the seat that complains is given up for this batch.
    """

    # (stage, peer) -> mask, whatever it says later.
    _said: dict[tuple[int, str], int] = field(default_factory=dict)

    def hear(self, stage: int, peer: str, mask: int) -> None:
        if mask:
            self._said[stage, peer] = self.of(stage, peer) | mask

    def of(self, stage: int, peer: str) -> int:
        return self._said.get((stage, peer), 0)

    def forget(self) -> None:
        """Another batch begins."""
        self._said.clear()

    def who(self, stage: int, micro: int) -> list[str]:
        return [peer for (at, peer), mask in self._said.items() if at == stage and mask >> micro & 1]

    def tried(self) -> list[tuple[int, int]]:
        """(stage, microbatch) of all that somebody got no gradient out of."""
        masks: dict[int, int] = {}
        for (stage, _), mask in self._said.items():
            masks[stage] = masks.get(stage, 0) | mask
        return [(stage, micro) for stage, mask in sorted(masks.items()) for micro in bits(mask)]

    def hopeless(
        self, has_others: Callable[[int, Sequence[str]], bool], tries: float
    ) -> list[tuple[int, int, list[str]]]:
        """(stage, microbatch, who tried it) that nobody is left to try; or so many have."""
        found = []
        for stage, micro in self.tried():
            by = self.who(stage, micro)
            if len(by) >= tries or not has_others(stage, by):
                found.append((stage, micro, by))
        return found


def are_coming_back(desk: BatchDesk) -> bool:
    """A restarted coordinator waits so long for those whose seats are in its books."""
    return desk.now - desk.began_at < AWAIT_DEAD * desk.manifest.net.dead_after_s


def names_of(desk: BatchDesk, peers: Sequence[str]) -> str:
    named = ", ".join(map(desk.name, peers[:NAMED_MOST]))
    return named if len(peers) <= NAMED_MOST else f"{named} and {len(peers) - NAMED_MOST} more"


def said_by(worker: BatchWorker) -> BatchBeat | None:
    """None: it has no part in batches."""
    return section(BatchBeat, worker.beat.sections) if worker.beat is not None else None


def is_of(seat: BookedSeat, worker: BatchWorker, said: BatchBeat) -> bool:
    """The seat is this very trainer's."""
    return (seat.process, seat.trainer) == (worker.process, said.trainer)


def wants(worker: BatchWorker | None, seat: BookedSeat) -> bool:
    said = said_by(worker) if worker is not None else None
    return (
        worker is not None
        and said is not None
        and said.want
        and not worker.leaving
        and is_of(seat, worker, said)
    )


# ---- batch ticks -------------------------------------------------------------------------------------------
# What members and people hear of the batch: with every tick a seat, grants and the table of seats; in the
# status how far it is, and what batches of this length cost. Pure.
#
# Called by `batches.py`, which decides all of it. A table is told whole, of the member's own stage and of
# those beside it, whenever the member names an older one; so a tick that is lost, or comes late, does no
# harm.


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
        held_out=batch.held_out,
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
        held_out=plain.held_out,
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


def losses_by_micro(said: BatchBeat, counted: int) -> dict[int, float]:
    """`counted`: the mask of what it may have counted.  Nothing, if these are no losses: they are its word alone."""
    micros = list(bits(mask_from_bytes(said.counted)))
    losses = losses_of(said.losses, len(micros)) or ()
    return {micro: nats for micro, nats in zip(micros, losses, strict=False) if counted >> micro & 1}


def row_of(book: BatchBook, samples: int, counted: int, costs: dict[str, object] | None) -> dict[str, object]:
    """For the status.  `samples`: of an epoch; `counted`: the mask of what is counted in every stage."""
    batch = book.batch
    learned = None if batch is None or batch.held_out else batch
    return {
        "samples": samples or None,
        "epoch": learned.epoch if learned is not None else book.cursor[0],
        "start": learned.start if learned is not None else book.cursor[1],
        "stop": learned.stop if learned is not None else None,
        "microbatches": batch.whole.bit_count() if batch is not None else None,
        "counted": (counted & batch.whole).bit_count() if batch is not None else 0,
        "held_out": batch is not None and batch.held_out,  # no samples, but windows of [eval]
        "skipped_samples": book.skipped_samples,  # ever: nobody got a finite gradient out of them
        "costs": costs,
    }


# ---- stage rows --------------------------------------------------------------------------------------------
# What people and scripts hear of each stage: who serves it, how fast it can be, and which one holds the run
# up. Pure.
#
# Called by `batches.py` for the status. What a row says of bytes and memory is what somebody who has not
# joined yet must know to see whether a machine and its line would do (`farflung doctor`).

_SUM_BYTES = 4  # of a value: gradients are summed in fp32
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2}

Row = dict[str, object]


@dataclass(frozen=True)
class BatchView:
    """What the batches know now.  `heard`: by seat; `living`: by peer."""

    book: BatchBook
    heard: Mapping[int, SeatWord]
    living: Mapping[str, BatchWorker]


def stage_rows(seen: BatchView, model: ModelSchema | None, pipeline: PipelineSection) -> list[Row]:
    """One of each stage, in their order."""
    borders = borders_of(model, pipeline.micro) if model is not None and model.stages else ()
    paces = [_paces(seen, stage, borders, pipeline) for stage in range(pipeline.stages)]
    narrow = narrowest(
        paces, [_here(seen, stage) for stage in range(pipeline.stages)], pipeline.min_per_stage
    )
    rows: list[Row] = []
    for stage, seats in enumerate(paces):
        rows.append(_work(seen, stage, seats))
        rows[-1]["narrow"] = narrow[1] if narrow is not None and narrow[0] == stage else ""
        if model is not None and model.stages:
            rows[-1] |= _sizes(model, stage)
            rows[-1] |= _crossings(borders, stage, pipeline)
    return rows


def _here(seen: BatchView, stage: int) -> int:
    """Who serves it, or will as soon as a batch begins."""
    seats = {seat.peer for seat in seen.book.of_stage(stage)}
    return len(
        seats | {peer for peer, worker in seen.living.items() if worker.verified and worker.stage == stage}
    )


def _paces(
    seen: BatchView, stage: int, borders: Sequence[BorderTraffic], pipeline: PipelineSection
) -> list[SeatPace]:
    traffic = traffic_of(borders, stage, pipeline.codec)
    found = []
    for seat in seen.book.of_stage(stage):
        said, worker = seen.heard.get(seat.number), seen.living.get(seat.peer)
        beat = worker.beat if worker is not None else None
        # A rough rate is a lower bound: it blames no line.
        up = beat.up_bytes_per_s if beat is not None and not beat.rough else 0
        down = beat.down_bytes_per_s if beat is not None and not beat.rough else 0
        found.append(seat_pace(said.unit_s if said is not None else 0.0, traffic, up, down))
    return found


def _work(seen: BatchView, stage: int, paces: Sequence[SeatPace]) -> Row:
    seats = seen.book.of_stage(stage)
    said = [seen.heard[seat.number] for seat in seats if seat.number in seen.heard]
    counted = 0
    for each in said:
        counted |= each.counted
    units = [each.unit_s for each in said if each.unit_s > 0]
    rate, batch = stage_rate(paces), seen.book.batch
    return {
        "seats": len(seats),
        "counted": (counted & batch.whole).bit_count() if batch is not None else 0,
        "waiting": sum(each.holds for each in said),  # for its trainers, or in their hands
        # What its seats can do together, as long as each of them says how fast it is.
        "micros_per_s": round(rate, 3) if rate is not None else None,
        "unit_s": round(median(units), 6) if units else None,  # busy seconds of its usual seat for one
    }


def _sizes(model: ModelSchema, stage: int) -> Row:
    """`compute_bytes`: parameters, sums of gradients, buffers; `state_bytes`: one part of the outer state."""
    ends = [*(each.first_tensor for each in model.stages), len(model.tensors)]
    first, stop = list(pairwise(ends))[stage]
    held = 0
    for spec in model.tensors[first:stop]:
        size = _DTYPE_BYTES.get(spec.dtype, 1)
        if spec.kind in ("param", "buffer"):
            held += math.prod(spec.shape) * (size + (_SUM_BYTES if spec.kind == "param" else 0))
    return {"compute_bytes": held, "state_bytes": 4 * model.stages[stage].chunk_count * model.chunk_elements}


def _crossings(borders: Sequence[BorderTraffic], stage: int, pipeline: PipelineSection) -> Row:
    traffic = traffic_of(borders, stage, pipeline.codec)
    after = border_after(borders, stage)
    return {
        "up_bytes": traffic.up_bytes,  # for one microbatch, of the seat that computes it
        "down_bytes": traffic.down_bytes,
        "gives": {"values": after.values, "raw_bytes": after.raw_bytes},  # over the border after it
    }
