"""When a batch begins, and of which samples.  Pure.

Called by `batches.py`, which writes the record.  Must not know seats beyond their numbers, beats, or rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.coordinator.batches.batch_book import BatchBegun, BatchBook
from farflung.coordinator.batches.batch_members import BatchDesk, BatchMembers, BatchWorker
from farflung.coordinator.batches.rates import news_of_shares
from farflung.coordinator.batches.rebalancing import Rebalancing
from farflung.protocol.messages import UNKNOWN_LENGTH


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
        known = 0 < samples < UNKNOWN_LENGTH and any(w.beat is not None and w.beat.batch for w in able)
        enough = len(able) >= desk.manifest.run.min_peers and not self.short_stage
        return not desk.finished and not desk.held and known and enough

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
        ledger, pipeline = self.desk.ledger, self.desk.manifest.pipeline
        due = BatchBook.of(ledger).next_batch(
            ledger.version, ledger.leases.samples, pipeline.batch, pipeline.micro
        )
        return BatchBegun(
            version=due.version,
            epoch=due.epoch,
            start=due.start,
            stop=due.stop,
            count=due.count,
            shares=self._news_of_shares(),
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
