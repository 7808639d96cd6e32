"""Work on a model's values, one tile after the other: what lies in host memory goes in, what is made comes back.

Called by the layout of a model for whatever it reads and writes: anchors, pseudo-gradients, copies.  Must not know what
they are.

A model may be larger than what is left of memory, so nothing as long as a tensor is made on the way: a tile is what
the caches of a processor hold, or what a bus carries in a millisecond.  Where a tensor lies decides by which
`TilePlace` its tiles are worked on:

    Here     in host memory: on the values themselves, in torch or by what is compiled (fused.py)
    Across   on a device: read through pinned staging memory and written back through it, two tiles at a time on two
             queues (`CopyQueue`), so that one comes while the other goes; registered memory needs no staging

A `CopyQueue` is what a device's queue can do; copy_queues.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farflung.peer.island.blocks import Box
from farflung.peer.trainer.fused import FUSED_VALUES, Call, do_all, fits_compiled, prepared

HERE_VALUES = 1 << 18  # 1 MiB of fp32
ACROSS_VALUES = 1 << 22  # 16 MiB: a millisecond of a bus, beside which starting a copy costs nothing

Make = Callable[..., Sequence[Tensor]]


class TilePlace(Protocol):
    def most(self, values: Tensor) -> int:
        """Of these, in a tile."""

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        """`make` is handed the reads where the model's tensors lie, and returns what is to be written.

        Reads and writes lie in host memory.  What it does may be done later, but in order with what comes next for the
        same values, and before `finish` returns.
        """

    def finish(self) -> None:
        """Until all is read and written."""


class Here:
    """What is compiled waits for `finish`, where several threads do it: tiles have no values in common."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._calls: list[Call] = []
        self._values = 0

    def most(self, values: Tensor) -> int:
        return self._most or (FUSED_VALUES if fits_compiled(values) else HERE_VALUES)

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        call = prepared(make, reads, writes)
        if call is not None:
            self._calls.append(call)
            self._values += writes[0].numel()
            return
        for into, value in zip(writes, make(*reads), strict=True):
            into.copy_(value)

    def finish(self) -> None:
        calls, self._calls = self._calls, []
        do_all(calls, self._values)
        self._values = 0


class CopyQueue(Protocol):
    """A queue of a device, beside the one on which the model is computed."""

    def follow(self) -> None:
        """What comes next begins after all that the script has queued by now."""

    def put(self, work: Callable[[], None]) -> None:
        """Copies and arithmetic that may be done any time from now on, one after the other."""

    def wait(self) -> None:
        """Until all of it is done."""

    def there(self, value: Tensor) -> Tensor:
        """Within `put`: a copy on the device, of contiguous memory that the device reaches."""

    def reaches(self, value: Tensor) -> bool:
        """Whether the device reads and writes this host memory by itself: contiguous, and registered."""

    def room(self, like: Tensor, number: int) -> Tensor:
        """Staging memory that the device reaches, as long as this: each number of a lane has its own."""


@dataclass(frozen=True, slots=True)
class _StagedTile:
    """What stands in staging memory once the lane has done its work."""

    staged: Tensor
    into: Tensor


class Across:
    def __init__(self, lanes: Sequence[CopyQueue], most: int = ACROSS_VALUES) -> None:
        self._most = most
        self._lanes = lanes
        self._coming: list[list[_StagedTile]] = [[] for _ in lanes]
        self._busy = [False] * len(lanes)
        self._next = 0

    def most(self, values: Tensor) -> int:
        return self._most

    def work(self, reads: Sequence[Tensor], make: Make, writes: Sequence[Tensor]) -> None:
        at = self._next
        self._next = (at + 1) % len(self._lanes)
        lane = self._lanes[at]
        self._settle(at)  # its staging memory is free then
        if not any(self._busy):
            for each in self._lanes:
                each.follow()
        self._busy[at] = True
        given = [self._staged(lane, value, number) for number, value in enumerate(reads)]
        wanted = [
            into if lane.reaches(into) else lane.room(into, len(reads) + number)
            for number, into in enumerate(writes)
        ]

        def tile() -> None:
            made = make(*(lane.there(value) for value in given))
            for into, value in zip(wanted, made, strict=True):
                into.copy_(value.to(into.dtype), non_blocking=True)

        lane.put(tile)
        pairs = zip(wanted, writes, strict=True)
        self._coming[at] = [_StagedTile(staged, into) for staged, into in pairs if staged is not into]

    def _staged(self, lane: CopyQueue, value: Tensor, number: int) -> Tensor:
        return value if lane.reaches(value) else lane.room(value, number).copy_(value)

    def _settle(self, at: int) -> None:
        if self._busy[at]:
            self._lanes[at].wait()
            self._busy[at] = False
            for each in self._coming[at]:
                each.into.copy_(each.staged)
            self._coming[at] = []

    def finish(self) -> None:
        for at in range(len(self._lanes)):
            self._settle(at)


def tiles(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most so many values that together are this one, in row-major order."""
    if box.numel <= most:
        if box.numel:
            yield box
        return
    row = box.numel // box.shape[0]
    count = max(1, most // row)
    for first in range(0, box.shape[0], count):
        rows = min(count, box.shape[0] - first)
        part = Box((box.start[0] + first, *box.start[1:]), (rows, *box.shape[1:]))
        if rows == 1 and row > most:
            for inner in tiles(Box(part.start[1:], part.shape[1:]), most):
                yield Box((part.start[0], *inner.start), (1, *inner.shape))
        else:
            yield part
