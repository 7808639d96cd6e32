"""Which peer moves to which stage, and when: seats that follow the work.  Pure.

Part of the batches, where a model is cut into stages; looked at on every turn.  One decides for all, so that no two
peers jump into one gap.  A move is one record; the peer gives up its seat, its state and its session, and comes in as a
newcomer does, for whom the stage is reserved.  Must not know the words that say so, or how a peer changes its stage.

What is looked for, every `rebalance_s`:
  a stage that nobody serves (or too few), while another one has peers to spare: at two looks running; the stage that
      gives somebody keeps `min_per_stage`.  Where the stage is empty the batch is stuck, and the peer goes at once.
      So is a stage of which nobody there has the state, while a peer elsewhere wrote a checkpoint of it.
  a stage at one seat, while another one has three or more: at the first look, whatever it gains.
  else the move after which the slowest stage is the fastest, if that gains LEAST_GAIN at two looks running, and
      more within half an hour than the fetch of the state takes.  The old stage keeps two seats, or `min_per_stage`.

A peer never leaves a batch in the middle: it goes when the batch is committed and enough others of its stage hold what
was committed.  Nobody moves while somebody does, nor for three looks after it; that a peer went is durable.

What a liar gains by its word that it fits a stage, or that it is about to serve one.  Whoever was sent and did not come
is chosen for no gain in the next hour, and for an empty stage after all others.  No move waits for ever: not for others
of the old stage to show what was committed, and not while another stage is empty.  Whoever holds no state of its stage
for half an hour, and longer where that is large, does not count as serving it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from farflung.coordinator.batches.batch_book import BatchBook, Mate, Moving, SeatRates, traffic_of_stages
from farflung.coordinator.batches.batch_members import (
    BatchDesk,
    BatchMembers,
    BatchWorker,
    are_coming_back,
    said_by,
)

QUIET_LOOKS = 3
# So long somebody may come back to a stage that has nobody, before one of another stage goes there.
EMPTY_S = 5.0
KEEPS_LEAST = 2  # seats, of a stage that gives somebody away
FULL_STAGE = 3  # seats: it gives one to a stage that has a single one
PAYS_WITHIN_S = 1800.0
LEAST_GAIN = 1.15  # a move must raise the rate of the slowest stage by this factor
ARRIVES_WITHIN_S = 60.0  # in the other stage, as a newcomer; its state may take longer
RESTS_S = 3600.0  # whoever was to move and did not is chosen after all others
VALUE_BYTES = 12  # of the outer state: parameters and two moments
LEAST_BYTES_S = 64_000  # of a line that is slow, and not too slow to fetch a state


@dataclass
class Move:
    peer: str
    of: int
    to: int
    why: str
    fills: bool  # a stage with too few peers for a batch
    version: int  # of the run, when it was chosen
    keeps: int  # seats, of the stage that it leaves
    free_at: float | None = None  # its batch is over, and it waits for others of its stage
    gone_at: float | None = None  # it was told to go


@dataclass(frozen=True)
class Wish:
    """The best move that a look has found."""

    peer: str
    to: int
    why: str
    keeps: int
    fills: bool = False  # a stage with too few peers for a batch
    now: bool = False  # at the first look


class Rebalancing:
    def __init__(self, desk: BatchDesk, house: BatchMembers, unseat: Callable[[str, str], None]) -> None:
        """`unseat`: (peer, why); nothing where it has no seat."""
        self._desk, self._house, self._unseat = desk, house, unseat
        rules = desk.manifest.pipeline
        self._every_s = rules.rebalance_s if rules.stages > 1 else 0.0
        self._look_at: float | None = None
        self._wished: tuple[int, bool] | None = (
            None  # of the last look: to which stage, and whether it was short
        )
        self.least_gain = LEAST_GAIN
        self.under_way: Move | None = None
        self._rests_until: dict[str, float] = {}  # by peer
        self._without_since: dict[tuple[str, int], float] = {}  # by peer and stage: it holds no state there
        self._seen_at = -math.inf
        self._empty_since: float | None = None  # a stage that nobody is on the way to
        self._stopped_since: float | None = None  # the run, by a stage that has nobody

    # ---- questions -------------------------------------------------------------------------------------------

    def is_due(self, peer: str) -> bool:
        """It is on its way out of its stage: it gets no seat there, and no batch counts on it."""
        move = self.under_way
        if move is None or move.peer != peer or not self._is_over(move):
            return False
        worker = self._house.living().get(peer)
        return worker is not None and worker.stage == move.of

    def goes_to(self, peer: str) -> int | None:
        """It was told to serve this stage."""
        move = self.under_way
        return move.to if move is not None and move.peer == peer and move.gone_at is not None else None

    @property
    def told(self) -> str:
        """For people; empty: nobody moves."""
        move = self.under_way
        if move is None:
            return ""
        when = "moves" if move.gone_at is not None else "is to move"
        return f"{self._desk.name(move.peer)} {when} from stage {move.of} to stage {move.to}: {move.why}"

    def rates(self) -> SeatRates:
        """Of all who work now."""
        crew = [_mate(worker) for worker in self._house.living().values() if self._works(worker)]
        desk = self._desk
        return SeatRates(crew, traffic_of_stages(desk.ledger.model, desk.manifest.pipeline))

    @property
    def _book(self) -> BatchBook:
        return BatchBook.of(self._desk.ledger)

    def _is_over(self, move: Move) -> bool:
        """The batch in which it was chosen: whatever it has counted is in a commit, or of no use to anybody."""
        batch = self._book.batch
        return self._is_stuck(move) or batch is None or batch.version > move.version

    def _is_stuck(self, move: Move) -> bool:
        """The batch can't end without the move."""
        living = self._house.living()
        there = [living.get(seat.peer) for seat in self._book.of_stage(move.to)] if move.fills else []
        # Who is not here may come back to its seat, and who is about to leave stays until its sums are safe.
        return move.fills and all(worker is not None and self._is_late(worker) for worker in there)

    def _works(self, worker: BatchWorker) -> bool:
        said = said_by(worker)
        return worker.verified and not worker.leaving and said is not None and said.want

    # ---- every turn ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        desk = self._desk
        if not self._every_s or desk.finished:
            return
        self._see_who_serves()
        if self.under_way is not None:
            self._follow(self.under_way)
            return
        if self._look_at is None:
            self._look_at = desk.now + self._every_s
        rested_s = desk.clock_s - self._book.moved_at_s
        if self._is_stopped and not desk.held:
            wish = self._to_the_short()
            if wish is not None:
                self._begin(wish)
            return
        if desk.now < self._look_at or rested_s < QUIET_LOOKS * self._every_s or desk.held:
            return
        self._look_at = desk.now + self._every_s
        wish = self._wish()
        before = self._wished
        self._wished = (wish.to, wish.fills) if wish is not None else None
        if wish is not None and (wish.now or before == self._wished):
            self._begin(wish)

    @property
    def _is_stopped(self) -> bool:
        """By a stage that has had nobody for a while: no batch ends, so no look is waited for."""
        if not self._desk.ledger.learned or not self._empty:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = self._desk.now
        since = self._stopped_since
        return since is not None and self._desk.now - since >= min(EMPTY_S, self._every_s)

    def _see_who_serves(self) -> None:
        now, living = self._desk.now, self._house.living().values()
        if now - self._seen_at < self._every_s:
            return
        self._seen_at = now
        without = {(each.peer, each.stage) for each in living if not each.verified}
        self._without_since = {each: self._without_since.get(each, now) for each in without}
        self._rests_until = {peer: until for peer, until in self._rests_until.items() if now < until}

    def _begin(self, wish: Wish) -> None:
        worker = self._house.living()[wish.peer]
        version, name = self._desk.ledger.version, self._desk.name(wish.peer)
        self._wished = None
        self.under_way = Move(wish.peer, worker.stage, wish.to, wish.why, wish.fills, version, wish.keeps)
        self._desk.note(f"{name} is to move from stage {worker.stage} to stage {wish.to}: {wish.why}")

    def _follow(self, move: Move) -> None:
        worker = self._house.living().get(move.peer)
        if self._is_less_urgent(move):
            self._end(f"{self._desk.name(move.peer)} is not waited for: a stage has nobody")
        elif move.gone_at is None:
            self._let_go(move, worker)
        elif worker is not None and worker.stage == move.to and worker.verified:
            self._end(f"{self._desk.name(move.peer)} serves stage {move.to} now")
        elif self._desk.now - move.gone_at >= self._patience_s(move, worker):
            self._rest(move.peer)
            self._end(f"{self._desk.name(move.peer)} has not come to serve stage {move.to}")

    def _is_less_urgent(self, move: Move) -> bool:
        """Another stage has had nobody for a whole look, so that no batch ends: that is not to wait for this move."""
        empty = self._empty
        if not empty or (move.fills and move.to in empty):
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = self._desk.now
        return self._empty_since is not None and self._desk.now - self._empty_since >= self._every_s

    def _rest(self, peer: str) -> None:
        self._rests_until[peer] = self._desk.now + RESTS_S

    def _patience_s(self, move: Move, worker: BatchWorker | None) -> float:
        arrives = worker is not None and worker.stage == move.to
        return PAYS_WITHIN_S if arrives else ARRIVES_WITHIN_S

    def _let_go(self, move: Move, worker: BatchWorker | None) -> None:
        """It gives its seat up as soon as the batch is over, and goes when the others hold what was committed."""
        if worker is None or worker.leaving or worker.stage != move.of or not self._can_spare(move):
            self._end("")
            return
        # A round of its stage that is done waits for the stage that it is to go to.
        if not self._is_over(move) or (self._house.in_round(move.peer) and not self._is_stuck(move)):
            return
        desk, why = self._desk, f"it moves to stage {move.to}, which is short"
        self._unseat(move.peer, why)
        move.free_at = desk.now if move.free_at is None else move.free_at
        others = [each for each in self._here(move.of, move.peer) if self._works(each)]
        if len(others) < move.keeps and desk.ledger.learned:
            if desk.now - move.free_at >= ARRIVES_WITHIN_S:
                self._rest(move.peer)
                self._end(f"{desk.name(move.peer)} stays: too few others of stage {move.of} hold its state")
            return
        at_s = desk.clock_s
        desk.write(Moving(peer=move.peer, stage=move.of, to=move.to, at_s=at_s, reason=move.why))
        desk.note(f"{desk.name(move.peer)} moves from stage {move.of} to stage {move.to}: {move.why}")
        move.gone_at = desk.now

    def _here(self, stage: int, without: str = "") -> list[BatchWorker]:
        """Who serves it, or is about to."""
        living = self._house.living().items()
        return [each for peer, each in living if peer != without and each.stage == stage and not each.leaving]

    def serves(self, worker: BatchWorker) -> bool:
        """Its stage, or it is about to; not if it has been about to for too long."""
        return not worker.leaving and not self._is_late(worker)

    def _is_late(self, worker: BatchWorker) -> bool:
        """It might have fetched the state of its stage by now, over a line that is not too slow."""
        now = self._desk.now
        patience_s = PAYS_WITHIN_S + self._state_bytes(worker.stage) / LEAST_BYTES_S
        late = now - self._without_since.get((worker.peer, worker.stage), now) >= patience_s
        return late and self._desk.ledger.learned

    def _awaits(self, stage: int) -> bool:
        """Somebody is still fetching its state, and will have a seat there soon."""
        return any(self.serves(each) and not each.verified for each in self._here(stage))

    def _held(self) -> Counter[int]:
        """By stage: how many serve it; after a restart with those who have a seat there and are not back yet."""
        living = self._house.living()
        found = Counter(each.stage for each in living.values() if self.serves(each))
        if are_coming_back(self._desk):
            found.update(seat.stage for seat in self._book.seats.values() if seat.peer not in living)
        return found

    def _is_lost_there(self, stage: int) -> bool:
        """Those who serve it have nothing of what was learned, and wait for somebody who serves another one now."""
        here = {worker.peer for worker in self._here(stage) if self.serves(worker)}
        saved = set(self._house.saved_by(stage))
        works = any(map(self._works, self._here(stage)))
        return self._desk.ledger.learned and not works and not here & saved and bool(here and saved)

    @property
    def _empty(self) -> set[int]:
        return set(range(self._stages)) - self._held().keys()

    def _can_spare(self, move: Move) -> bool:
        if move.fills:
            least = self._desk.manifest.pipeline.min_per_stage
            still = self._held()[move.to] < least or self._is_lost_there(move.to)
            return still and len(self._here(move.of, move.peer)) >= move.keeps
        seated = {seat.peer for seat in self._book.of_stage(move.of)} - {move.peer}
        return len(seated) >= move.keeps

    def _end(self, told: str) -> None:
        self.under_way, self._look_at = None, self._desk.now + self._every_s
        self._empty_since = None
        if told:
            self._desk.note(told)

    # ---- what is wished for ------------------------------------------------------------------------------------

    def _wish(self) -> Wish | None:
        return self._to_the_short() or self._to_a_single() or self._to_the_slowest()

    def _to_the_short(self) -> Wish | None:
        """A stage with too few peers for a batch; among them those count that are still coming in."""
        least = self._desk.manifest.pipeline.min_per_stage
        held = self._held()
        short = [at for at in range(self._stages) if held[at] < least or self._is_lost_there(at)]
        if not short:
            return None
        to, rates = min(short, key=lambda stage: (held[stage], stage)), self.rates()
        saved, working = self._house.saved_by(to), Counter(mate.stage for mate in rates.crew)
        able = [
            worker
            for worker in self._house.living().values()
            if held[worker.stage] > least and self._may(worker, to, self._works(worker))
        ]
        if self._desk.ledger.learned:
            # From those there who hold no state of it nobody gets any.
            in_vain = self._here(to) and not working[to]
            left = [worker for worker in able if working[worker.stage] > least]
            able = [worker for worker in left if worker.peer in saved or not in_vain]

        def worth(worker: BatchWorker) -> tuple[bool, bool, bool, int, float, str]:
            mate, rests = _mate(worker), worker.peer in self._rests_until
            left = rates.sums[worker.stage] - rates.of(mate, worker.stage)
            in_round = self._house.in_round(worker.peer)
            return (rests, worker.peer not in saved, in_round, -held[worker.stage], -left, worker.peer)

        best = min(able, key=worth, default=None)
        why = f"stage {to} has {held[to]} of at least {least} peers"
        if held[to] >= least:
            why = f"nobody in stage {to} has its state, and this peer wrote a checkpoint of it"
        return Wish(best.peer, to, why, least, fills=True) if best is not None else None

    def _may(self, worker: BatchWorker, to: int, works: bool) -> bool:
        """`works`: or nothing was learned yet, so that whoever is here is as good as any."""
        if not (works or not self._desk.ledger.learned) or worker.leaving or to not in worker.fits:
            return False
        if worker.dialable:
            return self._doors(worker.stage) != [worker.peer] or self._is_no_door(worker)
        beside = [stage for stage in (to - 1, to + 1) if 0 <= stage < len(self._seats())]
        return all(self._reaches(worker, stage) for stage in ([to] if self._here(to) else beside))

    def _reaches(self, worker: BatchWorker, stage: int) -> bool:
        """Though nobody can dial it."""
        mates = [each.peer for each in self._here(stage, worker.peer)]
        met = bool(mates) and all(self._house.meet(worker.peer, mate) for mate in mates)
        return met or bool(self._doors(stage))

    def _is_no_door(self, worker: BatchWorker) -> bool:
        """Those who stay in its stage have a way to each other and to all in the stages beside it, without it."""
        mates = self._here(worker.stage, worker.peer)
        beside = [e for at in (worker.stage - 1, worker.stage + 1) for e in self._here(at, worker.peer)]
        pairs = [(a, b) for a in mates for b in [*mates, *beside] if a.peer != b.peer]
        return all(a.dialable or b.dialable or self._house.meet(a.peer, b.peer) for a, b in pairs)

    def _doors(self, stage: int) -> list[str]:
        """Two peers that nobody can dial may have no way: whoever can be dialled stays where it is the only one, and
        whoever can't goes where one is, or where it meets all."""
        return [worker.peer for worker in self._here(stage) if worker.dialable]

    def _to_a_single(self) -> Wish | None:
        rates, seats = self.rates(), self._seats()
        single = [stage for stage, count in enumerate(seats) if count == 1 and not self._awaits(stage)]
        if not single or max(seats) < FULL_STAGE or self._empty:
            return None
        to = min(single, key=lambda stage: (rates.sums[stage], stage))
        best = self._best(rates, to, max(FULL_STAGE, self._keeps + 1))
        if best is None:
            return None
        return Wish(best.peer, to, f"stage {to} has a single seat", self._keeps, now=True)

    def _to_the_slowest(self) -> Wish | None:
        rates = self.rates()
        if not rates.measured or min(self._seats()) == 0:
            return None
        slowest = min(range(rates.stages), key=lambda stage: (rates.sums[stage], stage))
        best = self._best(rates, slowest, self._keeps + 1)
        if best is None or self._awaits(slowest):
            return None
        before, after = rates.sums[slowest], rates.after(best, slowest)
        gain = after / before if before > 0 else 0.0
        pays = (gain - 1.0) * PAYS_WITHIN_S > self._fetch_s(best, slowest)
        if gain < self.least_gain or not pays:
            return None
        why = f"it is the slowest, and does {after:.2f} instead of {before:.2f} microbatches/s then"
        return Wish(best.peer, slowest, why, self._keeps)

    @property
    def _stages(self) -> int:
        return self._desk.manifest.pipeline.stages

    @property
    def _keeps(self) -> int:
        return max(KEEPS_LEAST, self._desk.manifest.pipeline.min_per_stage)

    def _seats(self) -> list[int]:
        return [len(self._book.of_stage(stage)) for stage in range(self._stages)]

    def _best(self, rates: SeatRates, to: int, least_seats: int) -> Mate | None:
        """Of a stage with at least so many seats of those who work: after its move the slowest stage is the fastest."""
        living = self._house.living()
        seated = [mate for mate in rates.crew if self._book.seat_of(mate.peer) is not None]
        seats = Counter(mate.stage for mate in seated)
        able = [
            mate
            for mate in seated
            if mate.stage != to
            and seats[mate.stage] >= least_seats
            and mate.peer not in self._rests_until
            and self._may(living[mate.peer], to, True)
        ]
        return min(able, key=lambda mate: (-round(rates.after(mate, to), 9), mate.peer), default=None)

    def _fetch_s(self, mate: Mate, to: int) -> float:
        """How long the state of the stage takes over its line; 0 where that is not known."""
        return self._state_bytes(to) / mate.down_bytes_per_s if mate.down_bytes_per_s > 0 else 0.0

    def _state_bytes(self, stage: int) -> int:
        model = self._desk.ledger.model
        if model is None or not model.stages:
            return 0
        return model.stages[stage].chunk_count * model.chunk_elements * VALUE_BYTES


def _mate(worker: BatchWorker) -> Mate:
    beat = worker.beat
    said = said_by(worker)
    if beat is None or said is None:
        return Mate(worker.peer, worker.stage)
    # A rough rate is a lower bound: it blames no line.
    up, down = (0, 0) if beat.rough else (beat.up_bytes_per_s, beat.down_bytes_per_s)
    return Mate(worker.peer, worker.stage, said.unit_s, up, down)
