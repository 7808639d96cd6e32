"""What is due in a round: one of six steps, each with its reason.  Pure data.

Made by `InFlight.next_step`, carried out by the driver, which announces it and writes it down.  Must not know how
any of it was found out.
"""

from __future__ import annotations

from dataclasses import dataclass

from farflung.protocol.causes import AbortCause
from farflung.protocol.round_words import Commit, Decision, Plan


@dataclass(frozen=True)
class OwnersMoved:
    """Ownership changed: announce the plan of the new epoch."""

    plan: Plan
    reason: str
    unfit: frozenset[str]  # living owners that others could not get through to


@dataclass(frozen=True)
class RoundCommitted:
    decision: Decision
    reason: str
    merged: str = ""  # how, where contributions were compared


@dataclass(frozen=True)
class Foreseen:
    """What the round will most likely come to: members may begin by it, and nothing is written down."""

    decision: Decision


@dataclass(frozen=True)
class Done:
    commit: Commit
    norm: float | None = None  # of the merged update, where it is known
    late: frozenset[str] = frozenset()  # they lack results, and the round would have needed them too
    # Where the gradient of a batch is clipped: of each chunk's result, the sum of the squares of its values.
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Failed:
    reason: str
    cause: AbortCause
    unfit: frozenset[str] = frozenset()  # living owners that gave no results, where others could have
    dropped: bool = False  # the guard: what was contributed must not come again
    lost: frozenset[str] = frozenset()  # whose share of a batch must be computed again


@dataclass(frozen=True)
class RoundWaits:
    reason: str


Step = OwnersMoved | RoundCommitted | Foreseen | Done | Failed | RoundWaits
