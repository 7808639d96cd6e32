"""Values that come tile by tile: the same bits in tiles of any size and on queues that are late in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from farflung.compression.native import SWITCH
from farflung.peer.island.blocks import whole
from farflung.peer.trainer.copy_queues import Lasting, PlainQueue, place_on
from farflung.peer.trainer.fused import HERE_VALUES, Across, Here, TilePlace, tiles
from farflung.peer.trainer.layout import ModelLayout

CHUNK = 16


class LateLane(PlainQueue):
    """Does at some time what it was given; with staging memory that is full of rubbish until then."""

    def __init__(self, chance: random.Random, registered: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._chance, self._registered = chance, registered
        self.waiting: list[Callable[[], None]] = []
        self.followed = 0

    def follow(self) -> None:
        self.followed += 1

    def put(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        if self._chance.random() < 0.3:
            self.wait()

    def wait(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def reaches(self, value: Tensor) -> bool:
        return self._registered and value.is_contiguous()

    def _new_room(self, size: int) -> Tensor:
        return torch.full((1 << 14,), 0x7F, dtype=torch.uint8)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Parameter(torch.randn(3, 5, 7))
        self.bf16 = nn.Parameter(torch.randn(23).to(torch.bfloat16))
        self.fp64 = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def a_round(place: TilePlace, border: int) -> list[Tensor]:
    """Everything that is done with a model's values, in two parts; the values of all that came of it."""
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    object.__setattr__(layout, "place_on", lambda device: place)
    total = layout.total_elements
    anchor, delta = torch.full((total,), torch.nan), torch.full((total,), torch.nan)
    layout.write_anchor(model, anchor)
    carry = torch.randn(total, generator=torch.Generator().manual_seed(3))
    layout.load(model, anchor * 0.75)
    loaded = layout.snapshot(model)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.5)
    before = layout.copied(model, 0, total)
    owed = []
    for start, stop in pairwise((0, border, total)):
        layout.write_delta(model, loaded, carry[start:stop], delta[start:stop], start)
        owed.append(layout.owed(model, loaded, None, start, stop - start))
        layout.load(model, (anchor - delta)[start:stop], start)
        layout.refresh(model, loaded, start, stop - start)
    moved = [each.detach().clone() for each in model.parameters()]
    layout.put_back(model, before, 0, total)
    return [anchor, delta, *owed, *moved, *loaded, *(each.detach().clone() for each in model.parameters())]


def test_a_part_is_copied_and_put_back_and_nothing_else_of_the_model_is() -> None:
    model = Mixed()
    layout = ModelLayout.of(model, CHUNK)
    kept = [each.detach().clone() for each in model.parameters()]
    before = layout.copied(model, 16, 21)
    assert sum(each.numel() for each in before) == 21 and all(each.device.type == "cpu" for each in before)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(1.0)
    now = torch.empty(layout.total_elements)
    layout.write_anchor(model, now)
    layout.put_back(model, before, 16, 21)
    then, first = torch.empty(layout.total_elements), torch.empty(layout.total_elements)
    layout.write_anchor(model, then)
    with torch.no_grad():
        for tensor, old in zip(model.parameters(), kept, strict=True):
            tensor.copy_(old)
    layout.write_anchor(model, first)
    assert torch.equal(then[16:37], first[16:37]) and not torch.equal(now[16:37], first[16:37])
    assert torch.equal(then[:16], now[:16]) and torch.equal(then[37:], now[37:])


@pytest.mark.parametrize("border", [0, 16, 37, 64])
def test_tiles_of_any_size_give_the_same_bits(border: int) -> None:
    whole_tensors = a_round(Here(1 << 20), border)
    for most in (1, 4, 11):
        assert all(map(torch.equal, a_round(Here(most), border), whole_tensors)), most


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("registered", [False, True])
def test_queues_that_are_late_in_any_order_give_the_same_bits(seed: int, registered: bool) -> None:
    chance = random.Random(seed)
    lanes = [LateLane(chance, registered) for _ in range(2)]
    found = a_round(Across(lanes, most=chance.choice((3, 8, 100))), 37)
    assert all(map(torch.equal, found, a_round(Here(), 37)))
    assert all(lane.followed for lane in lanes), "work on the model begins after what the script has queued"
    assert not any(lane.waiting for lane in lanes), "nothing is left to be done"


@given(st.lists(st.integers(0, 6), min_size=0, max_size=4), st.integers(1, 40))
def test_tiles_are_small_and_cover_a_box_in_its_order(shape: list[int], most: int) -> None:
    values = torch.arange(prod(shape)).view(shape)
    found = list(tiles(whole(shape), most))
    assert all(0 < tile.numel <= most for tile in found)
    parts = [values[tile.slices].reshape(-1) for tile in found]
    assert torch.equal(torch.cat([torch.empty(0, dtype=values.dtype), *parts]), values.reshape(-1))


class Largest(TorchDispatchMode):
    """How long the longest new tensor is that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view and not func._schema.is_mutable:
            self.values = max(self.values, made.numel())
        return made


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_freeze_makes_nothing_as_long_as_a_tensor(
    dtype: torch.dtype, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, native)
    model = nn.Linear(1000, 2000, bias=False).to(dtype)
    layout = ModelLayout.of(model, 1 << 16)
    loaded, out = layout.snapshot(model), torch.empty(layout.total_elements)
    carry = torch.zeros_like(out)
    with Largest() as largest:
        layout.write_delta(model, loaded, carry, out)
        layout.load(model, out)
        layout.refresh(model, loaded, 0, out.numel())
    assert largest.values <= HERE_VALUES < model.weight.numel()
    assert largest.values or native == "1"


def test_memory_that_lasts_is_registered_when_it_is_first_used_and_let_go_at_its_end() -> None:
    said: list[tuple[str, int]] = []

    def register(address: int, size: int) -> bool:
        said.append(("register", size))
        return size < 4000

    lasting = Lasting(register, lambda address: said.append(("let go", address)))
    slot, other, refused = torch.zeros(100), torch.zeros(200), torch.zeros(1000)
    names = lasting.add((slot, slot[10:], other, refused))
    assert len(names) == 3 and not said, "a slot that nobody writes is given no pages"
    assert lasting.is_registered(slot[5:50]) and lasting.is_registered(slot)
    assert not lasting.is_registered(torch.zeros(3)), "memory of others may be gone tomorrow"
    assert not lasting.is_registered(refused) and not lasting.is_registered(refused)
    assert said == [("register", 400), ("register", 4000)], "each once"
    lasting.end(names)
    assert said[2:] == [("let go", slot.data_ptr())]
    assert not lasting.is_registered(slot)


def test_a_cpu_and_a_device_without_queues_have_places() -> None:
    assert isinstance(place_on(torch.device("cpu")), Here)
    place = place_on(torch.device("meta"))
    assert isinstance(place, Across) and place is place_on(torch.device("meta"))
