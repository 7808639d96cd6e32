"""The one ledger of what became of every frame (promise P8).

Each frame that reaches a process ends in exactly one of these counters.  Shells and machines call
`Counters.count`; the status and the tests read them.  Knows nothing of what a frame means.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    UNAUTHORISED = "unauthorised"
    BAD_HASH = "bad hash"
    OVERSIZE = "oversize"
    MALFORMED = "malformed"


class Counters:
    """Counts frames by verdict; `total` equals the number of frames that arrived."""

    def __init__(self) -> None:
        self._counts: Counter[Verdict] = Counter()

    def count(self, verdict: Verdict, frames: int = 1) -> Verdict:
        self._counts[verdict] += frames
        return verdict

    def since(self, earlier: Counters) -> dict[Verdict, int]:
        """What these have that the earlier ones had not, where that is anything."""
        return dict(self._counts - earlier._counts)

    def copy(self) -> Counters:
        made = Counters()
        made._counts = self._counts.copy()
        return made

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def as_dict(self) -> dict[str, int]:
        return {verdict.value: self._counts[verdict] for verdict in Verdict}
