"""`checkpoint export --dcp`: what torch.distributed.checkpoint loads has the values of the run, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.checkpoints.export import dcp_folder_is_free, write_dcp
from farflung.protocol.errors import UserError
from rig.waiting import LONG_S


def tensors() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(1)
    return {
        "layers.0.weight": torch.randn(8, 6, generator=made),
        "layers.1.weight": torch.randn(3, generator=made).to(torch.bfloat16),
        "norm.mean": torch.tensor(2.5),
    }


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_written_loads_bit_for_bit_and_has_the_same_bytes_twice(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp  # not while tests are collected: it takes a second

    for name in ("one", "two"):
        write_dcp(tensors(), tmp_path / name, "run version 3")
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp.load(into, checkpoint_id=tmp_path / "one", no_dist=True)
    for name, tensor in tensors().items():
        assert torch.equal(into[name], tensor) and into[name].dtype is tensor.dtype, name
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_a_folder_is_whole_or_not_there_and_only_such_a_folder_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    folder, mine = tmp_path / "out", tmp_path / "mine"
    write_dcp(tensors(), folder, "version 1")
    with pytest.raises(UserError, match="add --force to overwrite it"):
        dcp_folder_is_free(folder, force=False)
    dcp_folder_is_free(folder, force=True)
    mine.mkdir()
    dcp_folder_is_free(mine, force=False)
    (mine / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"is no folder of torch\.distributed\.checkpoint"):
        dcp_folder_is_free(mine, force=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = files(folder)
    with monkeypatch.context() as broken:
        broken.setattr(dcp.FileSystemWriter, "finish", full)
        with pytest.raises(UserError, match=r"out: cannot write: No space left on device"):
            write_dcp(tensors(), folder, "version 2")
    assert files(folder) == before and {path.name for path in tmp_path.iterdir()} == {"out", "mine"}
    write_dcp(tensors() | {"more": torch.ones(1)}, folder, "version 3")
    into = {"more": torch.zeros(1)}
    dcp.load(into, checkpoint_id=folder, no_dist=True)
    assert into["more"] == 1


SHARDED = """
    import os, sys
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}.meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    into = {"layers.0.weight": zeros(8, 6, device_mesh=mesh, placements=[Shard(0)])}
    dcp.load(into, checkpoint_id=folder)
    torch.save(into["layers.0.weight"].to_local(), f"{folder}.{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # what torch still has of threads can abort a process that ends on a busy machine
"""


@pytest.mark.hard
@pytest.mark.slow
def test_two_ranks_load_their_own_shards_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_dcp(tensors(), folder, "version 1")
    ranks = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(SHARDED), str(folder), str(rank)])
        for rank in (0, 1)
    ]
    assert [rank.wait(LONG_S) for rank in ranks] == [0, 0]
    halves = [torch.load(f"{folder}.{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [len(half) for half in halves] == [4, 4]
    assert torch.equal(torch.cat(halves), tensors()["layers.0.weight"])
