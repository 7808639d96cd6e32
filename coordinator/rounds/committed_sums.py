"""What a commit is made of, and who signed for it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from farflung.coordinator.rounds.groups import Groups
from farflung.coordinator.rounds.reported import MadeResult
from farflung.coordinator.rounds.round_policy import MadeSum, Place
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.signed_words import SignedList


@dataclass(frozen=True)
class CommittedSums:
    """A commit, and who signed for what it is made of."""

    plan: Plan
    decision: Decision
    commit: Commit
    said: Mapping[str, SignedList]
    makers: Mapping[int, MadeResult]  # by chunk of the fragment
    identities: Mapping[str, bytes]  # of the makers
    processes: Mapping[str, bytes]  # of all members: another one has not got what it sent any more
    # Of a mesh: by (chunk, group), who made the sums that the results are made of.
    sums: Mapping[Place, MadeSum] = field(default_factory=dict)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.plan)

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return dict(zip(self.commit.members, self.commit.weights, strict=True))
