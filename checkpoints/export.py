"""From a checkpoint to model.safetensors, or a folder of torch's DCP: the model's own names, shapes and dtypes.

Called by `farflung checkpoint export`.  Where each tensor lies in the flat vector follows from the model's
description alone, so no model code is needed.  Must not know how checkpoints are stored.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

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
    for spec, at in model.places():
        tensors[spec.name] = _values_of(spec, flat, at)
    return Exported(
        tensors,
        {name: of for name, of in model.aliases.items() if of in tensors},
        tuple(spec.name for spec in model.tensors if spec.kind == "frozen"),
    )


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


# ---- for torch.distributed.checkpoint


def dcp_folder_is_free(folder: Path, force: bool) -> None:
    """UserError where something lies there that is no such folder, or may not be overwritten."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / ".metadata").is_file():
        raise UserError(
            f"{folder} exists and is no folder of torch.distributed.checkpoint: choose another name"
        )
    if not force:
        raise UserError(f"{folder} exists; choose another folder, or add --force to overwrite it")


def write_dcp(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    """A folder that `torch.distributed.checkpoint.load` reads, on any number of ranks: whole or not there.

    `name` stands in it where torch writes a random number: equal weights of a version are equal bytes.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            return StorageMeta(save_id=name)

    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():  # that this is one process is meant
            warnings.simplefilter("ignore", UserWarning)
            save(dict[str, Any](tensors), storage_writer=Writer(aside), no_dist=True)
        if folder.exists():
            shutil.rmtree(folder)
        aside.replace(folder)
    except (OSError, CheckpointException) as error:
        cause = (
            next((each for each, _ in error.failures.values()), error)
            if isinstance(error, CheckpointException)
            else error
        )
        why = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise UserError(f"{folder}: cannot write: {why}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
