"""One compiled pass over a model's values: torch's bits, wherever they begin, in any number of threads; or torch."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farflung.compression.native import SWITCH
from farflung.peer.local.memory import SharedState
from farflung.peer.trainer import fused
from farflung.peer.trainer.effects import LoadAnchor
from farflung.peer.trainer.fused import Lookahead, OnValues, Owed, Taken, do_all, prepared
from farflung.peer.trainer.layout import ModelLayout
from farflung.peer.trainer.pending_delta import PendingDelta
from farflung.protocol.model_schema import Fragment

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler here"
)
VECTORS = 4096  # torch rounds the few values after its last whole vector in another way
DTYPES = (torch.float32, torch.bfloat16)


class Tile:
    """What all recipes are given, cut from longer memory at any place."""

    def __init__(self, seed: int, dtype: torch.dtype, count: int, first: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)

        def some(wanted: torch.dtype) -> Tensor:
            values = torch.randn(count + first, generator=chance)
            values[::11] *= 2.0 ** torch.randint(-140, 90, values[::11].shape, generator=chance)
            return values.to(wanted)

        now, loaded = some(dtype), some(dtype)
        now[3::5] = loaded[3::5]
        now[1::50] = loaded[1::50] = -torch.inf
        self.now, self.loaded = now[first:], loaded[first:]
        self.anchor, self.momentum, self.slot, self.carry = (some(torch.float32)[first:] for _ in range(4))

    def owed(self, carries: bool) -> list[Tensor]:
        reads = [self.loaded, self.carry] if carries else [self.loaded]
        return self._made(OnValues(self.now, Owed()), reads, [self.slot])

    def ahead(self, is_parameter: bool) -> list[Tensor]:
        recipe = Lookahead(0.7 * 0.9**2, is_parameter)
        return self._made(OnValues(self.now, recipe), [self.anchor, self.momentum, self.slot], [self.loaded])

    def taken(self, recipe: Taken) -> list[Tensor]:
        reads = [self.anchor]
        if recipe.kept == "learned":
            reads += [self.loaded, *([self.carry] * recipe.has_old), *([self.slot] * recipe.in_slot)]
        elif recipe.kept == "restored":
            reads.append(self.slot)
        kept = [self.carry] if recipe.kept or recipe.mix else []
        return self._made(OnValues(self.now, recipe), reads, [self.loaded, *kept])

    def _made(self, make: OnValues, reads: list[Tensor], writes: list[Tensor]) -> list[Tensor]:
        call = prepared(make, reads, writes)
        if call is not None:
            call()
        else:
            for into, value in zip(writes, make(*reads), strict=True):
                into.copy_(value)
        return [self.now, *writes]


RECIPES = [
    *(Taken("", mix=mix) for mix in (0.0, 0.3, 0.5, 0.9)),
    *(
        Taken("learned", old, slot, mix)
        for old in (False, True)
        for slot in (False, True)
        for mix in (0.0, 0.5)
    ),
    Taken("restored"),
]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit; what is no number is one such as the other."""
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(1.0), b.nan_to_num(1.0))
        for a, b in zip(one, other, strict=True)
    )


def each_way(seed: int, dtype: torch.dtype, count: int, first: int = 0) -> list[list[Tensor]]:
    found = [Tile(seed, dtype, count, first).owed(carries) for carries in (False, True)]
    found += [Tile(seed, dtype, count, first).ahead(moves) for moves in (False, True)]
    return found + [Tile(seed, dtype, count, first).taken(recipe) for recipe in RECIPES]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_the_compiled_pass_gives_the_bits_of_torch(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    assert fused.usable() is not None
    compiled = each_way(seed, dtype, VECTORS)
    monkeypatch.setenv(SWITCH, "0")
    assert fused.usable() is None
    assert all(map(same, compiled, each_way(seed, dtype, VECTORS)))


@needs_compiler
@given(st.integers(1, 1200), st.integers(0, 9), st.sampled_from(DTYPES))
def test_the_bits_do_not_hang_on_where_a_tile_begins_and_ends(
    count: int, first: int, dtype: torch.dtype
) -> None:
    whole, part = Tile(1, dtype, count + first), Tile(1, dtype, count, first)
    recipe = Taken("learned", has_old=True, in_slot=True, mix=0.5)
    for do in (lambda tile: tile.owed(True), lambda tile: tile.ahead(True), lambda tile: tile.taken(recipe)):
        assert same([each[first:] for each in do(whole)], do(part))


@needs_compiler
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_a_trainer_has_the_same_values_with_and_without_it(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(native: str) -> list[Tensor]:
        monkeypatch.setenv(SWITCH, native)
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 64)).to(dtype)
        layout = ModelLayout.of(model, 64)
        (tmp_path / native).mkdir()
        shared = SharedState.create(tmp_path / native, layout.total_elements)
        layout.write_anchor(model, shared.anchor)
        loaded = layout.snapshot(model)
        part = PendingDelta(layout, Fragment(0, 0, layout.chunk_count))
        shared.moments[0].normal_()
        for number, mix in enumerate((0.5, 0.0, 0.5)):
            slot = number % 2
            with torch.no_grad():
                for value in model.parameters():
                    value.mul_(0.75)
                part.write_owed(model, loaded, shared.slots[slot])
                part.train_on(model, loaded, shared, 0.567, slot)
                for value in model.parameters():
                    value.mul_(0.75)
            shared.anchor.sub_(shared.slots[slot], alpha=0.5)
            word = LoadAnchor(0, 1, keep="rest" if number else "all", slot=slot, steps=1, mix=mix)
            part.load(word, model, loaded, shared)
        assert part.carry is not None
        return [part.carry, *shared.slots, *loaded, *(each.detach() for each in model.parameters())]

    assert same(rounds("1"), rounds("0"))


@needs_compiler
def test_wrong_arithmetic_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = "anchor[at + i] - rest[i]", "anchor[at + i] + rest[i]"
    text = fused.SOURCE.read_text(encoding="utf-8")
    assert right in text
    source = tmp_path / "values.c"
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(fused, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(SWITCH, "1")
    fused._checked.cache_clear()
    try:
        assert fused.usable() is None
    finally:
        fused._checked.cache_clear()


def test_a_graph_is_told_of_values_that_changed_under_it() -> None:
    weight = nn.Parameter(torch.ones(8))
    square = (weight * weight).sum()
    call = prepared(OnValues(weight.detach(), Taken("")), [torch.zeros(8)], [torch.empty(8)])
    if call is None:
        pytest.skip("no C compiler here")
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


class Odd(Tensor):
    """Of a class of its own: quantised, say, with its values elsewhere."""


def test_only_plain_tensors_are_worked_on_by_their_addresses() -> None:
    for values in (torch.ones(8).as_subclass(Odd), torch.ones(16)[::2], torch.ones(8, dtype=torch.float16)):
        assert prepared(OnValues(values, Taken("")), [torch.zeros(8)], [torch.empty(8)]) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_each_call_is_made_once_and_a_failure_is_heard(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made: list[int] = []
    lock = threading.Lock()

    def make(number: int) -> None:
        with lock:
            made.append(number)
        if number == 40:
            raise ValueError("the fortieth")

    do_all([lambda number=number: make(number) for number in range(30)], 1 << 30)  # type: ignore[misc]
    assert sorted(made) == list(range(30))
    with pytest.raises(ValueError, match="fortieth"):
        do_all([lambda number=number: make(number) for number in range(40, 50)], 1 << 30)  # type: ignore[misc]
