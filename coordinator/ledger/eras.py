"""Who may hold which version of a fragment, and what the books said of it.  Pure.

Held by the ledger, changed only for records that are written.  A peer may hold a version that was committed while it
was here and had shown the run's state, or in whose round it was.  It may hold nothing any more when it said good-bye or
was sent away: whoever left without a word may be alive behind a cut line, with the newest state in its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farflung.coordinator.ledger.leases import CoveredRange
from farflung.protocol.causes import DepartureCause

NOTHING = -1
# Its process does not come back with what it held: it said so, or it was told to end.
ACCOUNTED_FOR = frozenset(
    {
        DepartureCause.LEFT,
        DepartureCause.FINISHED,
        DepartureCause.MISFIT,
        DepartureCause.KICKED,
        DepartureCause.BANNED,
    }
)


@dataclass
class HolderMark:
    """A peer and one fragment."""

    reached: int = NOTHING  # the newest version that it may hold
    tokens: int = 0  # that commits took from it, ever


@dataclass(frozen=True)
class Mark:
    """What the books said when a version was committed: to be said again if the run goes back to it."""

    reach: CoveredRange
    tokens: int
    loss: float | None
    cursor: tuple[int, int] = (0, 0)  # of synchronous batches: where the next one begins


def are_accounted_for(holders: Mapping[str, HolderMark], version: int, present: Sequence[str]) -> bool:
    """May the run go back to this version, held by somebody who is here, while nobody here holds more?

    Yes, if nobody who is away can hold more; or if of those who can, by their committed tokens, more than half are here
    (and hold no more).  Who never brought anything has no say, however many they are.
    """
    can = {peer: holder.tokens for peer, holder in holders.items() if holder.reached > version}
    here = can.keys() & set(present)
    return can.keys() == here or 2 * sum(can[peer] for peer in here) > sum(can.values())
