"""What people and scripts hear of each stage: who serves it, how fast it can be, and which one holds the run up.  Pure.

Called by `batches.py` for the status.  What a row says of bytes and memory is what somebody who has not joined yet
must know to see whether a machine and its line would do (`farflung doctor`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from farflung.collectives.pipeline.stage_rates import (
    BorderTraffic,
    SeatPace,
    border_after,
    borders_of,
    narrowest,
    seat_pace,
    stage_rate,
    traffic_of,
)
from farflung.coordinator.batches.batch_book import BatchBook
from farflung.coordinator.batches.batch_members import BatchWorker, SeatWord
from farflung.protocol.manifest_sections import PipelineSection
from farflung.protocol.model_schema import ModelSchema

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
    traffic = traffic_of(borders, stage, pipeline.codec, pipeline.gradient_codec)
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
    traffic = traffic_of(borders, stage, pipeline.codec, pipeline.gradient_codec)
    after = border_after(borders, stage)
    return {
        "up_bytes": traffic.up_bytes,  # for one microbatch, of the seat that computes it
        "down_bytes": traffic.down_bytes,
        "gives": {"values": after.values, "raw_bytes": after.raw_bytes},  # over the border after it
    }
