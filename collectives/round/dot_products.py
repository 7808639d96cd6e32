"""What an owner knows of the dot products of its chunks: which to compute next, and what to report.  Pure.

Part of the round at a member (member.py).  A chunk is weighed as soon as every contribution to it is here, so that the
sums are ready when the coordinator decides.  Where contributions fail to come, the coordinator names whom it wants
compared, and the chunks are weighed with those.  Members are bits of a mask, in the plan's order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import combinations_with_replacement
from typing import Protocol

from msgspec import Struct

from farflung.collectives.round.effects import Weigh
from farflung.protocol.digests import bits, mask_of
from farflung.protocol.frames import Payload
from farflung.protocol.round_words import Plan


class HasPayload(Protocol):
    @property
    def payload(self) -> Payload: ...


class Dots(Struct, frozen=True):
    """The sums over chunks of <x_i, x_j> for members i <= j, row by row."""

    members: int  # mask
    chunks: int  # mask
    products: tuple[float, ...]


class Weighing:
    def __init__(self, everybody: int, active: bool) -> None:
        self.active = active  # contributions are compared in this run, and the decision is not made yet
        self.changed = False  # whom to compare, or what I own: every chunk is to be looked at again
        self._asked = 0  # the coordinator's word: whom to compare; 0: it has not asked
        self._everybody = everybody
        self._known: dict[int, Dots] = {}  # by chunk
        self._busy: dict[int, int] = {}  # chunk -> members

    def on_asked(self, members: int) -> None:
        self.changed = self.changed or members != self._asked
        self._asked = members & self._everybody

    def due(self, chunk: int, held: int, refused: int = 0) -> int:
        """With whom the chunk is to be weighed now; 0: not now.  `held`: whose contributions are here."""
        wanted = self._wanted(refused)
        if not self.active or not wanted or wanted & ~held:
            return 0
        known = self._known[chunk].members if chunk in self._known else 0
        return wanted if wanted & ~known and wanted & ~self._busy.get(chunk, 0) else 0

    def weigh_all(
        self, plan: Plan, shelves: Mapping[int, Mapping[str, HasPayload]], refused: int, first_chunk: int
    ) -> Iterator[Weigh]:
        """Compare what is here, chunk by chunk, where nothing is missing for it."""
        for chunk, shelf in shelves.items() if self.active else ():
            mask = self.due(chunk, mask_of(plan.members.index(member) for member in shelf), refused)
            if mask:
                self.begin(chunk, mask)
                payloads = tuple(shelf[plan.members[index]].payload for index in bits(mask))
                yield Weigh(plan.round_no, first_chunk + chunk, mask, payloads)

    def begin(self, chunk: int, members: int) -> None:
        self._busy[chunk] = members

    def on_weighed(self, chunk: int, members: int, products: tuple[float, ...]) -> None:
        self._known[chunk] = Dots(members, 1 << chunk, products)
        if self._busy.get(chunk) == members:
            del self._busy[chunk]

    def is_complete(self, chunks: Collection[int], refused: int = 0) -> bool:
        """Nothing (more) is to be compared here."""
        if not self.active:
            return True
        if len(self._known) < len(chunks):  # asked after every frame
            return False
        wanted = self._wanted(refused)
        return all(chunk in self._known and not wanted & ~self._known[chunk].members for chunk in chunks)

    def report(self, chunks: Collection[int], refused: int = 0) -> Dots | None:
        """The sums over all my chunks, once each has been weighed."""
        if not self.active or not chunks or not self.is_complete(chunks, refused):
            return None
        wanted = self._wanted(refused)
        parts = [_only(self._known[chunk], wanted) for chunk in sorted(chunks)]
        return Dots(wanted, mask_of(chunks), tuple(map(sum, zip(*parts, strict=True))))

    def _wanted(self, refused: int) -> int:
        return self._asked or self._everybody & ~refused


def _only(dots: Dots, members: int) -> tuple[float, ...]:
    """The products of some of the members."""
    if dots.members == members:
        return dots.products
    return tuple(p for (i, j), p in by_pair(dots) if members >> i & 1 and members >> j & 1)


def by_pair(dots: Dots) -> Iterable[tuple[tuple[int, int], float]]:
    return zip(combinations_with_replacement(bits(dots.members), 2), dots.products, strict=True)
