"""From a checkpoint to model.safetensors: the model's own names, shapes and dtypes.

Called by `farflung checkpoint export`.  Where each tensor lies in the flat vector follows from the model's
description alone, so no model code is needed.  Must not know how checkpoints are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.outer_numbers import VALUE_BYTES


@dataclass(frozen=True)
class Exported:
    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # a tied name, and the tensor that holds its values
    frozen: tuple[str, ...]  # not trained, so not part of any checkpoint


def tensors_of(model: ModelSchema, chunks: Iterable[tuple[int, bytes]]) -> Exported:
    """`chunks`: (number, parameters and moments) of every chunk, of all stages if there are any, in any order."""
    size = model.chunk_elements
    flat = torch.empty(model.chunk_count * size, dtype=torch.float32)
    for chunk, raw in chunks:
        flat[chunk * size : (chunk + 1) * size] = torch.frombuffer(
            bytearray(raw[: VALUE_BYTES * size]), dtype=torch.float32
        )
    tensors: dict[str, Tensor] = {}
    for specs, at in _placed(model):
        for spec in specs:
            if spec.kind not in at:
                continue
            tensors[spec.name] = _values_of(spec, flat, at[spec.kind])
            at[spec.kind] += prod(spec.shape)
    pairs = [spec.name.split(" = ", 1) for spec in model.tensors if spec.kind == "alias"]
    return Exported(
        tensors,
        {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1] in tensors},
        tuple(spec.name for spec in model.tensors if spec.kind == "frozen"),
    )


def _placed(model: ModelSchema) -> Iterator[tuple[Sequence[TensorSpec], dict[str, int]]]:
    """Tensors that lie one after the other, and where the first of each kind begins in the flat vector."""
    size = model.chunk_elements
    if not model.stages:
        yield model.tensors, {"param": 0, "buffer": model.first_plain_chunk * size}
        return
    ends = [*(stage.first_tensor for stage in model.stages[1:]), len(model.tensors)]
    first_chunk = 0
    for stage, end in zip(model.stages, ends, strict=True):
        stop_chunk = first_chunk + stage.chunk_count
        at = {"param": first_chunk * size, "buffer": (stop_chunk - stage.plain_chunks) * size}
        yield model.tensors[stage.first_tensor : end], at
        first_chunk = stop_chunk


def _values_of(spec: TensorSpec, flat: Tensor, at: int) -> Tensor:
    dtype, count = getattr(torch, spec.dtype, None), prod(spec.shape)
    fits = min(spec.shape, default=0) >= 0 and 0 <= at <= len(flat) - count
    if not isinstance(dtype, torch.dtype) or not fits:
        raise UserError(f"{spec.name}: {spec.dtype} {list(spec.shape)} can't be exported; update farflung")
    return flat[at : at + count].view(spec.shape).to(dtype, copy=True)


def as_state_dict(exported: Exported, tied_once: bool) -> dict[str, Tensor]:
    """With every tied name, as `load_state_dict` wants it; or each tied weight once, as some other tools do."""
    if tied_once:
        return exported.tensors
    return exported.tensors | {name: exported.tensors[of].clone() for name, of in exported.aliases.items()}
