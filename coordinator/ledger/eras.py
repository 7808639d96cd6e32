"""Who may hold which version of a fragment, and what the books said of it.  Pure.

Held by the ledger, changed only for records that are written.  A peer may hold a version that was committed while it
was here and had shown the run's state, or in whose round it was.  It may hold nothing any more when it said good-bye or
was sent away: whoever left without a word may be alive behind a cut line, with the newest state in its memory.
"""

from __future__ import annotations

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
