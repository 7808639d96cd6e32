"""Ranks on several nodes: who is near the agent, who writes for whom, and how much is under way at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.peer.island import group
from farflung.peer.island.blocks import Box, shares
from farflung.peer.local.memory import SharedState


def test_ranks_on_other_nodes_than_the_first_have_a_partner_on_it() -> None:
    places = ["a", "a", "b", "b", "b", "c"]
    assert group.near_of(places) == (0, 1)
    assert group.partners(places) == ((2, 0), (3, 1), (4, 0), (5, 1))
    assert group.partners(["a", "a"]) == ()


def test_this_process_is_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = group.here()
    assert before == group.here()
    monkeypatch.setattr(group.tempfile, "gettempdir", lambda: str(tmp_path))
    assert group.here() != before, "another folder for what does not fit into memory"
    monkeypatch.setattr(group, "_BOOT", tmp_path / "none")
    assert group.here(), "where the kernel has no name, the machine has"


def test_of_replicas_those_near_the_agent_write_and_of_a_shard_whoever_has_it() -> None:
    left, right = Box((0,), (6,)), Box((6,), (6,))
    replicated = [shares("x", (12,), [left, right, left, right], rank, near=(0, 1)) for rank in range(4)]
    assert [(each.first, each.stop) for each in replicated] == [(0, 6), (6, 12), (0, 0), (6, 6)]
    sharded = [shares("x", (12,), [left, left, right, right], rank, near=(0, 1)) for rank in range(4)]
    assert [(each.first, each.stop) for each in sharded] == [(0, 3), (3, 6), (6, 9), (9, 12)]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=6),
    st.integers(1, 40),
)
def test_tiles_are_all_the_values_in_their_order_and_never_more_at_once(
    shapes: list[list[int]], most: int
) -> None:
    before, group.TILE = group.TILE, most
    try:
        views = [torch.randn(shape).transpose(0, -1) for shape in shapes]
        found = list(group.tiles(views))
    finally:
        group.TILE = before
    assert all(0 < sum(each.numel() for each in tile) <= most for tile in found)
    sent = [each.reshape(-1) for tile in found for each in tile]
    expected = [each.reshape(-1) for each in views]
    assert torch.equal(torch.cat([torch.empty(0), *sent]), torch.cat([torch.empty(0), *expected]))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_a_far_rank_has_memory_for_what_it_writes_alone_and_gives_it_back(tmp_path: Path) -> None:
    elements = 8 << 20
    message = SharedState.create(tmp_path, elements).as_message()
    for path in (message.anchor, *message.moments, *message.slots, message.progress):
        Path(path).unlink()  # there is no way to them from its node
    before = resident_mb()
    far = group.FarMemory(message)
    assert [each.numel() for each in (far.anchor, *far.moments, *far.slots)] == [elements] * 5
    far.slots[1][elements // 2 :].fill_(1.0)
    assert 12 < resident_mb() - before < 30
    far.let_go()
    assert resident_mb() - before < 8 and not far.slots[1].any()


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)
