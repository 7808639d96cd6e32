"""A round as groups: who is in which, and who owns what there.  Pure.

A flat round has one group.  Of several, each chunk has an owner in every one, who adds up what the group contributes;
one of these owners, the root, adds up the sums of all groups and encodes the result.  So a member talks with its group,
and an owner besides with the owners of its chunks in the other groups.  How groups come to be, and what becomes of
their sums, is the mesh's (coordinator/mesh).

Called by the driver and by the round in flight.  Must not know what anybody reports: that is the round's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET
from msgspec.structs import replace

from farflung.protocol.round_words import Commit, Plan


def planned(
    numbers: tuple[int, int, int],
    peers: Sequence[str],
    groups: tuple[int, ...],
    owners: tuple[int, ...],
    codecs: tuple[str, ...],
) -> Plan:
    """The first epoch of a round.  `numbers`: of the round, of the version that it starts from, of the fragment."""
    round_no, version, fragment = numbers
    roots = roots_of(groups, owners)
    return Plan(
        round_no,
        1,
        version,
        tuple(peers),
        owners,
        codecs,
        fragment,
        groups=groups or UNSET,
        roots=roots or UNSET,
    )


def roots_of(groups: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
    """For each chunk the group of its root, in turn; () where all are one group."""
    count = max(groups, default=0) + 1
    return tuple(chunk % count for chunk in range(len(owners) // count)) if groups else ()


@dataclass(frozen=True)
class Groups:
    """The same plan, asked about its groups."""

    plan: Plan

    @cached_property
    def of(self) -> Mapping[str, int]:
        """Member -> its group."""
        return dict(zip(self.plan.members, self.plan.groups or [0] * len(self.plan.members), strict=True))

    @cached_property
    def members(self) -> tuple[tuple[str, ...], ...]:
        """Of each group, in the order of its sum."""
        found: list[list[str]] = [[] for _ in range(len(self.plan.owners) // max(1, self.plan.count))]
        for member in self.plan.members:
            found[self.of[member]].append(member)
        return tuple(map(tuple, found))

    @cached_property
    def shares(self) -> Mapping[str, int]:
        """Owner -> mask of its chunks."""
        masks: dict[str, int] = {}
        for place, owner in enumerate(self.plan.owners):
            peer = self.plan.members[owner]
            masks[peer] = masks.get(peer, 0) | 1 << place % self.plan.count
        return masks

    @cached_property
    def shares_in(self) -> tuple[Mapping[str, int], ...]:
        """The same, group by group."""
        found: list[dict[str, int]] = [{} for _ in self.members]
        for owner, share in self.shares.items():
            found[self.of[owner]][owner] = share
        return tuple(found)

    @cached_property
    def roots(self) -> Mapping[str, int]:
        """Who encodes results -> mask of the chunks."""
        masks: dict[str, int] = {}
        for chunk in range(self.plan.count):
            root = self.plan.root_of(chunk)
            masks[root] = masks.get(root, 0) | 1 << chunk
        return masks

    def shares_around(self, member: str) -> Mapping[str, int]:
        """Owners of the member's group: those that have to get its contribution."""
        return self.shares_in[self.of[member]]

    def owner(self, group: int, chunk: int) -> str:
        return self.plan.members[self.plan.owners[group * self.plan.count + chunk]]

    def column(self, chunk: int) -> tuple[str, ...]:
        """Its owners in all groups."""
        return self._columns[chunk]

    @cached_property
    def _columns(self) -> tuple[tuple[str, ...], ...]:
        plan, groups = self.plan, range(len(self.members))
        return tuple(tuple(self.owner(group, chunk) for group in groups) for chunk in range(plan.count))

    @cached_property
    def circles(self) -> tuple[frozenset[str], ...]:
        """Each of one exchanges frames with all others there: a group, or the owners of one chunk in all groups."""
        columns = {
            frozenset(self.column(chunk)) for chunk in range(self.plan.count if self.plan.roots else 0)
        }
        return (*map(frozenset, self.members), *columns)

    def near(self, member: str) -> set[str]:
        return {peer for circle in self.circles if member in circle for peer in circle}


def own_part(commit: Commit, member: str) -> Commit:
    """What it needs to know of it: whether its work is in, and what the results are."""
    own = [
        (peer, weight) for peer, weight in zip(commit.members, commit.weights, strict=True) if peer == member
    ]
    return replace(commit, members=tuple(p for p, _ in own), weights=tuple(w for _, w in own))
