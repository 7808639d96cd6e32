"""Islands of several nodes: which ranks share memory with the agent, and what those do that can't.

The agent is on rank 0's node.  A rank there is near; the others are far.  A far rank has room of its own in place of
the shared memory, of which only the pages of its own values are ever real, and only for a moment.  A near rank is its
partner: what the far one has written it puts into the shared memory, and what the far one is to read it sends.  All
ranks carry out the same effects in the same order, so nobody asks for anything: both do it when its turn comes.

Called when ranks agree (peer/trainer/rank_agreement.py), by the group and by the inner loop.  Must not know the flat
vector beyond views of it, words or rounds.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from farflung.peer.local.memory import FAR, SharedState
from farflung.peer.local.words import Shared
from farflung.protocol.outer_numbers import VALUE_BYTES

TILE = 4 << 20  # values that are under way at once: 16 MB
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def here() -> str:
    """Equal for processes that can share memory: of one kernel, and with the same folders for it."""
    kernel = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
    seen = [os.stat(each) for each in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(each)]
    return " ".join([kernel, *(f"{each.st_dev}:{each.st_ino}" for each in seen)])


def near_of(nodes: Sequence[str]) -> tuple[int, ...]:
    """`nodes`: of each rank, where it is."""
    return tuple(rank for rank, node in enumerate(nodes) if node == nodes[0])


def partners(nodes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Of each far rank, by which near one it writes and reads: each near one has about as many of them."""
    near = near_of(nodes)
    far = [rank for rank in range(len(nodes)) if rank not in near]
    return tuple((rank, near[number % len(near)]) for number, rank in enumerate(far))


class FarMemory(SharedState):
    """Of a far rank: as long as the agent's, and empty; it takes memory where something is written, until `let_go`."""

    def __init__(self, message: Shared) -> None:
        self._message = message
        self._maps: list[mmap.mmap] = []
        self.anchor = self._room()
        self.moments = tuple(self._room() for _ in message.moments)
        self.slots = tuple(self._room() for _ in message.slots)

    def read_changes(self) -> int:
        return FAR

    def let_go(self) -> None:
        """What stood there is in the agent's memory, or in the model."""
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)

    def _room(self) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._maps.append(mmap.mmap(-1, VALUE_BYTES * self.elements, flags=flags))
        return torch.frombuffer(self._maps[-1], dtype=torch.float32)


def tiles(views: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """In their order, together as many values as go at once; equal on both sides."""
    tile: list[Tensor] = []
    size = 0
    for view in views:
        for each in _small(view):
            if tile and size + each.numel() > TILE:
                yield tile
                tile, size = [], 0
            tile.append(each)
            size += each.numel()
    if tile:
        yield tile


def _small(view: Tensor) -> Iterator[Tensor]:
    if view.numel() <= TILE:
        yield view
        return
    row = view.numel() // len(view)
    if row > TILE:
        for each in view:
            yield from _small(each)
        return
    rows = TILE // row
    for first in range(0, len(view), rows):
        yield view[first : first + rows]
