"""Which values of a tensor a rank of an island has, and which of them are its to write.  Pure.

Called by the layout of a model.  Must not know tensors, meshes or placements: a rank says which box of every tensor it
has, and from the boxes of all of them follows who writes what.

A tensor of the model is an array of so many dimensions.  What one rank has of it is a box: the whole (DDP), some rows
(FSDP), some columns (tensor parallel), nothing (a shard of fewer rows than ranks).  Fragments cut the flat vector at
any place, so a part of a tensor is a range of its row-major order, and such a range is a few boxes.

Ranks with the same box are replicas, and each of them writes its share, so that all of them copy at the same time; but
none that has no memory in common with the agent, if another can.
Every value is written by exactly one rank; a tensor of which that can't be said is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from farflung.protocol.errors import UserError


@dataclass(frozen=True, slots=True)
class Box:
    """Of an array: along each dimension so many places from this one on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """What lies in both; None where that is nothing."""
        start = tuple(map(max, self.start, other.start))
        mine, theirs = self.stop, other.stop
        shape = tuple(min(mine[d], theirs[d]) - start[d] for d in range(len(start)))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def seen_from(self, outer: Box) -> Box:
        """The same values, where the array is what lies in `outer` alone."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + size for first, size in zip(self.start, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array that lies in order."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[Box]:
    """Values [first, stop) of an array's row-major order, in order: two boxes a dimension at most."""
    if first >= stop:
        return
    if first == 0 and stop == prod(shape):
        yield whole(shape)
        return
    row = prod(shape[1:])
    begins, ends = -(-first // row), stop // row  # of the rows that are in it as a whole
    if begins > ends:  # it begins and ends within one row
        yield from _in_row(shape, ends, first - ends * row, stop - ends * row)
        return
    yield from _in_row(shape, begins - 1, first - (begins - 1) * row, row if first < begins * row else 0)
    if begins < ends:
        yield Box((begins, *(0,) * (len(shape) - 1)), (ends - begins, *shape[1:]))
    yield from _in_row(shape, ends, 0, stop - ends * row)


def _in_row(shape: tuple[int, ...], row: int, first: int, stop: int) -> Iterator[Box]:
    for box in boxes(shape[1:], first, stop):
        yield Box((row, *box.start), (1, *box.shape))


def within(shape: tuple[int, ...], first: int, stop: int, outer: Box) -> list[Box]:
    """Of [first, stop) of the row-major order what lies in the box."""
    found = (box.common(outer) for box in boxes(shape, first, stop))
    return [box for box in found if box is not None]


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """What one rank has of a tensor; of it, what lies in [first, stop) of the row-major order is its to write."""

    box: Box
    first: int
    stop: int
    rank: int
    twin: int  # the lowest rank that has the same: where they are to be equal, this one says how


def shares(
    name: str, shape: tuple[int, ...], of_ranks: Sequence[Box], rank: int, near: Collection[int] = ()
) -> HeldBlock:
    """`of_ranks`: what each of them has of the tensor.  UserError if some value is nobody's, or is in unlike boxes.

    `near`: the ranks that share memory with the agent; of replicas only these write, where there are such.
    """
    different = {box for box in of_ranks if box.numel}
    if any(box.common(whole(shape)) != box for box in different):
        raise UserError(
            f"{name!r}: a rank has values of it that are beyond its end; is this a bug of farflung's?"
        )
    if any(one.common(other) for one, other in combinations(different, 2)):
        raise UserError(
            f"{name!r} is sharded so that ranks have different parts of it with values in common: every value must be "
            "in one shard, or in whole copies of it"
        )
    if sum(box.numel for box in different) != prod(shape):
        raise UserError(
            f"{name!r} is sharded over more ranks than have joined: call farflung.join on every rank that has a part "
            "of the model"
        )
    mine = of_ranks[rank]
    twins = [other for other, box in enumerate(of_ranks) if box == mine]
    first, stop = _hull(shape, mine)
    writers = [twin for twin in twins if twin in near] or twins
    share = (first, first)
    if rank in writers:
        count, place = stop - first, writers.index(rank)
        share = (first + count * place // len(writers), first + count * (place + 1) // len(writers))
    return HeldBlock(mine, *share, rank=rank, twin=twins[0])


def _hull(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """From its first value in the row-major order to behind its last."""
    if not box.numel:
        return 0, 0
    strides = row_major(shape)
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    last = sum((at - 1) * stride for at, stride in zip(box.stop, strides, strict=True))
    return first, last + 1
