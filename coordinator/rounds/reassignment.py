"""Who owns the chunks of owners that are lost: an heir in the same group, and sometimes another root.  Pure.

Called by the round in flight, which says who lives, who is fit and what is held.  Must not know why somebody is unfit,
nor tell anybody: it returns the ownership of the next epoch.

What is proven is kept: a chunk's result stands as long as somebody lives who can be its root and holds it.  And
whoever has what the lost owner itself added to a chunk is its heir, or that contribution could not be had any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from farflung.coordinator.rounds import shares
from farflung.coordinator.rounds.groups import Groups
from farflung.protocol.digests import mask_from_bytes


@dataclass(frozen=True)
class ProvenHoldings:
    """What members have proven to hold."""

    merged: Set[int]  # chunks that have a result
    result: Callable[[str, int], bool]  # a member has that of a chunk
    spare: Callable[[str, str, int], bool]  # a member has what an owner adds to a chunk


@dataclass
class Reassignment:
    """What comes of the loss."""

    owners: list[int]
    roots: list[int]
    kept: int  # mask of chunks whose result stands, though an owner of theirs is lost
    lost: set[str] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)  # groups that nobody is left in who could own anything
    anew: set[int] = field(default_factory=set)  # chunks whose result nobody can show any more


def inherited(
    groups: Groups,
    alive: Set[str],
    able: Set[str],
    cut_off: Set[str],
    shown: ProvenHoldings,
    ended: Set[int],
    lines: Sequence[shares.MemberRates] = (),
) -> Reassignment | None:
    """None: no owner is lost.  `able`: the living that can be dialled; `ended`: groups that ended before; `lines`: of
    the plan's members, if they are known."""
    plan = groups.plan
    made = Reassignment(list(plan.owners), list(plan.roots or ()), mask_from_bytes(plan.kept))
    heirs: dict[int, list[int]] = {}
    for group, members in enumerate(groups.members):
        owners = groups.shares_in[group].keys()
        if group in ended or (owners <= alive and cut_off.isdisjoint(owners)):
            continue
        here = [plan.members.index(member) for member in members if member in able]
        willing = [at for at in here if plan.members[at] not in cut_off]
        fit = alive - cut_off if willing else alive  # somebody must own the chunks
        lost = owners - fit
        if not lost:
            continue
        made.lost |= lost
        heirs[group] = willing or here
        if not heirs[group]:
            made.ended.add(group)
    if not made.lost:
        return None
    living = [group for group in range(len(groups.members)) if group not in ended | made.ended]
    if not living:
        return made
    for group in heirs:
        _move(groups, group, made, heirs[group], shown, living, lines)
    return made


def _move(
    groups: Groups,
    group: int,
    made: Reassignment,
    heirs: Sequence[int],
    shown: ProvenHoldings,
    living: Sequence[int],
    lines: Sequence[shares.MemberRates],
) -> None:
    """Of one group."""
    plan, count = groups.plan, groups.plan.count
    members = plan.members
    row = made.owners[group * count : (group + 1) * count]
    lost = {at for at in set(row) if members[at] in made.lost}
    if heirs:
        keep = {
            chunk: [at for at in heirs if shown.spare(members[at], members[owner], chunk)]
            for chunk, owner in enumerate(row)
            if owner in lost
        }
        row_after = list(shares.reassign(row, lost, heirs, lines, first=keep))
    else:
        row_after = list(row)
    for chunk, owner in enumerate(row):
        if owner not in lost:
            continue
        is_root = not plan.roots or made.roots[chunk] == group
        holders = [at for at in heirs if shown.result(members[at], chunk)]
        if holders:
            row_after[chunk] = min(holders, key=lambda at: (row_after.count(at), at))
            made.kept |= 1 << chunk
            continue
        stands = chunk in shown.merged and not is_root  # its root lives, and gives it to the heir
        if is_root and plan.roots:
            elsewhere = [g for g in living if g != group and groups.owner(g, chunk) not in made.lost]
            holding = [g for g in elsewhere if shown.result(groups.owner(g, chunk), chunk)]
            stands = bool(holding)
            if holding:
                made.roots[chunk] = holding[0]
            elif not heirs:
                made.roots[chunk] = (elsewhere or list(living))[chunk % len(elsewhere or living)]
        if stands:
            made.kept |= 1 << chunk
        else:
            made.kept &= ~(1 << chunk)
            made.anew.add(chunk)
    made.owners[group * count : (group + 1) * count] = row_after
