"""A round as groups: who is in which, who owns what there, and what of it a member hears.  Pure.

A flat round has one group.  In a mesh each chunk has an owner in every group, who adds up what the group contributes;
one of these owners, the root, adds up the sums of all groups and encodes the result.  So a member talks with its group,
and an owner besides with the owners of its chunks in the other groups.

Called by the driver, which draws the groups of a round, and by the round in flight.  Must not know what anybody
reports: that is the round's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from msgspec import UNSET
from msgspec.structs import replace

from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes, mask_of, mask_to_bytes
from farflung.protocol.limits import GROUPS_MOST, MEMBERS_PER_MESH, MEMBERS_PER_ROUND
from farflung.protocol.round_words import Commit, Decision, MeshColumn, Plan

OWNERS_LEAST = 2  # of a group: an heir has to be there


def drawn(peers: Sequence[str], able: Set[str], size: int, seed: bytes) -> tuple[int, ...]:
    """The group of each of them, about `size` in each; () if they are one group.

    Nobody chooses its group: the order is by a hash that nobody knew when it came.  Those who can own chunks are dealt
    first, so that every group has some.
    """
    owners = sum(peer in able for peer in peers)
    wanted = -(-len(peers) // size) if size else 1
    count = min(wanted, GROUPS_MOST, owners // OWNERS_LEAST)
    if count < 2:
        return ()
    order = sorted(
        range(len(peers)), key=lambda at: (peers[at] not in able, hash_bytes(seed, peers[at].encode()))
    )
    places = {at: turn % count for turn, at in enumerate(order)}
    return tuple(places[at] for at in range(len(peers)))


def most_of_round(size: int, able: int) -> int:
    """Members of one round, so many of which can own chunks."""
    groups = min(GROUPS_MOST, able // OWNERS_LEAST) if size else 1
    return min(max(1, groups) * MEMBERS_PER_ROUND, MEMBERS_PER_MESH)


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


# ---- what one member hears -----------------------------------------------------------------------------


def view(groups: Groups, member: str, epoch: int) -> Plan:
    """Its group, as if that were all; and where the sums of its chunks go and come from."""
    plan = groups.plan
    if not plan.roots:
        return plan
    mine = groups.of[member]
    group = groups.members[mine]
    index = {peer: at for at, peer in enumerate(group)}
    codecs = dict(zip(plan.members, plan.codecs, strict=True))
    columns = [groups.column(chunk) for chunk in bits(groups.shares.get(member, 0))]
    peers = sorted({peer for column in columns for peer in column})
    places = {peer: at for at, peer in enumerate(peers)}
    return replace(
        plan,
        epoch=epoch,
        members=group,
        owners=tuple(index[groups.owner(mine, chunk)] for chunk in range(plan.count)),
        codecs=tuple(codecs[peer] for peer in group),
        groups=UNSET,
        roots=UNSET,
        column=MeshColumn(
            mine,
            len(groups.members),
            tuple(peers),
            tuple(places[peer] for column in columns for peer in column),
            tuple(plan.roots[chunk] for chunk in bits(groups.shares.get(member, 0))),
        ),
    )


def decision_view(groups: Groups, decision: Decision, member: str) -> Decision:
    """The weights of its group, and which groups count."""
    if not groups.plan.roots:
        return decision
    weights = dict(zip(groups.plan.members, decision.weights, strict=True))
    group = groups.members[groups.of[member]]
    reasons = {peer: why for peer, why in decision.reasons.items() if peer in group}
    return replace(decision, weights=tuple(weights[peer] for peer in group), reasons=reasons)


def summed(groups: Groups, weights: Mapping[str, float]) -> bytes:
    """The mask of groups of which somebody is included."""
    return mask_to_bytes(mask_of({groups.of[peer] for peer, weight in weights.items() if weight > 0.0}))


def touched(before: Plan, after: Plan) -> set[str]:
    """Who has to hear that ownership moved: a group in which it did, and the owners of these chunks in all others."""
    if not after.roots or not before.roots:
        return set(after.members)
    groups, count = Groups(after), after.count
    moved = [
        place for place, pair in enumerate(zip(before.owners, after.owners, strict=True)) if len({*pair}) > 1
    ]
    chunks = {place % count for place in moved}
    chunks |= {chunk for chunk in range(count) if before.roots[chunk] != after.roots[chunk]}
    chunks |= set(bits(mask_from_bytes(before.kept) ^ mask_from_bytes(after.kept)))
    found = {peer for group in {place // count for place in moved} for peer in groups.members[group]}
    return found.union(*(groups.column(chunk) for chunk in chunks))


def own_part(commit: Commit, member: str) -> Commit:
    """What it needs to know of it: whether its work is in, and what the results are."""
    own = [
        (peer, weight) for peer, weight in zip(commit.members, commit.weights, strict=True) if peer == member
    ]
    return replace(commit, members=tuple(p for p, _ in own), weights=tuple(w for _, w in own))
