"""Which values a rank has and writes: every one exactly once, at its place, however a model is spread over ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.peer.island.blocks import Box, boxes, row_major, shares, whole, within
from farflung.protocol.errors import UserError

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


@given(SHAPES, st.data())
def test_a_range_of_the_row_major_order_is_a_few_boxes_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = prod(shape)
    first = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(first, size))
    found = list(boxes(shape, first, stop))
    values = [numbered(shape)[box.slices].flatten() for box in found]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *values]), torch.arange(first, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_an_array_with_nothing_in_it_has_no_boxes() -> None:
    assert list(boxes((0, 7), 0, 0)) == []
    assert list(boxes((), 0, 1)) == [Box((), ())]
    assert row_major((2, 3, 4)) == (12, 4, 1) and row_major(()) == ()


@st.composite
def spread(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut along one or two dimensions as torch does it: the first shards are larger, the last may be empty."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    cuts = [draw(st.integers(1, 3)) for _ in range(2)]
    copies = draw(st.integers(1, 3))
    made = [whole(shape)]
    for parts in cuts:
        dim = draw(st.integers(0, len(shape) - 1))
        made = [each for box in made for each in cut(box, dim, parts)]
    ranks = [box for box in made for _ in range(copies)]
    return shape, draw(st.permutations(ranks))


def cut(box: Box, dim: int, parts: int) -> list[Box]:
    size = box.shape[dim]
    step = -(-size // parts)
    found = []
    for part in range(parts):
        first, stop = min(size, part * step), min(size, (part + 1) * step)
        start, shape = list(box.start), list(box.shape)
        start[dim] += first
        shape[dim] = stop - first
        found.append(Box(tuple(start), tuple(shape)))
    return found


@given(spread())
def test_every_value_is_written_by_one_rank_that_has_it(made: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, of_ranks = made
    written = torch.zeros(shape, dtype=torch.int64)
    counts: dict[Box, list[int]] = {}
    for rank, box in enumerate(of_ranks):
        held = shares("w", shape, of_ranks, rank)
        assert held.box == box and of_ranks[held.twin] == box and held.twin <= rank
        mine = within(shape, held.first, held.stop, box)
        for each in mine:
            assert each.common(box) == each
            written[each.slices] += 1
        counts.setdefault(box, []).append(sum(each.numel for each in mine))
    assert bool((written == 1).all())
    for box, theirs in counts.items():
        if box.numel == prod(shape):  # in one row-major piece, replicas write equally much
            assert max(theirs) - min(theirs) <= 1


def test_a_part_seen_from_what_a_rank_has() -> None:
    outer = Box((2, 1), (3, 4))
    box = Box((3, 2), (1, 2))
    local = numbered((6, 6))[outer.slices]
    assert torch.equal(local[box.seen_from(outer).slices], numbered((6, 6))[box.slices])
    assert box.common(Box((0, 0), (3, 6))) is None


@pytest.mark.parametrize(
    ("of_ranks", "words"),
    [
        ([Box((0,), (3,))], "sharded over more ranks than have joined"),
        ([Box((0,), (3,)), Box((2,), (2,))], "different parts of it with values in common"),
        ([Box((0,), (4,)), Box((0,), (2,))], "different parts of it with values in common"),
        ([Box((2,), (3,)), Box((0,), (2,))], "beyond its end"),
    ],
)
def test_a_tensor_of_which_it_cannot_be_said_who_writes_what_is_refused(
    of_ranks: list[Box], words: str
) -> None:
    with pytest.raises(UserError, match=f"'w'.*{words}"):
        shares("w", (4,), of_ranks, 0)
