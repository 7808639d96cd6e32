"""Sham members of a model in stages: they are seated, count microbatches without computing any, and beat.

    python tests/rig/staged_shams.py URL COUNT OWNERS STAGES      started by benchmarks/coordinator.py --stages

Beyond what shams.py does, each could hold any stage, takes the one that its welcome names, and counts a few
microbatches that nobody else of its stage counts; so no batch ever ends, and every beat brings a mask as long as any.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from farflung.protocol.messages import OfBeat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from farflung.peer.machine.handshake import Offer
from farflung.protocol.digests import hash_bytes, mask_of, mask_to_bytes
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.limits import MICROS_PER_BATCH
from farflung.protocol.mode_words import BatchBeat, BatchTick
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec
from farflung.protocol.run_terms import Attached, Known
from rig.shams import Crowd, Sham, TickHead

CHUNKS = 3  # of a stage
APART = 2048  # seats with numbers so far apart count the same microbatches, and never are so many in a stage
UNIT_S = 0.5
EPOCH = 1 << 40
_tick = msgspec.msgpack.Decoder(BatchTick)
OF_BATCH = msgspec.msgpack.encode("batch")  # its tag


def model_of(stages: int) -> ModelSchema:
    border = (BorderTensor("float32", (8,)),)
    return ModelSchema(
        tuple(TensorSpec(f"w{stage}", (CHUNKS, 4), "float32", "param") for stage in range(stages)),
        4,
        CHUNKS * stages,
        CHUNKS * stages,
        hash_bytes(b""),
        tuple(
            StageSpec(stage, stage, CHUNKS, 0, border if stage < stages - 1 else ())
            for stage in range(stages)
        ),
    )


class StagedSham(Sham):
    seat = table_no = batch_version = 0
    counted = b""

    def offer(self, known: Known) -> Offer:
        return Offer(
            Attached(known, self.crowd.model, tuple(range(len(self.crowd.model.stages)))), self.address
        )

    @property
    def samples(self) -> int:
        return EPOCH if self.fragment == 0 else 0

    def sections(self) -> tuple[OfBeat, ...]:
        of_seat = self.counted if self.seat else b""
        batch = BatchBeat(
            max(self.version, -1), self.seat, 0, of_seat, b"", self.version >= 0, UNIT_S, self.table_no, 0, 0
        )  # fmt: skip
        return (batch, *super().sections())

    def _on_tick(self, tick: TickHead, now: float) -> None:
        super()._on_tick(tick, now)
        crowd = self.crowd
        found = [each for each in tick.sections if OF_BATCH in bytes(each)[:10]]
        if not found or not isinstance(crowd, StagedCrowd):
            return
        due = _tick.decode(found[0])
        crowd.longest_tick = max(crowd.longest_tick, len(bytes(found[0])))
        if due.table is not None:
            crowd.tables += 1
            self.table_no = due.table_no
        if due.seat and due.seat != self.seat:
            crowd.seated.add(due.seat)
            mine = {due.seat % APART, due.seat % APART + APART}
            if self.fragment == 0:
                mine = {micro for first, stop in due.granted for micro in range(first, stop)}
            self.counted = mask_to_bytes(mask_of(micro for micro in mine if micro < due.count))
        self.seat = due.seat


class StagedCrowd(Crowd):
    def __init__(self, url: JoinUrl, count: int, owners: int, stages: int) -> None:
        self.longest_tick = self.tables = 0
        self.seated: set[int] = set()
        super().__init__(url, count, owners, StagedSham)
        self.model = model_of(stages)

    def more(self) -> dict[str, Any]:
        seats = [each.fragment for each in self.members if isinstance(each, StagedSham) and each.seat]
        by_stage = [seats.count(stage) for stage in range(len(self.model.stages))]
        told = {"seats": by_stage, "seated": len(self.seated), "batch_bytes_most": self.longest_tick}
        return {**told, "tables": self.tables}


def main() -> None:
    url, (count, owners, stages) = JoinUrl.parse(sys.argv[1]), map(int, sys.argv[2:5])
    assert 2 * APART == MICROS_PER_BATCH
    crowd = StagedCrowd(url, count, owners, stages)
    print(json.dumps({"ready": True}), flush=True)
    crowd.run()
    crowd.context.destroy(linger=0)


if __name__ == "__main__":
    main()
