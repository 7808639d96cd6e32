"""How many members a run can use: n*, from the dot products of the members' contributions.  Part of the ledger.  Pure.

What a member learns in a round is what all have in common, and noise of its own.  A mean of n members keeps the first,
and 1/n of the power of the second.  The cosine of a round (`Screening.cosine`) is the share of a contribution's power
that is common, so (1 - cosine) / cosine is the noise against it, and with n* members as much noise is left in the mean
as NOISE_LEFT says: further ones hardly change what a round learns.  In a run the figure grows, as what is easy to agree
on is learned.

Who may lie: an owner about the products of its share, within what vectors can have.  So it is for people, and no rule
of a run follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

NOISE_LEFT = 0.05  # in the mean, of the power of what members have in common
ROUNDS_LEAST = 8
ROUNDS_KEPT = 32
SURE = 2.0  # standard errors to both sides
MEMBERS_MOST = 1_000_000  # more is told as so many


@dataclass(frozen=True)
class Useful:
    members: int | None  # None: not known yet
    least: int  # 0: nothing is known
    most: int | None  # None: nobody knows
    rounds: int  # that it is from
    text: str  # for people

    def told(self) -> dict[str, Any]:
        """As a status has it."""
        return {
            "members": self.members,
            "least": self.least,
            "most": self.most,
            "rounds": self.rounds,
            "text": self.text,
        }


def useful_members(cosines: Sequence[float]) -> Useful:
    """`cosines`: of the newest rounds."""
    rounds = len(cosines)
    if rounds < ROUNDS_LEAST:
        why = f"not known yet: {rounds} of {ROUNDS_LEAST} rounds in which two or more members were compared"
        return Useful(None, 0, None, rounds, why)
    middle, off = fmean(cosines), SURE * stdev(cosines) / math.sqrt(rounds)
    least = _members_at(middle + off)
    if middle - off <= 0.0:
        why = (
            f"not known yet, {least:,} or more: in {rounds} rounds members agreed by little more than chance"
        )
        return Useful(None, least, None, rounds, why)
    members, most = _members_at(middle), _members_at(middle - off)
    text = f"about {members:,} ({least:,} to {most:,}, from {rounds} rounds)"
    return Useful(members, least, most, rounds, text)


def _members_at(cosine: float) -> int:
    if cosine >= 1.0:
        return 1
    if cosine <= 0.0:
        return MEMBERS_MOST
    return min(MEMBERS_MOST, max(1, math.ceil((1.0 - cosine) / cosine / NOISE_LEFT)))
