"""What a member knows of the decision of a round: none yet, one that is foreseen, or the one that stands.  Pure.

Part of the round at a member (member.py).  A decision that is foreseen says by which weights the round will most likely
be merged.  Owners begin with it as soon as what goes into a chunk is here, and everybody takes results made by it; but
no contribution is less awaited for it, owners go on comparing, and nobody is asked for a result, which may be waiting
for somebody else's contribution.  The decision itself is another word: with the same number and the same weights it
makes what was made by the foreseen one stand; with anything else all of that is worth nothing.

Must not know frames, chunks or who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from farflung.protocol.round_words import Decision

DOUBTED_S = 2.0  # with every result here and no commit for so long: some owner may tell what nobody can prove


class DecisionNews(Enum):
    NONE = auto()  # an older word, or one that is known
    STANDS = auto()  # what was foreseen is decided: all that was made by it is worth something
    OTHER = auto()  # other weights than before: what was made by those is worth nothing


class Deciding:
    def __init__(self) -> None:
        self.newest: Decision | None = None  # by which results are made now

    def hear(self, decision: Decision) -> DecisionNews:
        known = self.newest
        if known is None or decision.decision_no > known.decision_no:
            self.newest = decision
            return DecisionNews.OTHER
        if decision.decision_no < known.decision_no or decision.foreseen or not known.foreseen:
            return DecisionNews.NONE
        self.newest = decision
        return DecisionNews.STANDS if decision.weights == known.weights else DecisionNews.OTHER

    @property
    def is_made(self) -> bool:
        return self.newest is not None and not self.newest.foreseen

    @property
    def number(self) -> int:
        """Of the one by which results are made now; 0: there is none."""
        return self.newest.decision_no if self.newest is not None else 0

    @property
    def made_no(self) -> int:
        """Of the one that stands; 0: I have not heard of it."""
        return self.number if self.is_made else 0

    def counted(self, members: Sequence[str]) -> list[tuple[str, float]]:
        """(member, weight) of all that go into a sum, in its order.  Ask only when there is a decision."""
        weights = self.newest.weights if self.newest is not None else ()
        return [(m, w) for m, w in zip(members, weights, strict=True) if w > 0.0]

    def may_count(self, member: str, members: Sequence[str]) -> bool:
        """Its contribution is of use, as far as I know."""
        if self.newest is None or not self.is_made:
            return True
        return self.newest.weights[members.index(member)] > 0.0


class Doubt:
    """Every result is here, it is decided, and for too long no commit comes."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.is_on = False

    def look(self, whole: bool, now: float) -> None:
        if not whole:
            self._since = None
        elif self._since is None:
            self._since = now
        self.is_on = self._since is not None and now - self._since >= DOUBTED_S
