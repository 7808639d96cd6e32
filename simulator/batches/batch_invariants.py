"""The promises of synchronous batches as checks on a simulated run: P11, and P7 where nothing is leased.

Fed like the other invariants, of which it is a kind.  It reads who counted what off the numbers themselves: the sums of
a slot say how many microbatches are in them and which (batch_trainer.py), whatever any machine says of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from farflung.coordinator.batches.batch_book import BatchBegun, BatchBook, MicroSkipped
from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.peer.machine.effects import Encode
from farflung.protocol.digests import bits, mask_from_bytes
from farflung.protocol.frames import Payload
from farflung.protocol.manifest import Manifest
from farflung.protocol.round_words import Commit
from farflung.simulator.batches.batch_trainer import mark_of
from farflung.simulator.invariants import Contributed, Invariants
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.trainer_surroundings import Sample


class BatchInvariants(Invariants):
    def __init__(self, of: tuple[int, Manifest], *args: Any) -> None:
        """`of`: samples of an epoch, and the run's rules."""
        super().__init__(*args)
        samples, manifest = of
        self._epoch_samples, self._micro = samples, manifest.pipeline.micro
        self._clip = manifest.batch_clip
        self.together: Sequence[
            Commit
        ] = ()  # of all stages of a batch; of a model in one piece its commit alone
        self.clipped = 0  # rounds
        self._begun: BatchBegun | None = None  # that is counted
        self._skipped: set[int] = set()
        # version -> (epoch, where its batch ended), in any era; and where one ended of which nothing was left
        self._ends: dict[int, set[tuple[int, int]]] = {0: {(0, 0)}}
        self._sums: dict[tuple[str, int], tuple[int, int]] = {}  # (peer, round) -> (how many, their marks)
        self._skips: set[Sample] = set()  # that nobody learns from

    def on_record(self, record: Record) -> None:
        match record:
            case BatchBegun():
                self._on_begun(record)
            case MicroSkipped(micro=micro):
                self._on_skipped(micro)
            case CommittedRound(commit=commit):
                self._once_each(record, commit)
                self._is_clipped(commit, self.together or [commit])
        super().on_record(record)

    def _on_begun(self, begun: BatchBegun) -> None:
        told = f"a batch from {begun.version}, the run is at {self.version}"
        self._require("P12", begun.version == self.version, told)
        ends = self._ends[begun.version]
        due = {(epoch, end) if end < self._epoch_samples else (epoch + 1, 0) for epoch, end in ends}
        told = f"the batch from version {begun.version} begins at {begun.epoch, begun.start}, not at {due}"
        self._require("P11", (begun.epoch, begun.start) in due, told)
        self._begun, self._skipped = begun, set()

    def _on_skipped(self, micro: int) -> None:
        """Of a batch that is skipped to its last microbatch no version is made."""
        begun = self._begun
        assert begun is not None
        self._skipped.add(micro)
        first = begun.start + micro * self._micro
        self._skips |= {(begun.epoch, place) for place in range(first, min(begun.stop, first + self._micro))}
        if len(self._skipped) == begun.count:
            self._ends[begun.version].add((begun.epoch, begun.stop))

    def _once_each(self, record: CommittedRound, commit: Commit) -> None:
        begun, seen = self._begun, 0
        self._require("P11", begun is not None, f"version {commit.version} is of no batch")
        assert begun is not None
        told = f"version {commit.version} is of the batch from {begun.version}"
        self._require("P11", commit.version == begun.version + 1, told)
        for peer, raw in record.counted.items():
            mask = mask_from_bytes(raw)
            self._require("P11", not mask & seen, f"{peer} counted what others in the commit had counted")
            seen |= mask
            says = self._sums[peer, commit.round_no]
            marks = sum(mark_of(begun.version, micro) for micro in bits(mask))
            told = f"the sums of {peer} hold {says}, its mask says {(mask.bit_count(), marks)}"
            self._require("P11", says == (mask.bit_count(), marks), told)
        due = sum(1 << micro for micro in range(begun.count) if micro not in self._skipped)
        self._require("P11", seen == due, f"version {commit.version} is not made of its whole batch")
        missing = set(commit.included) - set(record.counted)
        self._require("P11", not missing, f"{sorted(missing)} are in the commit and counted nothing")
        self._ends.setdefault(commit.version, set()).add((begun.epoch, begun.stop))

    def _is_clipped(self, commit: Commit, together: Sequence[Commit]) -> None:
        """All stages of a batch are multiplied by one factor, which bounds the length of the whole."""
        values = [
            self.gather.decode(result, self.elements) for each in together for result in self.results_of(each)
        ]
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in values))
        due = min(1.0, self._clip / (norm + 1e-6))
        told = f"a gradient of length {norm} is multiplied by {commit.factor}, not by {due}"
        self._require("P1", math.isclose(commit.factor, due, rel_tol=1e-6), told)
        alike = {each.factor for each in together} == {commit.factor}
        self._require("P1", alike, f"stages of version {commit.version} are multiplied by different factors")
        self.clipped += due < 1.0

    def _saw_encoded(self, details: tuple[VirtualPeer, Encode, dict[int, Payload]]) -> None:
        peer, encode, payloads = details
        work, _ = peer.kept_work(encode.slot, 0)
        part = peer.machine.part
        mine = part.replicas[0].rounds.contribution if part is not None else None
        if mine is None:
            return  # the round is over by now
        count, marks = (float(value) * mine.frozen.tokens for value in peer.slots[encode.slot][:2])
        self._sums[peer.peer, encode.round_no] = (round(count), round(marks))
        samples = tuple(sample for learned in work for sample in learned)
        key = (peer.peer, encode.round_no)
        made = self.contributions.setdefault(key, Contributed(round(count), samples, {}))
        made.payloads.update((index, bytes(payload)) for index, payload in payloads.items())

    def on_books(self, ledger: Ledger) -> None:
        """P7: what was learned is all that lies before the cursor, without what was skipped; nothing twice."""
        epoch, place = BatchBook.of(ledger).cursor
        before = {(e, p) for e in range(epoch) for p in range(self._epoch_samples)}
        before |= {(epoch, p) for p in range(place)}
        learned = self.samples_committed[0]
        told = f"learned {len(learned)} of the {len(before)} samples before {epoch, place}"
        self._require("P7", learned <= before <= learned | self._skips, told)
        self._fresh.clear()
