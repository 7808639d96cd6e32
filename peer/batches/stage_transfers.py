"""Microbatches of a stage at its agent: drives the machine of microbatches (collectives/pipeline) for the trainer.
Pure.

Part of the training, where a model is cut into stages: it is what `BatchWork` is for a model in one piece.  Owns: the
table of seats, the machine of the seat that is mine, what the trainer has in hand and in which place.  The machine says
what is done, kept and sent; here that becomes effects of the peer.  Called by the peer machine with ticks, frames,
words of the trainer and the clock.  Must not know rounds, the bytes of a crossing, how anybody was found to be gone.

A seat and the trainer's sums end together.  Whatever takes the sums away (another trainer, another load of the same
version, an older version) ends the seat here, and the beat says so, with another number of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import msgspec

from farflung.collectives.pipeline import effects as flow_says
from farflung.collectives.pipeline.crossing import RAW, Border, BytesOf, CrossingKind, border_after, parse
from farflung.collectives.pipeline.effects import FlowDirection, KeptPiece, NoteReason, seat_of, table_of
from farflung.collectives.pipeline.neighbours import Shunned
from farflung.collectives.pipeline.seats import Seat, SeatPlace, Table
from farflung.collectives.pipeline.stage_frames import EarlyFrames
from farflung.collectives.pipeline.stage_scheduler import StageScheduler
from farflung.collectives.round.effects import SendFrame
from farflung.peer.batches.batch_work import SeatSums
from farflung.peer.batches.effects import ForgetCrossings, HandOver, KeepCrossing, SendCrossing
from farflung.peer.local.words import Frozen, MicrobatchWork, WorkDone
from farflung.peer.machine import effects as do
from farflung.protocol.digests import mask_from_bytes, mask_of
from farflung.protocol.errors import Counters, FrameError, Verdict
from farflung.protocol.frames import Frame, FrameKind, Header, Kind, Payload, Spoiled
from farflung.protocol.limits import MEMBERS_PER_ROUND
from farflung.protocol.manifest import PipelineSection
from farflung.protocol.mode_words import BatchTick, Complaint, SeatRow
from farflung.protocol.model_schema import ModelSchema

# ---- stage boundaries --------------------------------------------------------------------------------------
# The two borders of a stage: what may cross them, compared before a byte of it is believed. Pure.
#
# Made by the machine when it knows which stage it holds, from what its trainer said of the model; asked by
# the crossings for every payload, of others and of the own trainer. The codecs are handed in: this room knows
# no tensor.

# (codec, payload, elements): FrameError unless the payload is so many finite values in that codec.
CheckPayload = Callable[[str, Payload, int], None]


def crossing_bytes_most(model: ModelSchema, rules: PipelineSection, bytes_of: BytesOf) -> int:
    """No crossing of a model in stages is longer, over whichever border.  ValueError for what can't be sent."""
    borders = [border_after(stage, model, rules, bytes_of) for stage in range(len(model.stages) - 1)]
    return max(each.most_bytes(backwards) for each in borders for backwards in (False, True))


class StageBoundaries:
    """Of one stage."""

    def __init__(
        self,
        stage: int,
        model: ModelSchema,
        rules: PipelineSection,
        bytes_of: BytesOf,
        check: CheckPayload,
    ) -> None:
        """`bytes_of`, `check`: of the shell's codecs.  ValueError for a border over which nothing can be sent."""
        last = stage == len(model.stages) - 1
        self._before = border_after(stage - 1, model, rules, bytes_of) if stage else None
        self._after = None if last else border_after(stage, model, rules, bytes_of)
        self._check = check

    def check_given(self, kind: FrameKind, payload: Payload) -> None:
        """FrameError unless a neighbour may send this."""
        if kind is CrossingKind.ACTIVATION:
            self._check_crossing(self._before, False, payload)
        else:
            self._check_crossing(self._after, True, payload)

    def check_made(self, way: FlowDirection, payload: Payload) -> None:
        """FrameError unless this may go on.  Of a source's gradient nothing does."""
        if way is FlowDirection.FORWARD:
            self._check_crossing(self._after, False, payload)
        elif self._before is not None:
            self._check_crossing(self._before, True, payload)
        elif payload:
            raise FrameError(Verdict.MALFORMED, "a source gives no gradient on")

    def _check_crossing(self, border: Border | None, backwards: bool, payload: Payload) -> None:
        if border is None:
            raise FrameError(Verdict.MALFORMED, "there is no such border")
        for piece in parse(border, backwards, payload).pieces:
            if piece.codec != RAW:
                self._check(piece.codec, piece.data, prod(piece.dims))


# ---- stage transfers ---------------------------------------------------------------------------------------

