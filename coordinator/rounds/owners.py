"""Owners that are lost or fail their chunks: who inherits these, and which owner is silent without a reason.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from farflung.coordinator.rounds import shares
from farflung.coordinator.rounds.round_rules import Groups, RoundRules
from farflung.protocol.digests import bits, in_fewer, mask_from_bytes

# ---- reassignment ------------------------------------------------------------------------------------------
# Who owns the chunks of owners that are lost: an heir in the same group, and sometimes another root. Pure.
#
# Called by the round in flight, which says who lives, who is fit and what is held. Must not know why somebody
# is unfit, nor tell anybody: it returns the ownership of the next epoch.
#
# What is proven is kept: a chunk's result stands as long as somebody lives who can be its root and holds it.
# And whoever has what the lost owner itself added to a chunk is its heir, or that contribution could not be
# had any more.


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


# ---- silent owners -----------------------------------------------------------------------------------------
# Owners that say they lack what all others hold or keep what they merged, and members that take nothing.
# Pure.
#
# What an owner says of its own hands nobody can check: that a contribution did not come keeps it out of the
# round, and a result that is given to nobody, or to accomplices alone, is one that nobody else can go on
# from. So the others are the measure: whose word stands alone, or whose results do not spread, owns nothing
# any more. A cut line looks the same, and is served by the same. Who says of all results that they do not
# come is not to be told from one that nothing is given to, but by what the others hold: most of the run do
# not wait for a few for ever. Used by the round at the coordinator (round.py).

ROUNDS_NOT_WAITED = 8  # for a member that was waited for in vain


def are_most(accusers: Set[str], owners: Set[str], members: int) -> bool:
    """The word of a few keeps nobody's work out of a round: a member is barred when most of those `owners` that had to
    get something of it say so, and two at least where the round has three `members`.  What only a few lack is waited
    for, and then it may be they who lose their chunks."""
    count = len(accusers & owners)
    return 2 * count > len(owners) and count >= min(2, members - 1)


def deaf(lacks: Mapping[str, Set[str]], senders: Set[str]) -> set[str]:
    """Owners that lack most others' contributions.  Where all of them do, no owner's word can be held against it; but
    others can own."""
    return {owner for owner, lacking in lacks.items() if 2 * len(lacking) > len(senders - {owner})}


def lacking_alone(lacks: Mapping[str, Set[str]], senders: Set[str]) -> dict[str, set[str]]:
    """`lacks`: living owner -> members that have sent, and whose contribution it says it does not have whole.

    Owner -> those of them that every other owner has; owners that lack most of all say nothing about the others.
    """
    judges = lacks.keys() - deaf(lacks, senders) or set(lacks)
    return {
        owner: {m for m in lacking if not any(m in lacks[judge] for judge in judges - {owner})}
        for owner, lacking in lacks.items()
        if judges - {owner}
    }


def lacks_most(alone: Mapping[str, Set[str]], senders: Set[str]) -> set[str]:
    """Owners that alone lack most others' contributions, and two at least: one of them may be a slow line."""
    return {
        owner
        for owner, lacking in alone.items()
        if len(lacking) >= 2 and 2 * len(lacking) > len(senders - {owner})
    }


@dataclass
class Spread:
    """How often the results of each owner are held, and since when no further member got one.

    A slow line goes on: it is whoever gives nothing more that is told from it.
    """

    _of: dict[str, tuple[int, float]] = field(default_factory=dict)

    def stuck(self, owing: Iterable[str], held: Mapping[str, int], now: float, patience_s: float) -> set[str]:
        """`owing`: owners of results that too few hold.  Those of whom nobody got another one for so long."""
        before, self._of = self._of, {}
        for owner in owing:
            count, since = before.get(owner, (-1, now))
            same = count == held.get(owner, 0)
            self._of[owner] = (held.get(owner, 0), since if same else now)
        return {owner for owner, (_, since) in self._of.items() if now - since >= patience_s}


def holders_needed(here: int, least: int) -> int:
    """Of a result, among so many living members: most of them, and at least so many.  Else a few could commit what they
    alone hold, give it to nobody, and go on without all others."""
    return min(here, max(here // 2 + 1, least))


@dataclass(frozen=True)
class Holders:
    """What those whose results count towards a commit have proven to hold, when a round is looked at."""

    got: Mapping[str, int]  # member -> mask of chunks
    every_chunk: int
    rules: RoundRules

    def needed(self, waited: bool = False) -> int:
        least, most = self.rules.min_peers, self.rules.most_of_run
        return holders_needed(len(self.got), least if most is None or not waited else min(least, most))

    def thin(self, waited: bool = False) -> list[int]:
        """Chunks whose results too few hold.  `waited`: for those that a round needs besides most of the run."""
        return list(bits(in_fewer(self.got.values(), self.needed(waited), self.every_chunk)))

    @property
    def late(self) -> frozenset[str]:
        return frozenset(member for member, got in self.got.items() if self.every_chunk & ~got)


@dataclass
class LastHolders:
    """How long a commit that most of the run hold waits for those that a round needs besides: where it needs everybody,
    one slow member, or one that says that it has nothing, could hold up all others for ever.

    Who was waited for in vain is not waited for in the next rounds.  Owned by the driver of a fragment, for all of
    its rounds.  Not durable: a coordinator that restarts waits once more.
    """

    _rounds_left: dict[str, int] = field(default_factory=dict)
    _since: float | None = None  # most of the run hold all results of the round in flight

    def begin(self) -> None:
        self._since = None

    def may_go_without(self, late: Set[str], now: float, patience_s: float) -> bool:
        """`late`: who lacks a result, while most of the run hold them all."""
        self._since = now if self._since is None else self._since
        return late <= self._rounds_left.keys() or now - self._since >= patience_s

    def on_commit(self, late: Set[str]) -> set[str]:
        """Returns whom nobody waits for from now on."""
        left = {peer: rounds - 1 for peer, rounds in self._rounds_left.items() if rounds > 1}
        new = set(late) - self._rounds_left.keys()
        self._rounds_left = left | dict.fromkeys(new, ROUNDS_NOT_WAITED)
        return new
