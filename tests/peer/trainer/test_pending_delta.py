"""What is unmerged, in values: what a load need not look at, and where that lies which is carried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Keep
from farflung.peer.trainer.effects import LoadAnchor
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.pending_delta import PendingDelta
from farflung.protocol.model_schema import Fragment

USED = 15  # 12 weights and 3 biases


class Work:
    """One fragment of a small model, at an anchor of its own."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3).to(dtype)
        self.layout = ModelLayout.of(self.model, 8)
        self.shared = SharedState.create(folder, self.layout.total_elements)
        self.layout.write_anchor(self.model, self.shared.anchor)
        self.loaded = self.layout.snapshot(self.model)
        self.part = PendingDelta(self.layout, Fragment(0, 0, self.layout.chunk_count))

    def learn(self, by: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= by

    def freeze(self, slot: int) -> Tensor:
        self.part.write_owed(self.model, self.loaded, self.shared.slots[slot])
        return self.shared.slots[slot][:USED]

    def go_ahead(self, slot: int) -> None:
        self.part.train_on(self.model, self.loaded, self.shared, 0.7 * 0.9**2, slot)

    def load(self, keep: Keep, slot: int, steps: int) -> None:
        self.part.load(
            LoadAnchor(0, 1, keep=keep, slot=slot, steps=steps), self.model, self.loaded, self.shared
        )

    @property
    def flat(self) -> Tensor:
        flat = torch.zeros(self.layout.total_elements)
        self.layout.write_anchor(self.model, flat)
        return flat[:USED]

    @property
    def owed(self) -> Tensor:
        return self.part.owed(self.model, self.loaded)[:USED]


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_a_load_after_which_no_step_is_owed_looks_at_the_anchor_alone(work: Work) -> None:
    work.learn(0.25)
    work.freeze(0)
    work.shared.anchor.add_(3.0)
    for seen_by_nobody in (work.shared.slots[0], *work.loaded):
        seen_by_nobody.fill_(torch.nan)
    work.load("rest", slot=0, steps=0)
    assert torch.equal(work.flat, work.shared.anchor[:USED]) and not work.owed.any()
    assert work.part.carry is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_P6_what_is_carried_in_a_slot_is_carried_on(tmp_path: Path, dtype: torch.dtype) -> None:
    work = Work(tmp_path, dtype)
    work.learn(0.25)
    frozen = work.freeze(0).clone()
    work.go_ahead(0)
    assert work.part.carry is None and torch.equal(work.owed, frozen), "without a copy of it"
    work.learn(0.5)
    both = work.owed.clone()
    assert torch.equal(work.freeze(1), both)
    work.go_ahead(1)
    work.learn(0.5)
    after = work.owed - both
    work.load("rest", slot=1, steps=1)
    assert torch.allclose(work.owed, after, atol=1e-6) and work.part.carry is not None


def test_P6_a_slot_that_is_written_again_loses_nothing_that_was_carried_in_it(work: Work) -> None:
    work.learn(0.25)
    work.freeze(0)
    work.go_ahead(0)
    for owed in (0.5, 0.75):
        work.learn(0.25)
        assert torch.allclose(work.freeze(0), torch.full((USED,), owed))
        assert torch.allclose(work.owed, torch.full((USED,), owed)), "none of it counts twice"


@pytest.mark.parametrize(("keep", "owed"), [("all", 0.75), ("restore", 0.25), ("drop", 0.0)])
def test_what_is_kept_of_work_that_is_carried_in_a_slot(work: Work, keep: Keep, owed: float) -> None:
    work.learn(0.25)
    work.freeze(0)
    work.go_ahead(0)
    work.learn(0.5)
    work.shared.anchor.mul_(2.0)
    work.load(keep, slot=0, steps=2)
    assert torch.allclose(work.owed, torch.full((USED,), owed), atol=1e-6)
    assert torch.allclose(work.flat, work.shared.anchor[:USED] - owed, atol=1e-6)


def test_the_room_of_what_was_carried_is_used_again(work: Work) -> None:
    places = set()
    for slot in (0, 1, 0):
        work.learn(0.25)
        work.freeze(slot)
        work.go_ahead(slot)
        work.learn(0.25)
        work.load("rest", slot=slot, steps=1)
        assert work.part.carry is not None
        places.add(work.part.carry.data_ptr())
    assert len(places) == 1
