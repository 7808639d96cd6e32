"""From a checkpoint to model.safetensors: the model's own names, shapes and dtypes.

Called by `farflung checkpoint export`.  Where each tensor lies in the flat vector follows from the model's
description alone, so no model code is needed.  Must not know how checkpoints are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.outer_numbers import VALUE_BYTES


@dataclass(frozen=True)
class Exported:
    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # a tied name, and the tensor that holds its values
    frozen: tuple[str, ...]  # not trained, so not part of any checkpoint


def tensors_of(model: ModelSchema, chunks: Iterable[tuple[int, bytes]]) -> Exported:
    """`chunks`: (number, parameters and moments) of every chunk, in any order."""
    size = model.chunk_elements
    flat = torch.empty(model.chunk_count * size, dtype=torch.float32)
    for chunk, raw in chunks:
        flat[chunk * size : (chunk + 1) * size] = torch.frombuffer(
            bytearray(raw[: VALUE_BYTES * size]), dtype=torch.float32
        )
    at = {"param": 0, "buffer": model.first_plain_chunk * size}
    tensors: dict[str, Tensor] = {}
    for spec in model.tensors:
        if spec.kind not in at:
            continue
        dtype = getattr(torch, spec.dtype, None)
        count = prod(spec.shape)
        if (
            not isinstance(dtype, torch.dtype)
            or min(spec.shape, default=0) < 0
            or at[spec.kind] + count > len(flat)
        ):
            raise UserError(
                f"{spec.name}: {spec.dtype} {list(spec.shape)} can't be exported; update farflung"
            )
        values = flat[at[spec.kind] : at[spec.kind] + count]
        tensors[spec.name] = values.view(spec.shape).to(dtype, copy=True)
        at[spec.kind] += count
    pairs = [spec.name.split(" = ", 1) for spec in model.tensors if spec.kind == "alias"]
    return Exported(
        tensors,
        {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1] in tensors},
        tuple(spec.name for spec in model.tensors if spec.kind == "frozen"),
    )


def as_state_dict(exported: Exported, tied_once: bool) -> dict[str, Tensor]:
    """With every tied name, as `load_state_dict` wants it; or each tied weight once, as some other tools do."""
    if tied_once:
        return exported.tensors
    return exported.tensors | {name: exported.tensors[of].clone() for name, of in exported.aliases.items()}
