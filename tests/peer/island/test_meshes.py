"""Which ranks work on one batch, as the meshes say it: those of torch, made without a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from farflung.peer.island.sharded import ranks_on_one_batch
from farflung.protocol.errors import UserError

RANK = 5


@pytest.fixture(autouse=True)
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=RANK, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh(*names: str, shape: tuple[int, ...] = (2, 2, 2)) -> Any:
    return init_device_mesh("cpu", shape[-len(names) :] if len(names) == 3 else shape, mesh_dim_names=names)


def model(*meshes: Any) -> nn.Module:
    """With a parameter on each."""
    made = nn.Module()
    for number, each in enumerate(meshes):
        placed = [Shard(0), *[Replicate()] * (each.ndim - 1)]
        values = DTensor.from_local(torch.ones(2, 2), each, placed, run_check=False)
        made.register_parameter(f"p{number}", nn.Parameter(values))
    return made


@pytest.mark.parametrize("name", ["tp", "cp", "pp", "ep"])
def test_ranks_along_a_dimension_that_shares_see_the_same_samples(name: str) -> None:
    found = mesh("dp", name, shape=(2, 4))
    assert ranks_on_one_batch(model(found), RANK) == (4, 5, 6, 7)
    assert ranks_on_one_batch(model(found["dp"]), RANK) == (4, 5, 6, 7), (
        "the mesh that it was cut from says it"
    )
    assert ranks_on_one_batch(nn.Linear(2, 2), RANK, found) == (4, 5, 6, 7), "or the script does"


def test_dimensions_of_data_share_nothing() -> None:
    assert ranks_on_one_batch(model(mesh("dp_replicate", "dp_shard", "fsdp")), RANK) == (RANK,)
    assert ranks_on_one_batch(nn.Linear(2, 2), RANK) == (RANK,)


def test_a_flattened_dimension_is_what_it_was_made_of() -> None:
    """Dense parameters over all ranks of data and context; experts over those of one."""
    found = mesh("dp_mod_ep", "dp_in_ep", "cp")
    dense = found["dp_mod_ep", "dp_in_ep", "cp"]._flatten("dp_cp")
    experts = found["dp_in_ep", "cp"]._flatten("ep")
    assert ranks_on_one_batch(model(dense, experts), RANK) == (4, 5)
    no_context = mesh("dp_mod_ep", "dp_in_ep", "dp_replicate")
    assert ranks_on_one_batch(model(no_context["dp_in_ep"]._flatten("ep")), RANK) == (RANK,)


def test_several_meshes_say_it_together() -> None:
    assert ranks_on_one_batch(model(mesh("dp", "cp", "tp"), mesh("dp", "tp", shape=(4, 2))), RANK) == (
        4,
        5,
        6,
        7,
    )


def test_what_a_name_leaves_open_is_refused() -> None:
    joined = mesh("dp_cp", "tp", shape=(4, 2))
    with pytest.raises(
        UserError, match="a mesh dimension is named 'dp_cp', so which .* make the mesh of single"
    ):
        ranks_on_one_batch(model(joined), RANK)
    nameless = init_device_mesh("cpu", (8,))
    with pytest.raises(UserError, match="parameter 'p0' lies on a mesh whose dimensions have no names"):
        ranks_on_one_batch(model(nameless), RANK)
    with pytest.raises(UserError, match="data_rank: the dimensions of this mesh have no names"):
        ranks_on_one_batch(nn.Linear(2, 2), RANK, nameless)
