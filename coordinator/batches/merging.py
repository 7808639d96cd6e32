"""The batch that is merged while the next one is counted: who owes which sums, and whether they can still give them.
Pure.

One of the parts of `batches.py`, for runs with `[pipeline] delay`.  What is owed is durable, in the record that began
the next batch.  Must not know how sums are merged, nor anything of the batch that is counted.

Why a share that is lost voids both batches.  It was made at values that no trainer has any more: all have loaded those
of the version after, for the next batch.  Nor can that one be kept, whose gradient belongs on a version that is never
made.  As long as a round is in flight it is the round that says whether it can do without a member; between rounds it
is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.coordinator.batches.words import AWAIT_DEAD, Desk, House, Share, Worker, names_of
from farflung.coordinator.ledger.batch_book import Batch, BatchBook
from farflung.coordinator.ledger.records import OwedSums


@dataclass
class Merging:
    desk: Desk
    house: House
    _unready_since: dict[str, float] = field(default_factory=dict)  # by peer that owes sums and shows none
    _seen: set[str] = field(default_factory=set)  # peers that owe sums and were here

    @property
    def book(self) -> BatchBook:
        return self.desk.ledger.batches

    @property
    def batch(self) -> Batch | None:
        return self.book.merging

    def owes(self, peer: str) -> bool:
        return any(peer in of_stage for of_stage in self.book.owed)

    def shares(self, stage: int) -> tuple[dict[str, Share], str]:
        """(who must be in the round of this stage, and with what; why it can't open yet)."""
        batch = self.batch
        if batch is None:
            return {}, "no batch is merged"
        late = [peer for each, peer in self._between_rounds() if not self._is_ready(peer, batch)]
        if late:
            named = names_of(self.desk, late)
            return {}, f"the batch from version {batch.version} is whole: waiting for the sums of {named}"
        return {peer: Share(sums.seat, sums.counted) for peer, sums in self.book.owed[stage].items()}, ""

    def why_lost(self) -> str:
        """Why it can't be merged any more; empty: it can, as far as is known."""
        batch = self.batch
        if batch is None:
            self._unready_since.clear()
            self._seen.clear()
            return ""
        self._seen |= {peer for of_stage in self.book.owed for peer in of_stage} & self.house.living().keys()
        between = self._between_rounds()
        late = {peer for _, peer in between if not self._is_ready(peer, batch)}
        self._unready_since = {
            peer: self._unready_since.get(peer, self.desk.now) for peer in late if peer in self.house.living()
        }
        for stage, peer in between:
            if why := self._why_gone(peer, stage, self.book.owed[stage][peer]):
                return f"the sums of {self.desk.name(peer)} are lost: {why}"
        return ""

    def why_stuck(self) -> str:
        """Of the batch that is counted, at the values of an older version: nobody of a stage has them any more."""
        batch, stages = self.book.batch, self.desk.manifest.pipeline.stages
        if batch is None or self.batch is not None or batch.taken_at >= self.desk.ledger.version:
            return ""
        able = {worker.stage for worker in self.house.living().values() if holds_weights(worker, batch)}
        empty = [stage for stage in range(stages) if not self.book.of_stage(stage) and stage not in able]
        where = f" of stage {empty[0]}" if empty and stages > 1 else ""
        return f"nobody{where} has the values of version {batch.taken_at} any more" if empty else ""

    def takes_the_step(self, worker: Worker) -> bool:
        """While the peer makes the next version its trainer works on, at the values of the one before."""
        batch = self.book.batch
        return batch is not None and batch.taken_at < self.desk.ledger.version and worker.on_its_way

    def lets_sit(self, worker: Worker) -> bool:
        """With delay nobody sits down who might never have the values of the batch."""
        batch = self.book.batch
        return not self.desk.manifest.pipeline.delay or batch is None or holds_weights(worker, batch)

    def _between_rounds(self) -> list[tuple[int, str]]:
        """(stage, who owes it sums), of stages in which no round is at it."""
        return [
            (stage, peer)
            for stage, of_stage in enumerate(self.book.owed)
            if not self.house.flying(stage)
            for peer in of_stage
        ]

    def _why_gone(self, peer: str, stage: int, sums: OwedSums) -> str:
        desk, worker = self.desk, self.house.living().get(peer)
        if worker is None:
            # After a restart those who owe sums have a while to come back.
            waited = desk.now - desk.began_at >= AWAIT_DEAD * desk.manifest.net.dead_after_s
            return "it is gone" if waited or peer in self._seen else ""
        if worker.stage != stage:
            return f"it holds stage {worker.stage} now"
        if worker.process != sums.process:
            return "it came back as another process"
        patience_s = desk.manifest.round.deadline_s
        late_s = desk.now - self._unready_since.get(peer, desk.now)
        return f"it has shown none for {patience_s:.0f} s" if late_s >= patience_s else ""

    def _is_ready(self, peer: str, batch: Batch) -> bool:
        worker = self.house.living().get(peer)
        return worker is not None and stands_frozen(worker, batch.version)


def stands_frozen(worker: Worker, version: int) -> bool:
    """It says that what it has for a round from this version stands in a slot, and no round is at it."""
    said = worker.beat.fragments if worker.beat is not None else ()
    return any(each.ready and each.version == version and each.round_no == 0 for each in said)


def holds_weights(worker: Worker, batch: Batch) -> bool:
    """Its trainer has the values at which the gradient of this batch is taken, for this batch."""
    said = worker.beat.batch if worker.beat is not None else None
    if said is None:
        return False
    at = said.weights if said.weights >= 0 else said.version
    return (said.version, at) == (batch.version, batch.taken_at)


def missed_weights(worker: Worker, batch: Batch) -> bool:
    """Its trainer has not, and the peer itself is further: nobody gives it an older version."""
    said = worker.beat.fragments if worker.beat is not None else ()
    return not holds_weights(worker, batch) and any(each.version > batch.taken_at for each in said)
