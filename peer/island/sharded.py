"""What a rank has of a model that is spread over ranks: torch's DTensors, as FSDP2 and tensor parallel make them.

Called by the layout of a model.  Must not know the flat vector, words or rounds.

torch.distributed's modules are not imported: where a model has a DTensor, they are there, and loading them costs a
second of every start.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor, nn

from farflung.peer.island.blocks import Box, HeldBlock, row_major, whole, within
from farflung.peer.island.ranks import Ranks
from farflung.peer.local.memory import FAR
from farflung.protocol.errors import UserError

# Dimensions of a mesh along which ranks work on one batch together, as torchtitan and torch's own examples name them.
# Ranks that have other experts ("ep") do so, too, unless the mesh says that this dimension is made of others.
SHARING = frozenset({"tp", "cp", "pp", "ep"})


def is_sharded(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> Tensor:
    """The values that lie here, in place."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def whole_loss(loss: Any) -> Tensor:
    """A DTensor's value; every rank asks for it, since the ranks may have to add it up."""
    full: Tensor = loss.full_tensor() if is_sharded(loss) else loss
    return full


def box_of(tensor: Tensor) -> Box:
    """What lies here of the whole tensor."""
    if not is_sharded(tensor):
        return whole(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: Any = tensor
    shape, start = compute_local_shape_and_global_offset(tensor.shape, found.device_mesh, found.placements)
    if tuple(shape) != tuple(found.to_local().shape):
        raise UserError(
            f"a parameter of {list(tensor.shape)} placed as {found.placements} has {list(found.to_local().shape)} here "
            f"and not {list(shape)}: only even or torch's own uneven sharding is supported"
        )
    return Box(tuple(start), tuple(shape))


def why_unusable(tensor: Tensor) -> str:
    """Of a sharded parameter; empty: it can be exchanged."""
    placements = getattr(tensor, "placements", ())
    if any(each.is_partial() for each in placements):
        return f"holds sums that are not added up yet {tuple(placements)}: a parameter must be sharded or replicated"
    return ""


def reshard(module: nn.Module) -> None:
    """FSDP2 shows whole parameters after a forward without a backward; what is written into the shards is not seen
    until they are given up."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for each in module.modules():
            if isinstance(each, fsdp.FSDPModule):
                each.reshard()


def ranks_on_one_batch(module: nn.Module, rank: int, said: Any = None) -> tuple[int, ...]:
    """As the meshes of the parameters name their dimensions: this rank, and those that see the same samples.

    `said`: the DeviceMesh by which the script says it, in place of those.
    """
    if said is not None:
        if not said.mesh_dim_names:
            raise UserError("data_rank: the dimensions of this mesh have no names: mesh_dim_names=")
        return tuple(sorted({rank} | _along(said, rank)))
    found = {rank}
    for name, tensor in module.named_parameters():
        if not is_sharded(tensor):
            continue
        mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
        if mesh.mesh_dim_names is None and not _is_fsdp(module):
            raise UserError(
                f"parameter {name!r} lies on a mesh whose dimensions have no names, so which ranks work on one batch "
                'can\'t be known: init_device_mesh(..., mesh_dim_names=("tp",)), or farflung.join(..., '
                "data_rank=(number, of))"
            )
        found |= _along(mesh, rank)
    return tuple(sorted(found))


def _along(mesh: Any, rank: int) -> set[int]:
    """Of the mesh that this one was cut out of: a dimension that joins several others is not one of its own there."""
    root_of = getattr(mesh, "_get_root_mesh", None)  # torch has no public way to ask for it
    root = root_of() if root_of is not None else mesh
    names = root.mesh_dim_names or ()
    for name in names:
        if name not in SHARING and {"tp", "cp", "pp"} & set(name.split("_")):
            raise UserError(
                f"a mesh dimension is named {name!r}, so which of its ranks work on one batch can't be known: make the "
                'mesh of single dimensions, init_device_mesh(..., mesh_dim_names=("dp", "cp")), and flatten them, or '
                "say farflung.join(..., data_rank=(number, of))"
            )
    shared = [dim for dim, each in enumerate(names) if each in SHARING]
    place = (root.mesh == rank).nonzero()
    if not shared or not len(place):
        return set()
    key = tuple(slice(None) if dim in shared else int(place[0][dim]) for dim in range(root.ndim))
    return {int(other) for other in root.mesh[key].flatten()}


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FSDPModule) for each in module.modules())


# ---- copies ------------------------------------------------------------------------------------------------
# What ranks compare and put together of a model's values: copies that must be equal, bytes that lie in
# several places.
#
# Called by the layout of a model, and before an agent starts. Must not know the flat vector, words or rounds.

COMPARED = 256  # values of a parameter: its beginning
AT_ONCE_BYTES = 16 << 20  # of a tensor that lies on several ranks
ONE_VERSION_S = 60.0  # for an agent to have applied a version
LOOK_AGAIN_S = 0.01
_CHANGES = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor as it lies here."""

    name: str
    is_buffer: bool
    tensor: Tensor
    twin: int  # the lowest rank that has the same values


def level(copies: Sequence[TensorCopy], ranks: Ranks) -> None:
    """Of a buffer that follows each rank's own samples, that of the lowest rank counts; parameters must be equal."""
    mine = [_sample(each) for each in copies]
    told = [
        msgspec.msgpack.decode(each, type=list[bytes]) for each in ranks.gather(msgspec.msgpack.encode(mine))
    ]
    for at, copy in enumerate(copies):
        theirs = told[copy.twin][at]
        if theirs == mine[at]:
            continue
        if not copy.is_buffer:
            raise UserError(
                f"rank {ranks.rank} and rank {copy.twin} have different values of {copy.name!r}: is the model wrapped, "
                "in DistributedDataParallel or by fully_shard, so that its gradients are summed over the ranks?"
            )
        with torch.no_grad():
            raw = torch.frombuffer(bytearray(theirs), dtype=torch.uint8).view(copy.tensor.dtype)
            copy.tensor.copy_(raw.view(copy.tensor.shape))


def read_as_one(
    ranks: Ranks, changes: Callable[[], int], clock: Callable[[], float], read: Callable[[], None]
) -> None:
    """What all ranks read of the anchor is of one version; `read`: may be done again, which then is all that counts.

    The agent may be applying the next one meanwhile.  One process reads what it finds, some values of each; but of
    copies on several ranks, which go on by equal gradients, all must begin with the same.  `changes`: of the anchor
    (SharedState.read_changes).  `clock`: the same on all ranks.
    """
    end = None
    while True:
        ranks.wait_for_all()
        end = clock() + ONE_VERSION_S if end is None else end
        before = changes()
        read()
        if ranks.count == 1:
            return
        told = ranks.gather(_CHANGES.pack(before, changes()))
        seen = {number for each in told for number in _CHANGES.unpack(each)} - {FAR}
        if (len(seen) == 1 and not any(number % 2 for number in seen)) or clock() >= end:
            return
        time.sleep(LOOK_AGAIN_S)


def _sample(copy: TensorCopy) -> bytes:
    if copy.is_buffer:
        return _raw(local_of(copy.tensor).detach()).numpy().tobytes()
    return beginning(copy.tensor)


def beginning(tensor: Tensor) -> bytes:
    """Equal for copies, and else for hardly any two parameters: of the values that lie here."""
    return blake3(_raw(local_of(tensor).detach().reshape(-1)[:COMPARED]).numpy().data).digest(length=8)


def whole_bytes(tensor: Tensor, held: HeldBlock | None, ranks: Ranks) -> Iterator[memoryview | bytes]:
    """The raw bytes of the whole tensor in row-major order.  `held`: what of it is here; None: all, here alone.

    Ranks tell each other what they would write of it, a piece at a time, and have no more of it than that at once.
    """
    local = local_of(tensor).detach()
    if held is None:
        yield _raw(local).numpy().data
        return
    size, count = prod(tensor.shape), max(1, AT_ONCE_BYTES // local.element_size())
    for first in range(0, size, count):
        yield _piece(tuple(tensor.shape), local, held, (first, min(size, first + count)), ranks)


def _piece(
    shape: tuple[int, ...], local: Tensor, held: HeldBlock, part: tuple[int, int], ranks: Ranks
) -> bytes:
    mine = within(shape, max(part[0], held.first), min(part[1], held.stop), held.box)
    raw = b"".join(_raw(local[box.seen_from(held.box).slices]).numpy().tobytes() for box in mine)
    width = local.element_size()
    found = torch.zeros(width * (part[1] - part[0]), dtype=torch.uint8)
    strides = row_major((*shape, width))
    for each in ranks.gather(msgspec.msgpack.encode((mine, raw))):
        boxes, values = msgspec.msgpack.decode(each, type=tuple[list[Box], bytes])
        at = 0
        for box in boxes:
            place = sum(a * b for a, b in zip(box.start, strides, strict=False)) - part[0] * width
            cells = found.as_strided((*box.shape, width), strides, place)
            told = bytearray(values[at : at + box.numel * width])
            cells.copy_(torch.frombuffer(told, dtype=torch.uint8).view(cells.shape))
            at += len(told)
    return found.numpy().tobytes()


def _raw(tensor: Tensor) -> Tensor:
    """Its bytes, in row-major order."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