EARLY_FRAMES, EARLY_BYTES = 64, 16 * 1024 * 1024
PLACES = 2  # works that the trainer has at once: the belt has slots for so many
# What is counted is told at once where it is the whole batch.  Of one of several seats, which can't know whether the
# others have the rest, it is told no more often than all this, so that the last word comes late by no more either:
NEWS_OF_BATCH = 0.25  # this part of the time that the batch has lasted,
NEWS_EACH_SEAT_S = 0.005  # but not less for each seat of the stages that I know of,
NEWS_EVERY_S = 0.25  # nor more
_SEEN = {
    NoteReason.DAMAGED: "what came was damaged again",
    NoteReason.SILENT: "it was asked for again and again, and nothing came",
    NoteReason.CONTESTED: "two seats say that they have it; the first one stands",
}


@dataclass(frozen=True)
class MyStage:
    """What stays for as long as this peer holds its stage."""

    run_tag: bytes
    peer: str
    stage: int
    stages: int
    micro: int  # samples in a microbatch
    # Of one that takes steps of its own: microbatches in a step.  With more on their way than that, more than one step
    # lies between the two ways of a microbatch.
    local_micros: int = 0


def is_crossing(header: Header) -> bool:
    """It is between seats of stages: LATER and MISSING are words of other questions, too, and those name no seat."""
    said = header.kind in (Kind.LATER, Kind.MISSING) and seat_of(header) > 0
    return said or header.kind.crossing


