"""Which groups a round is drawn into, and what of it a member hears.  Pure.

Asked by `mesh.py` for the driver, and by `mesh_sums.py` for the round in flight.  Must not know what anybody reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.rounds.groups import Groups
from farflung.protocol.digests import bits, hash_bytes, mask_from_bytes, mask_of, mask_to_bytes
from farflung.protocol.limits import GROUPS_MOST, MEMBERS_PER_MESH, MEMBERS_PER_ROUND
from farflung.protocol.round_words import Decision, MeshColumn, Plan

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
