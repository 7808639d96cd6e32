"""What a trainer asks of the other ranks of its island; and the answers of one that has no others.

`Ranks` is what the inner loop, the layout and `run.batches` see: they are the same for one process and for many.
Called by peer/trainer; carried out for several ranks by island.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from farflung.peer.island.parts import WHOLE, BatchPart, Outlook

if TYPE_CHECKING:
    from torch import Tensor


# Of a rank, where the values lie here that it writes or reads: views of a flat vector.
Places = Callable[[int], Iterable["Tensor"]]


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def part(self) -> BatchPart:
        """Of each batch."""

    @property
    def near(self) -> Collection[int]:
        """The ranks that share memory with the agent (group.py)."""

    @property
    def partners(self) -> Sequence[tuple[int, int]]:
        """Of the others, each with the near rank by which it writes and reads."""

    def tokens_of_step(
        self, said: int | None, handed_out: int, batches: int, outlook: Outlook
    ) -> Sequence[int | None]:
        """After every optimizer step: what this rank learned from, by the script (`said`) or by what it was given.

        `batches`: so many it has been given by now, all in all.
        Where `outlook` and the pace of steps ask for it, all ranks hear the agent's words and the time here.  Then it
        gives what all of them learned from in each step since they heard last; None: nobody has counted anything.
        """

    def tokens_heard(self) -> Sequence[int | None]:
        """The same, of steps before a wait in which the ranks have heard of each other."""

    def wait_for_all(self) -> None:
        """Until all ranks are here: what they wrote before is in the shared memory."""

    def mean(self, total: float, count: int) -> float | None:
        """Of all ranks' values; None where there are none, or they are no numbers."""

    def gather(self, mine: bytes) -> Sequence[bytes]:
        """What each rank says, in their order."""

    def bring(self, places: Places) -> None:
        """What far ranks have written is in the shared memory then."""

    def fetch(self, places: Places) -> None:
        """Far ranks have what they are to read."""


class Alone:
    """A trainer of one process."""

    rank, count, part = 0, 1, WHOLE
    near, partners = (0,), ()

    def tokens_of_step(
        self, said: int | None, handed_out: int, batches: int, outlook: Outlook
    ) -> Sequence[int | None]:
        return (said,)

    def tokens_heard(self) -> Sequence[int | None]:
        return ()

    def wait_for_all(self) -> None:
        pass

    def mean(self, total: float, count: int) -> float | None:
        return mean_of([(total, count)])

    def gather(self, mine: bytes) -> Sequence[bytes]:
        return [mine]

    def bring(self, places: Places) -> None:
        pass

    def fetch(self, places: Places) -> None:
        pass


ALONE = Alone()


def mean_of(sums: Sequence[tuple[float, int]]) -> float | None:
    """Sums of losses, and of how many each."""
    count = sum(each for _, each in sums)
    mean = sum(total for total, _ in sums) / count if count else float("nan")
    return mean if abs(mean) < float("inf") else None


def ranks_here() -> int:
    """How many processes train together with this one; 1: it is alone."""
    # Whoever has a process group has loaded the module; loading it here would cost every start.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() else 1
