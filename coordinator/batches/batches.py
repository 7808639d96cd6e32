"""Synchronous batches: begins them, seats trainers, grants microbatches, and says when the round of a batch may open.

Asked by `batch_mode.py`, where `[pipeline] batch` asks for it: with every beat for what to answer, by the driver of a
stage for who must be in a round, and for a look at every turn. What is granted to whom is durable (batch_book.py);
which microbatches are counted is what living members say, and is said again with every beat. Must not know rounds,
digests, or how members come in. Pure.

Why no microbatch counts twice.  It is granted to one seat at a time.  It is granted again only when that seat is gone
for good, by a durable record, and its number never comes again.  What a seat counts goes into a commit only if the
seat's own signed word in that round names exactly the microbatches that the books and its beats say.

Where a model is cut into stages, each microbatch counts once in every one of them.  Grants are for the first stage;
behind it members hand microbatches on by the table of seats, and what a seat says to have counted counts, as long as no
other seat of its stage says so too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farflung.coordinator.batches.batch_book import (
    Batch,
    BatchBegun,
    BatchBook,
    BookedSeat,
    GrantedMicros,
    GrantPace,
    HeldOutEnded,
    Masks,
    MicroSkipped,
    Seated,
    TakenBack,
    Unseated,
    believed_unit_s,
    first_of,
    mask_of_spans,
    news_of_shares,
    patience_s,
    spans_of_mask,
    to_grant,
)
from farflung.coordinator.batches.batch_members import (
    NAMED_MOST,
    BatchDesk,
    BatchMembers,
    BatchView,
    BatchWorker,
    Row,
    SeatWord,
    UnusableMicros,
    are_coming_back,
    is_of,
    losses_by_micro,
    names_of,
    row_of,
    said_by,
    stage_rows,
    staged_tick_of,
    tick_of,
    wants,
)
from farflung.coordinator.batches.rebalancing import Rebalancing
from farflung.coordinator.batches.seat_choice import WHY_GIVEN_UP, Complaints, GivesUp, StageReach
from farflung.coordinator.rounds.round_policy import SeatShare
from farflung.protocol.digests import mask_from_bytes, mask_to_bytes
from farflung.protocol.limits import MEMBERS_PER_ROUND, MICROS_PER_BATCH
from farflung.protocol.messages import UNKNOWN_LENGTH, Beat, Sent
from farflung.protocol.mode_words import BatchBeat, BatchTick
from farflung.protocol.round_words import section

# ---- batch start -------------------------------------------------------------------------------------------
# When a batch begins, and of which samples. Pure.
#
# `Batches` writes the record. Must not know seats beyond their numbers, beats, or rounds.


@dataclass(frozen=True)
class BatchStart:
    desk: BatchDesk
    house: BatchMembers
    moves: Rebalancing

    @property
    def able(self) -> list[BatchWorker]:
        return [
            worker
            for worker in self.house.living().values()
            if worker.verified and self.house.fits(worker.peer) and not self.moves.is_due(worker.peer)
        ]

    @property
    def is_due(self) -> bool:
        desk, able, samples = self.desk, self.able, self.desk.ledger.leases.samples
        known = 0 < samples < UNKNOWN_LENGTH and any(said_by(worker) for worker in able)
        enough = len(able) >= desk.manifest.run.min_peers and not self.short_stage
        is_next = not desk.finished or self.house.is_evaluated_next
        return is_next and not desk.held and known and enough

    @property
    def short_stage(self) -> str:
        """A stage that too few hold for a batch to begin, in words; empty: there is none."""
        pipeline, able = self.desk.manifest.pipeline, [worker.stage for worker in self.able]
        least, served = pipeline.min_per_stage, self._served
        found = (
            (able.count(at), at in served, at) for at in range(pipeline.stages) if able.count(at) < least
        )
        count, _, stage = min(found, default=(least, True, -1))
        stays = ", and rebalance_s = 0 moves nobody there" if self._is_left_empty else ""
        return f"stage {stage}: {count} of at least {least} verified peers{stays}" if stage >= 0 else ""

    @property
    def _served(self) -> set[int]:
        return {worker.stage for worker in self.house.living().values()}

    @property
    def _is_left_empty(self) -> bool:
        """Nobody serves some stage, and nobody else but a newcomer will."""
        pipeline = self.desk.manifest.pipeline
        return pipeline.stages > 1 and not pipeline.rebalance_s and len(self._served) < pipeline.stages

    def batch(self) -> BatchBegun:
        ledger, pipeline, book = self.desk.ledger, self.desk.manifest.pipeline, BatchBook.of(self.desk.ledger)
        if self.house.is_evaluated_next:
            due = book.held_out_batch(ledger.version, self.desk.manifest.eval.windows, pipeline.micro)
        else:
            due = book.next_batch(ledger.version, ledger.leases.samples, pipeline.batch, pipeline.micro)
        return BatchBegun(
            version=due.version,
            epoch=due.epoch,
            start=due.start,
            stop=due.stop,
            count=due.count,
            shares=self._news_of_shares(),
            held_out=due.held_out,
        )

    def _news_of_shares(self) -> dict[int, float]:
        """By seat, where the wiring is to spread work otherwise than in the last batch."""
        if self.desk.manifest.pipeline.stages == 1:
            return {}
        seats = {row.peer: row for row in BatchBook.of(self.desk.ledger).rows if row.lives}
        told = {peer: row.share for peer, row in seats.items()}
        news = news_of_shares(told, self.moves.rates().shares())
        return {seats[peer].number: share for peer, share in news.items()}

    def why_not(self) -> str:
        samples, least = self.desk.ledger.leases.samples, self.desk.manifest.run.min_peers
        if not samples:
            return "waiting for a peer that says how long its data set is"
        if samples == UNKNOWN_LENGTH:
            return "the data set is a stream: synchronous batches need one of known length"
        able = len(self.able)
        if self.short_stage and (able >= least or self._is_left_empty):
            return f"a batch begins when every stage is served: {self.short_stage}"
        return f"a batch begins with at least {least} verified peers, {able} are here"


# ---- batch times -------------------------------------------------------------------------------------------
# What a batch of this length costs: seconds of counting, seconds of its round, seats that were lost in it.
# Pure.
#
# Told by `Batches` at every turn, read by the status alone; nothing is decided by it.
#
# A batch that is counted for T seconds and whose round takes R spends R / T of its time on rounds. Who is
# lost takes half a batch of one seat with it: T / 2 of the n seats of its stage, once in M seconds, which is
# T / (2 M n). The sum is least where T = sqrt(2 M n R).

_SMOOTHED = 0.5  # of the newest batch in what is told


@dataclass
class BatchTimes:
    since: float = -1.0  # the first look
    lost: int = 0  # seats that took counted microbatches with them
    passed_over: int = 0  # batches in a row of which nothing was left
    counting_s: float = 0.0  # 0: no batch was seen from its begin to its end
    round_s: float = 0.0
    _version: int = -1  # of the batch that is open
    _begun_at: float = -1.0  # below 0: it was not seen
    _full_at: float = -1.0
    _is_held_out: bool = False

    def look(self, version: int | None, complete: bool, now: float, held_out: bool = False) -> None:
        """Every turn.  `version`: of the batch; None: there is none.  `held_out`: its time is that of no round."""
        if self.since < 0:
            self.since = now
        if version is not None and version != self._version:
            self.passed_over = 0
            if self._begun_at >= 0 and self._full_at >= 0 and version == self._version + 1:
                self.counting_s = _smooth(self.counting_s, self._full_at - self._begun_at)
                self.round_s = _smooth(self.round_s, now - self._full_at)
            self._begun_at = now if self._version >= 0 or version == 0 else -1.0
            self._version, self._full_at, self._is_held_out = version, -1.0, held_out
        elif version is not None and (held_out or self._is_held_out):
            self._begun_at, self._is_held_out = now, held_out
        elif version is not None and not complete:
            self._full_at = -1.0  # somebody was lost after all were counted
        elif version is not None and self._full_at < 0:
            self._full_at = now

    def told(self, microbatches: int, seats: int, now: float) -> dict[str, object] | None:
        """`microbatches`: as the run asks for them; `seats`: of the stage with the fewest.  None: not known yet."""
        if self.counting_s <= 0 or self.round_s <= 0:
            return None
        costs = costs_of(self.counting_s, self.round_s, self._between_deaths_s(now), seats)
        best = costs.best_s / self.counting_s if costs.best_s is not None else None
        return {
            "counting_s": round(self.counting_s, 3),
            "round_s": round(self.round_s, 3),
            "rounds_cost": round(costs.rounds, 4),
            "deaths_cost": round(costs.deaths, 4),
            "lost_seats": self.lost,
            "batch": microbatches,
            "best": None if best is None else min(MICROS_PER_BATCH, max(1, round(best * microbatches))),
        }

    def _between_deaths_s(self, now: float) -> float | None:
        return (now - self.since) / self.lost if self.lost else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Shares of the time in which microbatches are counted."""

    rounds: float
    deaths: float
    # A batch of so many seconds costs least; None: nobody was lost, so the longer the better.
    best_s: float | None


