"""What a run's [model] and [data] take of this machine at least, before anything of it is made.

Called by the built-in trainer.  The numbers are a stranger's: [model] may ask for a width of 65,536 in 1,024 layers,
and on a machine that tries to make that other programs are killed.  So what can't fit is refused in one line; of what
may fit, peer/room.py says so in its own.  What is counted is what is kept in any case: footprint.py's arithmetic, and
what one step keeps from its forward to its backward pass.  Pure.
"""

from __future__ import annotations

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


def step_bytes(manifest: Manifest) -> int:
    """Of one step's samples: themselves, and what is kept of them.  Where the model is cut, of the least stage."""
    model, pipeline = manifest.model, manifest.pipeline
    samples = pipeline.micro if pipeline.batch else manifest.data.batch
    tokens = samples * (manifest.row_tokens - 1)
    # The peer that has the head of a model in stages makes all logits at once.
    rows = min(tokens, LOGIT_ROWS) if pipeline.stages == 1 else tokens
    logits = KEPT_LOGITS * model.vocab * rows * VALUE_BYTES
    kept = tokens * (model.layers if pipeline.stages == 1 else 1) * _kept_by_layer(manifest)
    return kept + logits + samples * manifest.row_tokens * ID_BYTES


def _kept_by_layer(manifest: Manifest) -> int:
    """Bytes of a token that a layer keeps for its backward pass, at least: what each norm and product was made of."""
    model = manifest.model
    products = 2 * (model.heads + model.kv_heads) * model.head_dim + 2 * model.width + 4 * model.mlp_width
    norms = 2 * model.width
    return norms * VALUE_BYTES + products * (2 if manifest.inner.precision == "bf16" else VALUE_BYTES)


def refuse_too_large(manifest: Manifest, rules: MemoryRules, room: FreeMemory) -> None:
    """UserError for a run that can't fit.  Which stages of a model that is cut do, peer/pipeline/api.py says."""
    values, step = values_of(manifest.model), step_bytes(manifest)
    need = MemoryNeed(0.0, 0.0, 0.0, 0.0)
    if manifest.pipeline.stages == 1:
        kept = 0.0 if manifest.pipeline.batch else OPTIMIZER_BYTES[manifest.inner.optimizer]
        rows = of_peer(rules, ModelSize(values, optimizer_bytes=kept, on_gpu=room.gpu_bytes is not None))
        need = need_of(rows)
    # Python and torch are here by now, or are small beside what is asked about.
    host = max(0.0, need.host_bytes - AGENT_BYTES - TRAINER_BYTES)
    least = MemoryNeed(need.gpu_bytes + step, host, need.shared_bytes, need.disk_bytes)
    if least.within(room) or not room.host_bytes:  # 0: this system does not say
        return
    shape, free = manifest.model, room.host_bytes + (room.gpu_bytes or 0.0)
    whole = least.gpu_bytes + least.host_bytes
    raise UserError(
        f"run '{manifest.run.name}' does not fit this machine: its model (layers = {shape.layers}, width = "
        f"{shape.width}, context = {shape.context}) has {si(values)} values, and training it takes at least "
        f"{si(whole, 'B')}, of which {si(step, 'B')} are one step's; {si(free, 'B')} are free"
    )
