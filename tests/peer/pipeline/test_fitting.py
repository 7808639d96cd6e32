"""Which stages fit a machine, and what is said where none does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farflung.peer import room as room_module
from farflung.peer.footprint import FreeMemory, MemoryNeed
from farflung.peer.pipeline.api import fitting_stages, room_here, size_bytes
from farflung.protocol.errors import UserError
from farflung.protocol.process import host_memory

GB = 1_000_000_000
NEEDS = [MemoryNeed(4 * GB, 2 * GB, 0, 0), MemoryNeed(3 * GB, 3 * GB, 0, 0), MemoryNeed(6 * GB, 1 * GB, 0, 0)]


@pytest.mark.parametrize(
    ("room", "stages"),
    [
        (FreeMemory(8 * GB, 8 * GB), (0, 1, 2)),
        (FreeMemory(4 * GB, 8 * GB), (0, 1)),
        (FreeMemory(8 * GB, 2 * GB), (0, 2)),
        (FreeMemory(None, 7 * GB), (0, 1, 2)),
        (FreeMemory(None, 6 * GB), (0, 1)),
    ],
)
def test_a_stage_fits_where_it_computes_and_where_its_agent_keeps_its_state(
    room: FreeMemory, stages: tuple[int, ...]
) -> None:
    assert fitting_stages(NEEDS, room) == stages


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (FreeMemory(2 * GB, 8 * GB), "the smallest needs 3.0 GB of GPU memory, here are 2.0 GB"),
        (FreeMemory(None, 2 * GB), "the smallest needs 6.0 GB of memory, here are 2.0 GB"),
        (FreeMemory(8 * GB, 500_000_000), "the smallest needs 1.0 GB of host memory, here are 500.0 MB"),
    ],
)
def test_where_none_fits_it_says_what_the_smallest_needs(room: FreeMemory, words: str) -> None:
    with pytest.raises(UserError, match=f"no stage of this run fits: {words}"):
        fitting_stages(NEEDS, room)


def test_a_limit_may_be_set_below_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "available_bytes", lambda: 16 * GB)
    cpu = torch.device("cpu")
    assert room_here(cpu) == FreeMemory(None, 16 * GB)
    assert room_here(cpu, "6 GB") == FreeMemory(None, 6 * GB)
    assert room_here(cpu, "20 GB") == FreeMemory(None, 16 * GB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * GB, 8 * GB))
    assert room_here(torch.device("cuda"), "6 GB") == FreeMemory(6 * GB, 16 * GB)
    assert room_here(torch.device("cuda")) == FreeMemory(7 * GB, 16 * GB)


@pytest.mark.parametrize("text", ["6", "6 TB", "-1 GB", "many"])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match='expected a size such as "500 MB" or "6 GB"'):
        size_bytes(text)


def test_a_container_has_no_more_than_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, limit, used, stat = (tmp_path / name for name in ("meminfo", "max", "current", "stat"))
    info.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", info)
    monkeypatch.setattr(host_memory, "_CGROUPS", ((limit, used, stat),))
    assert host_memory.available_bytes() == 8_192_000
    limit.write_text("max\n")
    used.write_text("1000000\n")
    assert host_memory.available_bytes() == 8_192_000
    limit.write_text("3000000\n")
    assert host_memory.available_bytes() == 2_000_000
    stat.write_text("anon 500000\ninactive_file 300000\nactive_file 100000\nshmem 200000\n")
    assert host_memory.available_bytes() == 2_400_000, "what was read from files can be let go"
    info.unlink()
    assert host_memory.available_bytes() == 0
