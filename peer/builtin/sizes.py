"""What a run's [model] and [data] take of this machine at least, before anything of it is made.

Called by the built-in trainer.  The numbers are a stranger's: [model] may ask for a width of 65,536 in 1,024 layers,
and on a machine that tries to make that other programs are killed.  So what can't fit is refused in one line; of what
may fit, peer/room.py says so in its own.  What is counted is what is kept in any case: footprint.py's arithmetic, and
what one step keeps from its forward to its backward pass.  By the same count a batch is computed in pieces where the
whole of it does not fit.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from farflung.peer.footprint import (
    AGENT_BYTES,
    OPTIMIZER_BYTES,
    TRAINER_BYTES,
    FreeMemory,
    MemoryNeed,
    MemoryRules,
    ModelSize,
    need_of,
    of_peer,
)
from farflung.protocol.caps import si
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import values_of
from farflung.protocol.outer_numbers import VALUE_BYTES

KEPT_LOGITS = 2
LOGIT_ROWS = 2048  # of llama.py, which loads torch: so many rows of logits are there at once
ID_BYTES = 8


# So much of what is free a step may take by this count, which is what is kept at least, and no more than is kept.
STEP_SHARE = 0.5
# Fewer tokens at once leave a GPU idle: then it pays to keep less of each, and to compute layers again.
LEAST_TOKENS = 2048


class StepShape(NamedTuple):
    """How a batch is computed."""

    rows: int  # at once
    recompute: bool = False  # layers, in the backward pass


def step_bytes(manifest: Manifest, samples: int, recompute: bool = False) -> int:
    """The batch itself, and what is kept of so many samples of it.  Where the model is cut, of the least stage."""
    model, pipeline = manifest.model, manifest.pipeline
    tokens = samples * (manifest.row_tokens - 1)
    # The peer that has the head of a model in stages makes all logits at once.
    rows = min(tokens, LOGIT_ROWS) if pipeline.stages == 1 else tokens
    logits = KEPT_LOGITS * model.vocab * rows * VALUE_BYTES
    layers, each = (model.layers if pipeline.stages == 1 else 1), _kept_by_layer(manifest)
    kept = tokens * (layers * model.width * VALUE_BYTES + each if recompute else layers * each)
    read = samples if pipeline.batch else manifest.data.batch
    return kept + logits + read * manifest.row_tokens * ID_BYTES


def _kept_by_layer(manifest: Manifest) -> int:
    """Bytes of a token that a layer keeps for its backward pass, at least: what each norm and product was made of."""
    model = manifest.model
    products = 2 * (model.heads + model.kv_heads) * model.head_dim + 2 * model.width + 4 * model.mlp_width
    norms = 2 * model.width
    return norms * VALUE_BYTES + products * (2 if manifest.inner.precision == "bf16" else VALUE_BYTES)


def shape_of_step(manifest: Manifest, free_bytes: float) -> StepShape:
    """The most rows that fit, of the batch or a half, a quarter, ... of it."""
    batch, tokens = manifest.data.batch, manifest.row_tokens - 1
    rows = 1
    for recompute in (False, True):
        rows = batch
        while rows > 1 and step_bytes(manifest, rows, recompute) > STEP_SHARE * free_bytes:
            rows = -(-rows // 2)
        fits = step_bytes(manifest, rows, recompute) <= STEP_SHARE * free_bytes
        if fits and (rows == batch or rows * tokens >= LEAST_TOKENS):
            return StepShape(rows, recompute)
    return StepShape(rows, True)


def shape_here(manifest: Manifest, rules: MemoryRules, room: FreeMemory) -> StepShape:
    """UserError for a run that can't fit.  Which stages of a model that is cut do, peer/pipeline/api.py says."""
    values, pipeline = values_of(manifest.model), manifest.pipeline
    step = step_bytes(manifest, pipeline.micro if pipeline.batch else 1, recompute=not pipeline.batch)
    need = MemoryNeed(0.0, 0.0, 0.0, 0.0)
    if pipeline.stages == 1:
        kept = 0.0 if pipeline.batch else OPTIMIZER_BYTES[manifest.inner.optimizer]
        rows = of_peer(rules, ModelSize(values, optimizer_bytes=kept, on_gpu=room.gpu_bytes is not None))
        need = need_of(rows)
    # Python and torch are here by now, or are small beside what is asked about.
    host = max(0.0, need.host_bytes - AGENT_BYTES - TRAINER_BYTES)
    least = MemoryNeed(need.gpu_bytes + step, host, need.shared_bytes, need.disk_bytes)
    if not room.host_bytes:  # this system does not say
        return StepShape(manifest.data.batch)
    if least.within(room):
        taken = least.gpu_bytes - step + (least.host_bytes if room.gpu_bytes is None else 0.0)
        return shape_of_step(manifest, (room.gpu_bytes or room.host_bytes) - taken)
    shape, free = manifest.model, room.host_bytes + (room.gpu_bytes or 0.0)
    whole = least.gpu_bytes + least.host_bytes
    raise UserError(
        f"run '{manifest.run.name}' does not fit this machine: its model (layers = {shape.layers}, width = "
        f"{shape.width}, context = {shape.context}) has {si(values)} values, and training it takes at least "
        f"{si(whole, 'B')}, of which {si(step, 'B')} are one step's; {si(free, 'B')} are free"
    )
