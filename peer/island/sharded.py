"""What a rank has of a model that is spread over ranks: torch's DTensors, as FSDP2 and tensor parallel make them.

Called by the layout of a model.  Must not know the flat vector, words or rounds.

torch.distributed's modules are not imported: where a model has a DTensor, they are there, and loading them costs a
second of every start.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from farflung.peer.island.blocks import Box, whole
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