class StageTransfers(SeatSums):
    def __init__(
        self, mine: MyStage, borders: StageBoundaries, counters: Counters, chance: Callable[[], float]
    ) -> None:
        """`counters`: of all frames of this peer (P8); `chance`: 0..1, for ties."""
        super().__init__()
        self._mine, self._borders, self._counters, self._chance = mine, borders, counters, chance
        self._table = Table()
        self._flow: StageScheduler | None = None
        self._early = EarlyFrames(EARLY_FRAMES, EARLY_BYTES)  # what came before the table that shows my seat
        self._void = 0  # the seat whose sums are lost, until the coordinator gives another
        self._loaded = False  # the trainer has loaded `_version`, and works for it
        self._batch: BatchTick | None = None  # that the machine is at
        self._told: BatchTick | None = None  # the tick that the machine has heard
        self._places: dict[tuple[str, int], int] = {}  # of the trainer, by way and microbatch
        self._lengths: dict[tuple[int, KeptPiece], int] = {}  # of what is kept of this batch
        self._made = 0  # works of my trainer, in this seat
        self._unreached: set[str] = set()
        self._shunned = Shunned()
        self._unit_by_way: dict[str, float] = {}
        self._later: list[do.Effect] = []  # what follows from an event that gives no effects
        self._began_at = 0.0  # when I heard of the batch
        self._news_at = 0.0  # when what is counted was told last
        self._told_counted = 0

    # ---- questions -------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        return mask_of({micro for _, micro in self._places})

    @property
    def table_no(self) -> int:
        return self._table.number

    @property
    def holds(self) -> int:
        return self._flow.held_for_trainer if self._flow is not None else 0

    @property
    def made(self) -> int:
        return self._made

    @property
    def complains(self) -> tuple[Complaint, ...]:
        found = self._flow.complaints if self._flow is not None else {}
        return tuple(Complaint(seat, damaged) for seat, damaged in found.items())[:MEMBERS_PER_ROUND]

    @property
    def early_count(self) -> int:
        """Frames that wait for their explanation, and end in a counter when it comes."""
        return len(self._early) + (self._flow.early_count if self._flow is not None else 0)

    @property
    def flow(self) -> StageScheduler | None:
        """The machine of my seat; None: I have none, or no table shows it yet."""
        return self._flow

    @property
    def is_open(self) -> bool:
        """Microbatches of a batch are under way: the line is for them."""
        return self._flow is not None and self._batch is not None and not self._batch.freeze

    def place_of(self, word: WorkDone) -> int | None:
        """Where the trainer has what it made; None: it speaks of sums that are gone."""
        mine = word.version == self._version
        return self._places.get((word.way, word.micro)) if mine else None

    def has_news(self, now: float) -> bool:
        """What is counted is to be told before the next beat is due.

        As long as microbatches are under way it is not: of a fast stage, which is idle half of the time, each beat
        would say a little more, and none of that would end the batch.
        """
        done = self._flow is not None and self._flow.is_done and self._told_counted != self._counted
        return done and (self._counts_all or now - self._news_at >= self._news_every_s(now))

    @property
    def _counts_all(self) -> bool:
        """Nothing of the batch is left for anybody in my stage."""
        batch = self._batch
        if batch is None:
            return False
        return self._counted == (1 << batch.count) - 1 & ~mask_from_bytes(batch.skipped)

    def _news_every_s(self, now: float) -> float:
        seats = sum(1 for seat in self._table.seats.values() if not seat.gone)
        least_s = max(NEWS_EACH_SEAT_S * seats, NEWS_OF_BATCH * (now - self._began_at))
        return min(NEWS_EVERY_S, least_s)

    def on_told(self, now: float) -> None:
        """A beat has said what is counted."""
        self._told_counted, self._news_at = self._counted, now

    # ---- the trainer -----------------------------------------------------------------------------------------

    def on_load(self, version: int) -> None:
        """The sums are zero.  A seat that had any of this version, or of a later one, is of no use any more."""
        if self._flow is not None and self._flow.version >= version:
            self.lose_sums()
        super().on_load(version)
        self._loaded, self._told_counted = False, 0
        self._places.clear()

    def on_loaded(self) -> None:
        self._loaded = True

    def forget(self) -> None:
        self._drop_flow()
        super().forget()

    def lose_sums(self) -> None:
        self._void, self.seat = self.seat or self._void, 0
        super().lose_sums()

    def _drop_flow(self) -> None:
        """The machine of my seat, and what was kept for it."""
        self._told = self._batch = None
        self._made = 0
        self._lengths.clear()
        if self._flow is not None:
            self._flow.leave()
            self._later.append(ForgetCrossings(self._flow.version))
            self._flow = None

    def on_made(self, word: WorkDone, payload: Payload, now: float) -> list[do.Effect]:
        """`payload`: what lay in the slot for it; it is compared with the border before anybody gets it."""
        flow = self._flow
        if flow is None or self.place_of(word) is None:
            return []
        del self._places[word.way, word.micro]
        self._measure(word.way, now)
        flow.on_unit(self._unit_s)
        way, problem = FlowDirection(word.way), word.problem
        if not problem:
            try:
                self._borders.check_made(way, payload)
            except FrameError as error:
                problem = f"what the trainer made of it does not fit the border: {error}"
        made = flow_says.WorkMade(way, word.version, word.micro, payload, problem)
        effects = self._turned(flow.on_made(made, now), now)
        if problem:
            told = do.Note(f"microbatch {word.micro} gives nothing to go on with: {problem}", routine=True)
            return [told, *effects]
        if way is not FlowDirection.FORWARD:
            self._count(word.micro, word.loss)
        return effects

    def _measure(self, way: str, now: float) -> None:
        self._unit_by_way[way] = self._took(now - self._busy_since, self._unit_by_way.get(way, 0.0))
        self._unit_s, self._busy_since = sum(self._unit_by_way.values()), now
        self._made += 1

    # ---- the coordinator -------------------------------------------------------------------------------------

    def on_tick(self, due: BatchTick | None) -> bool:
        if due is None:
            return super().on_tick(None)
        self._take_table(due)
        gone = due.seat in self._table.seats and not self._table.lives(due.seat)
        if due.seat == self._void or gone:
            due = msgspec.structs.replace(due, seat=0)
        return super().on_tick(due)

    def _take_table(self, due: BatchTick) -> None:
        if due.table is None or due.table_no <= self._table.number:
            return
        try:
            self._table = Table(due.table_no, tuple(_seat(row) for row in due.table))
        except ValueError as error:
            self._later.append(do.Note(f"the coordinator told a table of seats that is none: {error}"))

    def words(self, frozen: Frozen | None, spare: int, now: float) -> list[do.Effect]:
        effects, self._later = self._later, []
        if self._flow is not None:
            effects += self._turned(self._flow.on_seats(self._table, now), now)
        return effects + super().words(frozen, spare, now)

    def _work(self, due: BatchTick, now: float) -> list[do.Effect]:
        flow = self._sit(due.seat, now) if self._loaded else None
        if flow is None or self._told is due:
            return []
        self._told = self._batch = due
        self._began_at = now if due.version > flow.version else self._began_at
        flow.on_doubted(due.doubted, now)
        effects = flow.on_version(due.version, due.count, now)
        effects += [e for sender, frame in self._early.take_all() for e in flow.on_frame(sender, frame, now)]
        effects += flow.on_skipped(due.version, mask_from_bytes(due.skipped), now)
        granted = mask_of(micro for first, stop in due.granted for micro in range(first, stop))
        effects += flow.on_grants(due.version, granted, mask_from_bytes(due.again), due.table_no, now)
        return self._turned(effects, now)

    def _sit(self, number: int, now: float) -> StageScheduler | None:
        """The machine of my seat; None: the table that shows the seat has not come yet."""
        seat, mine = self._table.seats.get(number), self._mine
        if self._flow is None and seat is not None and (seat.peer, seat.stage) == (mine.peer, mine.stage):
            place = SeatPlace(mine.run_tag, seat, mine.stages, PLACES, open_most=mine.local_micros)
            self._flow = StageScheduler(place, self._table, self._borders.check_given, self._chance)
            self._flow.counters = self._counters
            self._flow.on_unit(self._unit_s)
            self._flow.on_lines(self._unreached, self._shunned.now(now), now)
        return self._flow

    # ---- other peers, and the clock ----------------------------------------------------------------------------

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]:
        if self._flow is not None:
            return self._turned(self._flow.on_frame(sender, frame, now), now)
        stale = self._early.keep(sender, frame) if self._may_sit_soon(frame.header) else 1
        self._counters.count(Verdict.STALE, stale)
        return []

    def _may_sit_soon(self, header: Header) -> bool:
        """Neighbours hear of my seat when I do, and tell at once what they have of who sat there before."""
        mine = self._mine
        seats = (seat for seat in self._table.living(mine.stage) if seat.peer == mine.peer)
        return table_of(header) > self._table.number or any(seat.number != self._void for seat in seats)

    def on_spoiled(self, sender: str, spoiled: Spoiled, now: float) -> list[do.Effect]:
        return self._turned(self._flow.on_spoiled(sender, spoiled, now), now) if self._flow else []

    def on_lines(self, unreached: set[str]) -> None:
        """Peers that I can't talk to: the machine hears of them with the clock."""
        self._unreached = unreached

    def on_timer(self, now: float) -> list[do.Effect]:
        flow = self._flow
        if flow is None:
            return []
        self._shunned.on_complaints((flow.table.seats[seat].peer for seat in flow.complaints), now)
        lines = flow.on_lines(self._unreached, self._shunned.now(now), now)
        return self._turned([*lines, *flow.on_timer(now)], now)

    # ---- what the machine says ---------------------------------------------------------------------------------

    def _turned(self, said: Iterable[flow_says.Effect], now: float) -> list[do.Effect]:
        return [effect for each in said for effect in self._as_mine(each, now)]

    def _as_mine(self, said: flow_says.Effect, now: float) -> list[do.Effect]:
        match said:
            case flow_says.SendCrossingFrame(to=to, frame=frame):
                return [SendFrame(to, frame)]
            case flow_says.SendKept(to=to, header=header, piece=piece):
                return [SendCrossing(to, header, piece)]
            case flow_says.KeepCrossingPiece(version=version, micro=micro, piece=piece, payload=payload):
                self._lengths[micro, piece] = len(payload)
                return [KeepCrossing(version, micro, piece, payload)]
            case flow_says.Forget(version=version):
                self._lengths.clear()
                return [ForgetCrossings(version)] if version >= 0 else []
            case flow_says.GiveWork():
                return self._hand(said, now)
            case flow_says.FlowNote():
                return self._note(said)
            case flow_says.SeatLost():
                return []  # the tick that brought this table said so: `on_tick`

    def _hand(self, said: flow_says.GiveWork, now: float) -> list[do.Effect]:
        """Work on sums that are gone, or not there yet, is for nobody: the machine is told of another version then."""
        batch = self._batch
        if batch is None or not self._loaded or said.version != self._version:
            return []
        if not self._places:
            self._busy_since = now
        place = min(set(range(PLACES)) - set(self._places.values()))
        self._places[said.way, said.micro] = place
        first = batch.start + said.micro * self._mine.micro
        returned = (
            self._lengths.get((said.micro, KeptPiece.RETURNED), 0)
            if said.way is FlowDirection.BACKWARD
            else 0
        )
        hand = MicrobatchWork(
            way=said.way.value,
            version=said.version,
            micro=said.micro,
            epoch=batch.epoch,
            start=first,
            stop=min(first + self._mine.micro, batch.stop),
            place=place,
            given_bytes=self._lengths.get((said.micro, KeptPiece.INPUT), 0),
            returned_bytes=returned,
            held_out=batch.held_out,
        )
        return [HandOver(hand)]

    def _note(self, note: flow_says.FlowNote) -> list[do.Effect]:
        if note.cause is NoteReason.UNUSABLE:
            self._unusable |= 1 << note.micro
            return []  # the trainer's own word of it is told to people
        seat = self._table.seats.get(note.seat)
        who = f"{seat.peer} in stage {seat.stage}" if seat is not None else "a seat that is gone"
        return [do.Note(f"microbatch {note.micro}: {_SEEN[note.cause]} (of {who}, seat {note.seat})")]


def _seat(row: SeatRow) -> Seat:
    return Seat(row.number, row.peer, row.stage, row.share, row.since, row.gone)
