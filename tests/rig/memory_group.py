"""Ranks of an island as threads of one process: what each brings to a collective lies in a list of all.

For tests of what ranks agree on, without torch.distributed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

PATIENCE_S = 20.0


class MemoryGroup:
    """Ranks are threads; what each brings to a collective lies in a list of all."""

    def __init__(self, rank: int, all_of: Meeting) -> None:
        self.rank, self.count, self._all = rank, all_of.count, all_of

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        return [list(each) for each in self._all.exchange(self.rank, tuple(mine))]

    def gather(self, mine: bytes) -> list[bytes]:
        return self._all.exchange(self.rank, mine)

    def spread(self, told: bytes, size: int) -> bytes:
        found: bytes = self._all.exchange(self.rank, told)[0]
        assert len(found) == size
        return found


class Meeting:
    def __init__(self, count: int) -> None:
        self.count = count
        self._brought: list[Any] = [None] * count
        self._barrier = threading.Barrier(count)

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self._brought[rank] = thing
        self._barrier.wait(PATIENCE_S)
        found = list(self._brought)
        self._barrier.wait(PATIENCE_S)
        return found

    def gone(self) -> None:
        self._barrier.abort()
