"""Results of a round that has been committed and that are still on their way.  Pure.

Owned by a member's lane from the commit of a round in which it took part.  A round commits as soon as every result is
proven, and on thin lines the last ones reach some members only after that.  To ask a donor for them at once would bring
them twice, over the line that they are just coming through.  Must not know who is asked instead, or when.
"""

from __future__ import annotations

from farflung.collectives.asking import Asking
from farflung.collectives.plan import Plan


class LateResults:
    def __init__(self, plan: Plan, first_chunk: int, quiet_s: float, now: float) -> None:
        self.version = plan.version + 1
        self._plan, self._first_chunk = plan, first_chunk
        self._asking = Asking(plan.members, quiet_s, now)

    def on_result(self, sender: str, now: float) -> None:
        if sender in self._plan.members:
            self._asking.on_heard(sender, now)

    def on_arriving(self, members: set[str], now: float) -> None:
        self._asking.on_arriving(members, now)

    def coming(self, now: float) -> set[tuple[int, int]]:
        """(version, chunk) of which the owner has not been quiet for too long."""
        speaking = {m for m in self._plan.members if not self._asking.is_due(m, now)}
        owners = [self._plan.members[owner] for owner in self._plan.owners]
        return {(self.version, self._first_chunk + i) for i, owner in enumerate(owners) if owner in speaking}
