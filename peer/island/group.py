"""Bytes between the ranks of an island, over a gloo group of torch.distributed: on CPUs, beside the GPUs' own traffic.

Made when a script of several ranks joins a run.  Must not know what the bytes mean.

Nothing is pickled.  A rank that is gone ends a collective at once, for its connections are closed; one that hangs ends
it after `PATIENCE_S`, if nobody has killed it before: rank 0 may be busy for long, with a validation of its own say.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from farflung.peer.local.memory import FAR, SharedState
from farflung.peer.local.words import Shared
from farflung.protocol.errors import Refused, UserError
from farflung.protocol.outer_numbers import VALUE_BYTES

# ---- nodes -------------------------------------------------------------------------------------------------
# Islands of several nodes: which ranks share memory with the agent, and what those do that can't.
#
# The agent is on rank 0's node. A rank there is near; the others are far. A far rank has room of its own in
# place of the shared memory, of which only the pages of its own values are ever real, and only for a moment.
# A near rank is its partner: what the far one has written it puts into the shared memory, and what the far
# one is to read it sends. All ranks carry out the same effects in the same order, so nobody asks for
# anything: both do it when its turn comes.
#
# Called when ranks agree (peer/trainer/api.py), by the group and by the inner loop. Must not know
# the flat vector beyond views of it, words or rounds.

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


# ---- group -------------------------------------------------------------------------------------------------

PATIENCE_S = 30 * 60.0
GONE = "rank"  # the code of the refusal that a rank hears when another one is gone
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class GlooGroup:
    """All ranks of the script, in a group of their own."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise UserError(
                "this is one of several processes that train together: call torch.distributed.init_process_group() "
                "before farflung.join, or unset WORLD_SIZE if it is left over from something else"
            )
        if not dist.is_gloo_available():
            raise UserError(
                "this torch has no gloo, by which the ranks of a peer agree: use another build of torch"
            )
        _end_with_torchrun()
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        with _others():
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))
        atexit.register(self._end)

    def _end(self) -> None:
        """Gloo's threads end while Python still lives.  One that lets go of a tensor later needs Python's lock, and is
        ended in a place where C++ allows no ending: the whole process aborts, after all went well.  The script's own
        groups are the script's to end (docs/islands.md)."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # it was destroyed with all others, before the script made new ones
                dist.destroy_process_group(group)

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(mine, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with _others():
            dist.all_gather(found, own, group=self._group)
        return [row.tolist() for row in found]

    def gather(self, mine: bytes) -> list[bytes]:
        sizes = [row[0] for row in self.rows((len(mine),))]
        own = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        own[: len(mine)] = _bytes(mine)
        found = [torch.empty_like(own) for _ in sizes]
        with _others():
            dist.all_gather(found, own, group=self._group)
        return [each[:size].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]

    def spread(self, told: bytes, size: int) -> bytes:
        raw = _bytes(told) if self.rank == 0 else torch.empty(size, dtype=torch.uint8)
        with _others():
            dist.broadcast(raw, 0, group=self._group)
        return raw.numpy().tobytes()

    def send(self, views: Iterable[torch.Tensor], rank: int) -> None:
        for tile in tiles(views):
            values = torch.cat([each.reshape(-1) for each in tile])
            with _others():
                dist.send(values, rank, group=self._group)

    def receive(self, views: Iterable[torch.Tensor], rank: int) -> None:
        """Into these, which are as many and as long as those that are sent."""
        for tile in tiles(views):
            values = torch.empty(sum(each.numel() for each in tile))
            with _others():
                dist.recv(values, rank, group=self._group)
            first = 0
            for view in tile:
                view.copy_(values[first : first + view.numel()].view(view.shape))
                first += view.numel()


def _end_with_torchrun() -> None:
    """Its ranks are in sessions of their own: if it is killed, they would go on with the GPUs, and the next ones beside
    them.  One that hangs hears no other signal."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


@contextmanager
def _others() -> Iterator[None]:
    """torch says with a RuntimeError, of many classes, that a rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).strip().partition("] ")[2].partition(". ")[0] or repr(error)
        raise Refused(GONE, f"another rank of this peer is gone, and says why itself ({told})") from error