def costs_of(counting_s: float, round_s: float, between_deaths_s: float | None, seats: int) -> Costs:
    if between_deaths_s is None:
        return Costs(round_s / counting_s, 0.0, None)
    spread_s = 2 * between_deaths_s * max(1, seats)
    return Costs(round_s / counting_s, counting_s / spread_s, math.sqrt(spread_s * round_s))


def _smooth(old: float, new: float) -> float:
    return new if old <= 0 else old + _SMOOTHED * (new - old)


# ---- batches -----------------------------------------------------------------------------------------------

SEAT_EVERY_S = 1.0  # a peer gets no other seat before: each is two records
ON_THE_WAY = 8  # microbatches of one source, for each stage
NOTHING = BatchBeat(-1, 0, 0, b"", b"", False, 0.0)  # what counts of a member that is not at the run's state


@dataclass
class Batches:
    desk: BatchDesk
    house: BatchMembers
    _heard: dict[int, SeatWord] = field(default_factory=dict)  # by seat
    # Trainers that held work for long and did nothing.
    _idle: set[tuple[str, int]] = field(default_factory=set)
    _seated_at: dict[str, float] = field(default_factory=dict)  # by peer: when it got its last seat
    _not_finite: UnusableMicros = field(default_factory=UnusableMicros)
    _complaints: Complaints = field(init=False)
    _reach: StageReach = field(default_factory=StageReach)
    _was: object = None  # what members were told of last
    _masks: Masks | None = None
    _why_not: tuple[object, str] | None = None  # what the batch lacks, and when that was looked for
    _times: BatchTimes = field(default_factory=BatchTimes)

    def __post_init__(self) -> None:
        self.moves = Rebalancing(self.desk, self.house, self._take_seat)
        self._beginning = BatchStart(self.desk, self.house, self.moves)
        self._complaints = Complaints(self.desk.manifest.net.heartbeat_s)

    @property
    def book(self) -> BatchBook:
        return BatchBook.of(self.desk.ledger)

    @property
    def stages(self) -> int:
        return self.desk.manifest.pipeline.stages

    @property
    def counted(self) -> int:
        """The mask of all that is counted in every stage."""
        return self._counts.everywhere

    def counted_in(self, stage: int) -> int:
        return self._counts.of_stage[stage]

    @property
    def _counts(self) -> Masks:
        if self._masks is None or self._masks.stamp != self.book.stamp:
            masks = [0] * self.stages
            for seat in self.book.seats.values():
                masks[seat.stage] |= self._of(seat.number).counted
            self._masks = Masks(self.book.stamp, masks)
        return self._masks

    def _now_counts(self, seat: BookedSeat, heard: SeatWord, counted: int) -> None:
        if heard.counted & ~counted:
            self._masks = None  # it may have been the only one that had these
        elif self._masks is not None:
            self._masks.add(seat.stage, counted)
        heard.counted = counted

    @property
    def _done(self) -> int:
        """The mask of what is done with: of a held-out batch, where the model ends."""
        held_out = self.book.batch is not None and self.book.batch.held_out
        return self.counted_in(self.stages - 1) if held_out else self.counted

    @property
    def complete(self) -> bool:
        """Every microbatch is counted by somebody who is here, in every stage; its loss is known in the last one."""
        batch = self.book.batch
        return batch is not None and not batch.whole & ~self._done

    @property
    def under_way(self) -> bool:
        """A stage's round is in flight: those of the others belong to it, or its work would be for nothing."""
        return any(self.house.flying(stage) for stage in range(self.stages))

    def _of(self, number: int) -> SeatWord:
        if (heard := self._heard.get(number)) is None:  # asked for far more often than made
            heard = self._heard[number] = SeatWord(since=self.desk.now)
        return heard

    # ---- a beat ------------------------------------------------------------------------------------------

    def on_beat(self, worker: BatchWorker, beat: Beat) -> BatchTick | None:
        """Take it in, and say what the member is to do."""
        batch, said = self.book.batch, section(BatchBeat, beat.sections)
        if said is None or batch is None:
            return None
        seat = self.book.seat_of(worker.peer)
        if seat is None and self._may_sit(worker, said):
            number = self.book.last_seat + 1
            self.desk.write(
                Seated(
                    number=number,
                    peer=worker.peer,
                    process=worker.process,
                    trainer=said.trainer,
                    stage=worker.stage,
                )
            )
            seat = self.book.seats[number]
            self._seated_at[worker.peer] = self.desk.now
        if seat is None or not is_of(seat, worker, said):
            return self._tick(batch, None, False, worker.stage, said)
        self._hear(seat, said if worker.verified else NOTHING, beat)
        able = said.want and worker.verified and not worker.leaving and said.version == batch.version
        if able and seat.stage == 0:
            self._grant(seat)
        freeze = self.complete and not batch.held_out and self._of(seat.number).counted != 0
        return self._tick(batch, seat, freeze, seat.stage, said)

    def _tick(
        self, batch: Batch, seat: BookedSeat | None, freeze: bool, stage: int, said: BatchBeat
    ) -> BatchTick:
        if self.stages == 1:
            return tick_of(batch, seat, freeze)
        doubted = () if self.complete else self._complaints.doubted(self.book.seats)
        return staged_tick_of(self.book, batch, seat, freeze, stage, said.table_no, doubted)

    def _may_sit(self, worker: BatchWorker, said: BatchBeat) -> bool:
        served = self.book.of_stage(worker.stage)
        if served and self._complaints.bars(worker.peer):
            return False
        if self.stages > 1 and not self._reach.may_sit(worker, served, self.house):
            return False
        rested = self.desk.now - self._seated_at.get(worker.peer, float("-inf")) >= SEAT_EVERY_S
        room = len(served) < MEMBERS_PER_ROUND and (worker.peer, said.trainer) not in self._idle
        able = said.want and worker.verified and not worker.leaving and not self.house.in_round(worker.peer)
        able = able and not self.moves.is_due(worker.peer)
        return rested and room and able and not self.complete and self.house.fits(worker.peer)

    def _hear(self, seat: BookedSeat, said: BatchBeat, beat: Beat) -> None:
        heard, batch = self._of(seat.number), self.book.batch
        heard.at_all = True
        if batch is None or (said.version, said.seat) != (batch.version, seat.number):
            self._now_counts(seat, heard, 0)
            heard.forget()
            self._complaints.hear(seat.number, (), self.desk.now)
            return
        # In later stages it is not the coordinator that says who holds what.
        its_own = seat.mask if seat.stage == 0 else (1 << batch.count) - 1
        counted = mask_from_bytes(said.counted) & its_own
        made = said.made if self.stages > 1 else 0  # in one piece what is made is counted
        if (counted, made) != (heard.counted, heard.made):
            heard.since = self.desk.now
        self._now_counts(seat, heard, counted)
        heard.unit_s, heard.holds, heard.made = believed_unit_s(said.unit_s), said.holds, made
        if batch.held_out and seat.stage == self.stages - 1:
            heard.losses = losses_by_micro(said, counted)
        self._complaints.hear(seat.number, said.complains, self.desk.now)
        unusable = mask_from_bytes(said.unusable) & batch.whole & its_own & ~counted
        self._not_finite.hear(seat.stage, seat.peer, unusable)
        heard.ready = any(
            each.ready and each.version == batch.version and each.round_no == 0 for each in beat.fragments
        )

    def _grant(self, seat: BookedSeat) -> None:
        free = self.book.free & ~self._not_finite.of(0, seat.peer)
        living = self.house.living()
        busy = [
            each
            for each in self.book.of_stage(0)
            if each.number == seat.number
            or (wants(living.get(each.peer), each) and free & ~self._not_finite.of(0, each.peer))
        ]
        paces = {
            each.number: GrantPace(self._open(each).bit_count(), self._of(each.number).unit_s)
            for each in busy
        }
        heartbeat_s = self.desk.manifest.net.heartbeat_s
        count = to_grant(seat.number, paces, free.bit_count(), heartbeat_s, self._on_the_way)
        if count and not self._open(seat):
            self._of(seat.number).since = self.desk.now
        for first, stop in first_of(free, count):
            self.desk.write(GrantedMicros(seat=seat.number, first=first, stop=stop))

    @property
    def _on_the_way(self) -> int:
        """Microbatches of one source that are in later stages: it has no work with them.  Not so many that none are
        left for sources that sit down next."""
        if self.stages == 1:
            return 0
        sources = sum(worker.stage == 0 for worker in self._beginning.able)
        return min(ON_THE_WAY * self.stages, self.book.free.bit_count() // (2 * max(1, sources)))

    def _open(self, seat: BookedSeat) -> int:
        """The mask of what it is to compute and has not: nothing of what the batch goes without by now."""
        whole = self.book.batch.whole if self.book.batch is not None else 0
        return seat.mask & whole & ~self._of(seat.number).counted

    # ---- every turn --------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Unseat who is gone, begin the batch that is due.  True: members should hear of it at once."""
        self._heard = {n: heard for n, heard in self._heard.items() if n in self.book.seats}
        flying = self.under_way
        for seat in list(self.book.seats.values()):
            in_round = flying and self.house.in_round(seat.peer)
            if in_round:
                self._of(seat.number).since = self.desk.now  # what it owes then is the round's business
            safe = in_round and (self.stages == 1 or self.complete)
            why = "" if safe else self._why_gone(seat)
            if why and in_round:
                # Its sums are safe, and what it kept is not: a stage beside it that does a share again asks for it.
                self.house.abort(seat.stage, f"{self.desk.name(seat.peer)} is needed by another stage: {why}")
            if why and seat.number in self.book.seats:
                self._unseat(seat, why)
        self._forgive_idle()
        self.moves.advance()
        if self.book.batch is not None and self.book.batch.held_out:
            self._end_held_out(self.book.batch)
        if self.book.batch is None and self._beginning.is_due:
            self._begin(self._beginning.batch())
        elif self.book.batch is not None:
            if self.stages > 1:
                self._look_at_contested(self.book.batch)
                self._look_at_reach()
            if not self.complete:
                self._look_at_unusable(self.book.batch)
                self._look_at_complaints()
        batch = self.book.batch
        version = batch.version if batch is not None else None
        held_out = batch is not None and batch.held_out
        self._times.look(version, self.complete, self.desk.now, held_out)
        now = (version, held_out, self.complete, tuple(self.book.seats))
        news, self._was = now != self._was, now
        return news and self.book.batch is not None  # at a commit nobody has said yet that it holds it

    def _forgive_idle(self) -> None:
        """Where nobody has a seat, whoever was too slow for others is better than nobody."""
        served = {seat.stage for seat in self.book.seats.values()}
        living = self.house.living()
        self._idle = {
            (peer, trainer)
            for peer, trainer in self._idle
            if served and (peer not in living or living[peer].stage in served)
        }

    def _why_gone(self, seat: BookedSeat) -> str:
        worker = self.house.living().get(seat.peer)
        if worker is None:
            waits = are_coming_back(self.desk) and not self._of(seat.number).at_all
            return "" if waits else "it is gone"
        if worker.stage != seat.stage:
            return f"it holds stage {worker.stage} now"
        if worker.process != seat.process:
            return "it came back as another process"
        said = said_by(worker)
        if said is not None and said.trainer != seat.trainer:
            return "its trainer was lost, and its sums with it"
        return self._why_idle(seat)

    def _why_idle(self, seat: BookedSeat) -> str:
        heard = self._of(seat.number)
        has_work = bool(self._open(seat)) if self.stages == 1 else heard.holds > 0
        late = self.complete and heard.counted != 0 and not heard.ready
        if not has_work and not late:
            heard.since = self.desk.now
            return ""
        others = (self._of(each.number).unit_s for each in self.book.of_stage(seat.stage) if each is not seat)
        waits_s = patience_s(self.desk.manifest.round.deadline_s, heard.unit_s, others)
        if self.desk.now - heard.since < waits_s or not self._has_others(seat.stage, [seat.peer]):
            return ""
        self._idle.add((seat.peer, seat.trainer))
        return f"it holds microbatches and has counted none for {waits_s:.0f} s"

    def _has_others(self, stage: int, than: Sequence[str]) -> bool:
        """Somebody else of its stage could do its share."""
        return any(
            worker.verified
            and (said := said_by(worker)) is not None
            and said.want
            and (peer, said.trainer) not in self._idle
            for peer, worker in self.house.living().items()
            if peer not in than and worker.stage == stage
        )

    def _unseat(self, seat: BookedSeat, why: str, contested: bool = False) -> None:
        lost = self._of(seat.number).counted.bit_count() if self.book.batch is not None else 0
        self.desk.write(Unseated(number=seat.number, peer=seat.peer, reason=why, contested=contested))
        if lost:
            self._times.lost += 1
            self.desk.note(
                f"{self.desk.name(seat.peer)} had counted {lost} microbatches, which are computed again: {why}"
            )
        self._heard.pop(seat.number, None)
        self._complaints.on_gone(seat.number)

    def _begin(self, begun: BatchBegun) -> None:
        self._idle.clear()
        self._not_finite.forget()
        self._complaints.forget()
        self._masks = None
        for heard in self._heard.values():
            heard.forget()
        self._seated_at = {peer: at for peer, at in self._seated_at.items() if peer in self.house.living()}
        self.desk.write(begun)

    def _end_held_out(self, batch: Batch) -> None:
        """As soon as all losses are known.  That of a microbatch is the mean of its windows."""
        if self.stages > 1:
            self._look_at_contested(batch)
        if not self.complete:
            return
        micro, losses = self.desk.manifest.pipeline.micro, dict[str, dict[int, float]]()
        for seat in self.book.of_stage(self.stages - 1):
            for number, nats in self._of(seat.number).losses.items():
                windows = range(number * micro, min((number + 1) * micro, batch.stop))
                losses.setdefault(seat.peer, {}).update(dict.fromkeys(windows, nats))
        self.desk.write(HeldOutEnded(version=batch.version))
        self._heard.clear()
        self._masks, self._seated_at = None, {}
        self.house.on_losses(losses)

    def _take_seat(self, peer: str, why: str) -> None:
        seat = self.book.seat_of(peer)
        if seat is not None:
            self._unseat(seat, why)

    def _look_at_contested(self, batch: Batch) -> None:
        """Two seats of a stage that name one microbatch would count it twice: the younger one's sums are void.  So are
        sums with a microbatch in them that the batch goes without."""
        skipped = mask_of_spans(batch.skipped)
        for stage in range(self.stages):
            seen = 0
            for seat in sorted(self.book.of_stage(stage), key=lambda seat: seat.number):
                counted = self._of(seat.number).counted
                if self.house.in_round(seat.peer) or not counted & (seen | skipped):
                    seen |= counted
                elif counted & seen:
                    self._unseat(seat, "it counted what another one had counted", contested=True)
                else:
                    self._unseat(seat, "it counted a microbatch that is skipped")

    def _look_at_unusable(self, batch: Batch) -> None:
        if self.stages == 1:
            for seat in list(self.book.seats.values()):
                for first, stop in spans_of_mask(seat.mask & self._not_finite.of(0, seat.peer)):
                    why = f"{self.desk.name(seat.peer)} gets no finite gradient out of it"
                    self.desk.write(TakenBack(seat=seat.number, first=first, stop=stop, reason=why))
        # What keeps a gradient from two most likely keeps it from all; a text that two can't read others can.
        tries = math.inf if batch.held_out else 2
        for stage, micro, by in self._not_finite.hopeless(self._has_others, tries):
            free = self.book.free if self.stages == 1 else batch.whole
            if self.book.batch is batch and free >> micro & 1:
                void = [
                    seat for seat in self.book.seats.values() if self._of(seat.number).counted >> micro & 1
                ]
                self._skip(batch, micro, by)
                self._void(void, f"stage {stage} got no finite gradient out of a microbatch in its sums")
        if self.stages > 1 and self.book.batch is batch:
            self._give_up_who_complains(batch)

    def _give_up_who_complains(self, batch: Batch) -> None:
        """Another one of its stage tries, as long as there is one."""
        for seat in list(self.book.seats.values()):
            mask = self._not_finite.of(seat.stage, seat.peer) & batch.whole
            if mask and self._has_others(seat.stage, [seat.peer]) and not self.house.in_round(seat.peer):
                self._idle.add((seat.peer, seat.trainer))
                self._unseat(seat, "it gets no finite gradient out of one")

    def _void(self, seats: list[BookedSeat], why: str) -> None:
        """Stages behind the one that got no gradient have the microbatch in their sums already: those are void, and
        what a round makes of them."""
        for seat in seats:
            if self.house.flying(seat.stage):
                self.house.abort(seat.stage, why)
            if seat.number in self.book.seats:
                self._unseat(seat, why)

    def _skip(self, batch: Batch, micro: int, peers: list[str]) -> None:
        size = self.desk.manifest.pipeline.micro
        samples = min(batch.start + (micro + 1) * size, batch.stop) - batch.start - micro * size
        got = "loss" if batch.held_out else "gradient"
        why = f"{names_of(self.desk, peers)} got no finite {got} out of it"
        self.desk.write(MicroSkipped(version=batch.version, micro=micro, samples=samples, reason=why))
        if batch.held_out:
            return  # one that can't read the text gets none out of all of them: people hear how many had one
        self.desk.note(f"microbatch {micro} of the batch from version {batch.version} is skipped: {why}")
        if not batch.whole:
            self._times.passed_over += 1
            self.desk.note("no microbatch of this batch gave a finite gradient: has the model diverged?")

    def _look_at_reach(self) -> None:
        """Where nobody of a stage can be dialled its seats can't make a round together."""
        patience_s = self.desk.manifest.net.dead_after_s
        for seat in self._reach.too_many(self.book.seats.values(), self.house, self.desk.now, patience_s):
            if not self.house.in_round(seat.peer):
                self._unseat(seat, WHY_GIVEN_UP)

    def _look_at_complaints(self) -> None:
        """Neighbours that can't work with each other: what is between them moves when one of them is gone."""
        found = self._complaints.verdict(self.book.seats, self.desk.now)
        if found is None:
            return
        seat = self.book.seats[found.seat]
        why = self._why_given_up(found)
        self._complaints.on_given_up(seat.peer)
        self._void([seat], why)
        if found.damaged:
            self.desk.strike(seat.peer, why)

    def _why_given_up(self, found: GivesUp) -> str:
        other = self.desk.name(self.book.seats[found.about].peer)
        if not found.by:
            return f"it says that it can't work with {other} in the stage beside its own, and others can"
        what = "is damaged" if found.damaged else "does not come or is of no use"
        who = f"{found.by} of the stage beside its own" if found.by > 1 else other
        return f"what {who} should get from it {what}"

    def _apart(self) -> str:
        """Pairs that nobody can help, in words; empty: there are none."""
        pairs = self._complaints.stuck(self.book.seats, self.desk.now)
        names = [
            " and ".join(self.desk.name(self.book.seats[number].peer) for number in pair) for pair in pairs
        ]
        told = ", ".join(names[:NAMED_MOST])
        apart = f"; {told} can't work with each other, and no other seat could stand in" if names else ""
        no_way = self._reach.why_no_way(self.stages, self.house)
        return f"; {no_way}" if no_way else apart

    # ---- the round ---------------------------------------------------------------------------------------

    def shares(self, stage: int = 0) -> tuple[dict[str, SeatShare], str]:
        """(who must be in the round of this batch in this stage, and with what; why it can't open yet)."""
        batch = self.book.batch
        if batch is None:
            return {}, self._beginning.why_not()
        if batch.held_out or not self.complete:
            return {}, self._why_not_complete(batch)
        late = [peer for each in range(self.stages) for peer in self._late(each)]
        if late:
            return {}, f"every microbatch is counted: waiting for the sums of {names_of(self.desk, late)}"
        return {
            seat.peer: SeatShare(seat.number, mask_to_bytes(self._of(seat.number).counted))
            for seat in self._with_sums(stage)
        }, ""

    def _with_sums(self, stage: int) -> list[BookedSeat]:
        return [seat for seat in self.book.of_stage(stage) if self._of(seat.number).counted]

    def _late(self, stage: int) -> list[str]:
        """Whose sums do not stand frozen; of a round in flight they do."""
        if self.house.flying(stage):
            return []
        return [seat.peer for seat in self._with_sums(stage) if not self._of(seat.number).ready]

    def _why_not_complete(self, batch: Batch) -> str:
        """The same for every stage, and each asks at every turn."""
        asked = (self.desk.now, self.book.stamp)
        if self._why_not is None or self._why_not[0] != asked:
            self._why_not = asked, self._what_is_missing(batch)
        return self._why_not[1]

    def _what_is_missing(self, batch: Batch) -> str:
        done = [(self.counted_in(stage) & batch.whole).bit_count() for stage in range(self.stages)]
        of = batch.whole.bit_count()
        if batch.held_out:
            return (
                f"the loss of version {batch.version} is computed: {done[-1]} of {of} held-out microbatches"
            )
        told = f"waiting for microbatches: {min(done)} of {of} counted"
        if self.stages == 1:
            return told
        empty = [str(stage) for stage in range(self.stages) if not self.book.of_stage(stage)]
        nobody = f"; nobody serves stage {', '.join(empty)}" if empty else ""
        return f"{told} in stage {done.index(min(done))}{nobody}{self._apart()}"

    def problem(self, share: SeatShare | None, sent: Sent) -> str:
        """Why this word does not go with the share that the round was opened with; empty: it does."""
        if share is None or (sent.seat, sent.counted) == (share.seat, share.counted):
            return ""
        if not sent.hashes:
            return ""  # it has nothing to contribute, and the round says so
        due, has = (mask_from_bytes(raw).bit_count() for raw in (share.counted, sent.counted))
        return f"seat {sent.seat} names {has} microbatches, seat {share.seat} had counted {due}"

    def give_up(self, peers: Iterable[str], why: str) -> None:
        """Their sums did not come into a round, though they live: others compute their share."""
        for peer in sorted(peers):
            seat = self.book.seat_of(peer)
            if seat is not None:
                self._unseat(seat, why)

    def told(self) -> dict[str, object]:
        """For the status: how far the batch is."""
        seats = min(len(self.book.of_stage(stage)) for stage in range(self.stages))
        costs = self._times.told(self.desk.manifest.pipeline.batch, seats, self.desk.now)
        row = row_of(self.book, self.desk.ledger.leases.samples, self._done, costs)
        # Who goes from which stage to which, and how many batches in a row nothing was left of.
        return row | {"moving": self.moves.told or None, "passed_over": self._times.passed_over}

    def told_of_stages(self) -> list[Row]:
        """For the status: how far each is, and which one holds the run up."""
        seen = BatchView(self.book, self._heard, self.house.living())
        return stage_rows(seen, self.desk.ledger.model, self.desk.manifest.pipeline)

    @property
    def units_s(self) -> dict[int, list[float]]:
        """By stage: the busy seconds of each seat for one microbatch, as far as they are known."""
        found: dict[int, list[float]] = {}
        for seat in self.book.seats.values():
            if (unit_s := self._of(seat.number).unit_s) > 0:
                found.setdefault(seat.stage, []).append(unit_s)
        return found

    def share_of(self, peer: str) -> dict[str, object]:
        """Of one member, for the status; nothing where it has no seat."""
        seat = self.book.seat_of(peer)
        if seat is None:
            return {}
        heard = self._of(seat.number)
        return {
            "seat": seat.number,
            "granted": seat.mask.bit_count(),
            "counted": heard.counted.bit_count(),
            "unit_s": round(heard.unit_s, 4) or None,
        }
