"""Bytes between the ranks of an island, over a gloo group of torch.distributed: on CPUs, beside the GPUs' own traffic.

Made when a script of several ranks joins a run.  Must not know what the bytes mean.

Nothing is pickled.  A rank that is gone ends a collective at once, for its connections are closed; one that hangs ends
it after `PATIENCE_S`, if nobody has killed it before: rank 0 may be busy for long, with a validation of its own say.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from farflung.protocol.errors import Refused, UserError

PATIENCE_S = 30 * 60.0
GONE = "rank"  # the code of the refusal that a rank hears when another one is gone
_BOOT = Path("/proc/sys/kernel/random/boot_id")
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
        self._refuse_several_machines()

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

    def _refuse_several_machines(self) -> None:
        """They could not share the agent's memory."""
        here = os.uname().nodename + (_BOOT.read_text() if _BOOT.exists() else "")
        if len(set(self.gather(here.encode()))) > 1:
            raise UserError(
                f"the {self.count} ranks run on several machines: a peer of several machines is not supported yet; "
                "start one torchrun on each machine (--nnodes 1), each with an --identity of its own"
            )


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
