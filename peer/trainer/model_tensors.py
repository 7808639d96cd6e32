"""What an `nn.Module` holds: tensors to exchange, frozen ones, tied ones, and what cannot be handled.

Owns: looking through wrappers, naming, finding tied weights, refusing what does not fit in a flat vector.
Called by: `peer/trainer/layout.py`, which gives each tensor its place.
Must not know: offsets, chunks, the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from farflung.peer.island.sharded import local_of, why_unusable
from farflung.protocol.errors import UserError

EXCHANGED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Name segments that wrappers inside a model add (torch.compile of one block, activation checkpointing); a
# peer that wraps its blocks and one that does not still train the same model.
_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})

Kind = Literal["param", "frozen", "buffer"]


@dataclass(slots=True)
class Survey:
    """The tensors of one model by name, each in exactly one dict, plus the other names of tied ones."""

    params: dict[str, Tensor] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DDP and DataParallel, in whatever order they are nested."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer of an unwrapped module, under every name it has."""
    named: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named[clean_name(name)] = parameter
    named.update(_persistent_buffers(module))
    return named


def survey(module: nn.Module, planned: bool = False) -> Survey:
    """Sort the tensors of an unwrapped module; UserError where one cannot be exchanged.

    `planned`: it may lie on the meta device, where it says what it will be and has no memory yet.
    """
    found = Survey()
    shelves = {"param": found.params, "frozen": found.frozen, "buffer": found.buffers}
    first_name: dict[object, str] = {}
    for kind, name, tensor in _in_order(module):
        _refuse_unusable(kind, name, tensor, planned)
        first = first_name.setdefault(_identity(tensor), name)
        if first == name:
            shelves[kind][name] = tensor
        else:
            found.aliases[name] = first
    exchanged = {name: local_of(tensor) for name, tensor in {**found.params, **found.buffers}.items()}
    for name, tensor in exchanged.items():
        if _overlaps_itself(tensor):
            raise UserError(f"{name!r} is a view whose elements share memory: call .contiguous() on it")
    frozen = {name: local_of(tensor) for name, tensor in found.frozen.items()}
    _refuse_overlaps({**exchanged, **frozen}, exchanged.keys())
    return found


def _in_order(module: nn.Module) -> Iterator[tuple[Kind, str, Tensor]]:
    # Trainable first: a frozen second name of a trained tensor changes with it, so it is an alias.
    parameters = [(clean_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
    yield from (("param", name, p) for name, p in parameters if p.requires_grad)
    yield from (("frozen", name, p) for name, p in parameters if not p.requires_grad)
    yield from (("buffer", name, b) for name, b in _persistent_buffers(module) if _is_of_numbers(b))


def _is_of_numbers(buffer: Tensor) -> bool:
    """Others count or mark something, and stay local."""
    return buffer.is_floating_point() or buffer.is_complex()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(remove_duplicate=False):
        holder, _, leaf = name.rpartition(".")
        # Torch has no public way to ask for this; state_dict() would, but hooks may rename or copy there.
        if leaf not in module.get_submodule(holder)._non_persistent_buffers_set:
            yield clean_name(name), buffer


def clean_name(name: str) -> str:
    """Without what wrappers inside a model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def _refuse_unusable(kind: Kind, name: str, tensor: Tensor, planned: bool) -> None:
    word = "buffer" if kind == "buffer" else "parameter"
    if "_fsdp_wrapped_module" in name.split("."):
        raise UserError(f"{word} {name!r} is sharded by FSDP1: use torch's fully_shard (FSDP2) in its place")
    if why := why_unusable(tensor):
        raise UserError(f"{word} {name!r} {why}")
    if tensor.is_nested:
        raise UserError(f"{word} {name!r} is a nested tensor: only dense tensors can be exchanged")
    if is_lazy(tensor):
        raise UserError(f"{word} {name!r} has no shape yet: run one batch through the model before joining")
    if tensor.is_meta and not planned:
        raise UserError(f"{word} {name!r} is on the meta device: give it memory (to_empty) before joining")
    if tensor.layout is not torch.strided:
        raise UserError(f"{word} {name!r} is sparse ({tensor.layout}): only dense tensors can be exchanged")
    if kind != "frozen" and tensor.dtype not in EXCHANGED_DTYPES:
        allowed = ", ".join(dtype_name(dtype) for dtype in EXCHANGED_DTYPES)
        way_out = "register it with persistent=False" if kind == "buffer" else "freeze it"
        raise UserError(
            f"{word} {name!r} has dtype {dtype_name(tensor.dtype)}: only {allowed} can be exchanged; "
            f"convert it or {way_out}"
        )


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are the same elements of the same memory, whether or not they are one object."""
    local = local_of(tensor)
    if local.numel() == 0:
        return id(tensor)
    return (*_storage(local), local.storage_offset(), local.shape, local.stride(), local.dtype)


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    storage = tensor.untyped_storage()
    # On meta all begin at address 0; torch has no other name for the object that two views share.
    return tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr()


def _span_bytes(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last, that the tensor touches in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return int(start) * tensor.element_size(), int(start + reach + 1) * tensor.element_size()


def _refuse_overlaps(tensors: dict[str, Tensor], exchanged: Iterable[str]) -> None:
    """Two tensors that share part of their memory would each undo what was loaded into the other."""
    matters = set(exchanged)
    by_storage: dict[object, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(_storage(tensor), []).append((*_span_bytes(tensor), name))
    for spans in by_storage.values():
        reaching: list[tuple[int, str]] = []  # tensors that may still touch the next one
        for start, stop, name in sorted(spans):
            reaching = [(end, other) for end, other in reaching if end > start]
            for _, other in reaching:
                if {name, other} & matters and _share_elements(tensors[name], tensors[other]):
                    raise UserError(
                        f"{other!r} and {name!r} share part of their memory: tie weights by using one "
                        "Parameter under both names, or give each its own memory (.clone())"
                    )
            reaching.append((stop, name))


def _share_elements(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return True  # their spans touch, and nobody needs two dtypes interleaved in one memory
    base = int(min(one.storage_offset(), other.storage_offset()))
    size = max(_span_bytes(one)[1], _span_bytes(other)[1]) // one.element_size() - base
    touched = torch.zeros(size, dtype=torch.bool)
    _same_view(touched, one, base).fill_(True)
    return bool(_same_view(touched, other, base).any())


def _overlaps_itself(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    start, stop = _span_bytes(tensor)
    touched = torch.zeros((stop - start) // tensor.element_size(), dtype=torch.bool)
    _same_view(touched, tensor, int(tensor.storage_offset())).fill_(True)
    return int(touched.sum()) != tensor.numel()


def _same_view(cells: Tensor, like: Tensor, base: int) -> Tensor:
    return cells.as_strided(like.shape, like.stride(), like.storage_offset() - base)
