"""Neighbours of whom a member can't say that it gets on with them: what it tells the coordinator, and whom it avoids.

Used by the machine of microbatches (stage_scheduler.py), one for each seat; `Shunned` by the agent of a stage, for
all its seats, since a peer that gave one up comes back under another number.  Nothing is decided here: a microbatch
stays with whoever has it until the table shows that seat gone, and who goes is the coordinator's to say
(coordinator/batches/complaints.py).  Must not know frames, or how anybody is asked.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

DAMAGED_TIMES = 2  # in a row: the first time it may have been anything
SHUNNED_S = 60.0


class NeighbourHealth:
    """Of one batch."""

    def __init__(self) -> None:
        self._damaged: dict[int, int] = {}  # by seat: crossings in a row that were of no use
        self._silent: set[int] = set()

    def clear(self) -> None:
        self._damaged.clear()
        self._silent.clear()

    def on_damaged(self, seat: int) -> bool:
        """True: somebody should hear of it now."""
        self._damaged[seat] = self._damaged.get(seat, 0) + 1
        return self._damaged[seat] == DAMAGED_TIMES

    def on_good(self, seat: int) -> None:
        """A crossing of it is as it should be."""
        self._damaged.pop(seat, None)

    def on_silent(self, silent: set[int]) -> list[int]:
        """All seats that answer nothing now.  Of these, whom somebody should hear of now."""
        news, self._silent = sorted(silent - self._silent), silent
        return news

    def complaints(self, lives: Callable[[int], bool]) -> dict[int, bool]:
        """By seat that lives; True: what comes from it is damaged."""
        damaged = {seat for seat, times in self._damaged.items() if times >= DAMAGED_TIMES}
        return {seat: seat in damaged for seat in sorted(damaged | self._silent) if lives(seat)}


class Shunned:
    """Peers that were complained of a while ago: they get nothing new, as long as there are others."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def on_complaints(self, peers: Iterable[str], now: float) -> None:
        self._until.update((peer, now + SHUNNED_S) for peer in peers)

    def now(self, now: float) -> frozenset[str]:
        self._until = {peer: until for peer, until in self._until.items() if now < until}
        return frozenset(self._until)
