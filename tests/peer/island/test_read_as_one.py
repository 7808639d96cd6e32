"""Ranks that go ahead while the agent applies the next version: all of them from one and the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from farflung.peer.island.island import Island
from farflung.peer.island.sharded import read_as_one
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.pending_delta import PendingDelta
from farflung.protocol.model_schema import Fragment
from rig.memory_group import Meeting, MemoryGroup

CHUNK = 8


class Rank:
    """One of two that hold copies of a model, in one memory with its agent."""

    def __init__(self, number: int, meeting: Meeting, shared: SharedState) -> None:
        self.ranks, self.shared = Island(MemoryGroup(number, meeting)), shared
        self.model = nn.Linear(4, 6, bias=False)
        self.times = 0

    def go(self, meanwhile: Callable[[int], None]) -> None:
        """`meanwhile`: what the agent does before this rank's reading, by how often it has read before."""
        layout = ModelLayout.of(self.model, CHUNK, self.ranks)
        loaded = layout.snapshot(self.model)
        part = PendingDelta(layout, Fragment(0, 0, layout.chunk_count))

        def read() -> None:
            meanwhile(self.times)
            self.times += 1
            part.train_on(self.model, loaded, self.shared, 0.7 * 0.9**2, 0)

        read_as_one(self.ranks, self.shared.read_changes, self.ranks.clock, read)


def both(tmp_path: Path, *meanwhile: Callable[[SharedState, int], None]) -> tuple[list[Rank], SharedState]:
    shared, meeting = SharedState.create(tmp_path, 3 * CHUNK), Meeting(2)
    shared.anchor.fill_(1.0)
    ranks = [Rank(number, meeting, shared) for number in range(2)]
    threads = [
        threading.Thread(target=rank.go, args=(lambda times, act=act: act(shared, times),))
        for rank, act in zip(ranks, meanwhile, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return ranks, shared


def nothing(shared: SharedState, times: int) -> None:
    pass


def a_version_comes(shared: SharedState, times: int) -> None:
    if times == 0:
        shared.mark_torn(True)
        shared.anchor.fill_(2.0)
        shared.mark_torn(False)


def half_of_one_comes(shared: SharedState, times: int) -> None:
    """And the rest before it is read again."""
    if times == 0:
        shared.mark_torn(True)
        shared.anchor[:CHUNK].fill_(2.0)
    elif times == 1:
        shared.anchor.fill_(2.0)
        shared.mark_torn(False)


@pytest.mark.parametrize("comes", [a_version_comes, half_of_one_comes])
def test_copies_on_two_ranks_go_ahead_from_one_version_of_the_anchor(
    tmp_path: Path, comes: Callable[[SharedState, int], None]
) -> None:
    (first, second), shared = both(tmp_path, nothing, comes)
    values: list[Tensor] = [rank.model.weight.detach() for rank in (first, second)]
    assert torch.equal(*values), "gradients are summed over them: they would be unlike from here on"
    assert torch.equal(values[0], shared.anchor.view(6, 4)), (
        "the newest, as nothing is owed and nothing rolls on"
    )
    assert first.times == second.times >= 2


def test_where_nothing_comes_they_read_once(tmp_path: Path) -> None:
    (first, second), _ = both(tmp_path, nothing, nothing)
    assert first.times == second.times == 1 and torch.equal(first.model.weight, second.model.weight)
