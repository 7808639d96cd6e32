"""One round at the coordinator: when each phase ends, who is in, and why.  Pure.

`Round` collects what members report; `next_step` says which transition is due now, with its reason, and the
run machine writes it down and announces it.  Must not know sockets, journals or membership beyond the set of
peers alive and dialable at the moment.  Chunks are counted within the round's fragment here.

Order matters: the dead are replaced first, then the decision is made or remade, then the commit is considered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.rounds.owners import (
    Holders,
    LastHolders,
    ProvenHoldings,
    Reassignment,
    Spread,
    inherited,
    lacks_most,
)
from farflung.coordinator.rounds.reported import Reported, Scatter
from farflung.coordinator.rounds.round_policy import (
    Done,
    Failed,
    Foreseen,
    OwnersMoved,
    RoundCommitted,
    RoundWaits,
    Step,
)
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.rounds.weights import (
    Believed,
    Screening,
    WorkClaim,
    believed,
    longer,
    screened_in_groups,
    token_weights,
    weighted,
)
from farflung.protocol.digests import bits, mask_to_bytes
from farflung.protocol.errors import AbortCause, Excluded, ExclusionCause
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.round_words import Commit, Decision, Plan

# ---- foresight ---------------------------------------------------------------------------------------------
# What a round will most likely come to, before it is decided: then results can leave while contributions
# still come.
#
# Between the scatter and the gather of a round lines idle: for the last contribution, for the dot products,
# for the way of a decision and back. But as soon as everybody has said what it sends, all that weights depend
# on is known, unless somebody is late, is lost, or has to be shortened. So the round foresees the weights
# (`weights_foreseen`), tells them, and owners merge by them at once. The decision itself is made as ever, by
# contributions that are whole and compared. If it has the same weights it takes the same number, and all that
# was made stands; else it takes the next one, and nothing made before is worth anything. Before it nothing
# commits, and nobody is blamed for a result that is missing.
#
# What was foreseen wrongly costs the bytes of results, a second time. Whoever lies or is slow must not cost
# that in each round: after a mistake as many rounds as `Foresight` says have to go as they would have been
# foreseen, twice as many after each further one. `Foresight` is owned by the driver of a fragment, for all of
# its rounds; not durable.
#
# Pure. Called by the round at the coordinator and by the driver. Must not know members' sessions
# or reports.

FIRST_ROUNDS = 1  # that have to go so, after a start of the coordinator
MISTAKE_ROUNDS, ROUNDS_MOST = 4, 32  # after a mistake, and after many of them


@dataclass
class Foresight:
    """Whether rounds are foreseen, by how the last ones went."""

    _needed: int = FIRST_ROUNDS
    _right: int = 0  # rounds in a row that came as they would have been foreseen
    _pause: int = MISTAKE_ROUNDS  # after the next mistake

    @property
    def is_on(self) -> bool:
        return self._right >= self._needed

    def on_end(self, foreseen: bool, right: bool) -> None:
        """Of a round, committed or not.  `right`: it came to what was foreseen, or what would have been."""
        self._right = self._right + 1 if right else 0
        if foreseen and right:
            self._needed = FIRST_ROUNDS
            self._pause = max(MISTAKE_ROUNDS, self._pause // 2)
        elif foreseen:
            self._needed, self._pause = self._pause, min(ROUNDS_MOST, 2 * self._pause)


def can_be_foreseen(plan: Plan, rules: RoundRules) -> bool:
    """In a mesh sums of groups are compared after the decision; a batch has everybody in it or fails; and where a
    gradient is clipped results are measured."""
    return not (plan.groups or rules.whole or rules.measures or len(plan.members) < 2)


def weights_foreseen(scatter: Scatter, alive: Set[str]) -> dict[str, float] | None:
    """The weights, if nobody is shortened and nobody who has said what it sends is left out.  None: not yet, or nobody
    can know: somebody has not said it, or went after it had."""
    members, sent, barred, rules = scatter.groups.plan.members, scatter.sent, scatter.barred, scatter.rules
    awaited = [m for m in members if m not in barred and (m in alive or m in sent)]
    if any(m not in sent or m not in alive for m in awaited):
        return None
    claims = {m: WorkClaim(sent[m].tokens, scatter.samples.get(m, 0)) for m in awaited if sent[m].tokens > 0}
    if len(claims) < max(1, rules.min_peers):
        return None
    tokens = believed(claims, rules.merge).tokens
    return weighted(tokens, rules.merge, None).weights


# ---- round -------------------------------------------------------------------------------------------------

NAMES_TOLD = 8  # where members are listed


@dataclass
class Round(Reported):
    """What the coordinator knows of the round in flight.  Volatile: a restart aborts the round."""

    excluded: dict[str, Excluded] = field(default_factory=dict)  # by the decision
    believed: Believed = field(default_factory=lambda: Believed({}, {}, None))  # by the decision
    screening: Screening | None = None  # made once: a later decision of the round keeps its verdicts
    norm: float | None = None
    # Owners that say they lack what most sent, or keep what they merged: they own nothing.
    censors: set[str] = field(default_factory=set)
    last_holders: LastHolders = field(default_factory=LastHolders)
    _spread: Spread = field(default_factory=Spread)
    as_foreseen: bool = False  # it came to that, or to what it would have told
    # Its end waits for the rounds of other stages.  If somebody goes meanwhile, it has all its time again.
    prepared: bool = False
    _uncompared: set[str] = field(default_factory=set)  # owners whose dot products are waited for
    told: set[str] = field(default_factory=set)  # who has to hear of the newest epoch
    ended: dict[int, str] = field(default_factory=dict)  # groups of a mesh that are out as a whole, and why
    _epochs: dict[str, int] = field(default_factory=dict)  # of who heard less than all epochs

    def slept(self, seconds: float) -> None:
        """Nobody could have moved it meanwhile: it has that much longer."""
        self.timed_from += seconds
        self.scatter.slept(seconds)

    def epoch_of(self, member: str) -> int:
        return self._epochs.get(member, self.plan.epoch)

    # ---- what is due -----------------------------------------------------------------------------------

    def next_step(self, now: float, alive: set[str], dialable: set[str]) -> Step:
        if self.decision is None and self.scatter.grace_is_over(now):
            senders = self.scatter.senders(alive)
            alone = self.scatter.lacking_alone(alive, senders)
            for group in map(set, self.groups.members):
                self.censors |= lacks_most({o: alone[o] for o in alone.keys() & group}, senders & group)
        self.censors |= self._who_keeps_results(now, alive)
        moved = self._replace_the_lost(alive, dialable)
        if moved is not None:
            self.scatter.since = now if self.censors else self.scatter.since
            return moved
        if lost_share := self._share_lost(alive):
            return lost_share
        if self.prepared and self.decision is not None:
            self.prepared = isinstance(self._maybe_commit(now, alive, self.decision), Done)
            self.timed_from = now
        if now >= self.ends_at:
            late = f"not finished after {self.rules.round_timeout_s:g} s: {self._lag(alive)}"
            if self.rules.whole and self.decision is None:
                return self._not_whole_in_time(late)
            return Failed(late, AbortCause.TIMED_OUT, self._withheld(alive, dialable))
        if self.decision is None:
            due = self._decide(now, alive)
            return self._foresee(alive) or due if isinstance(due, RoundWaits) else due
        if self.void:
            self.void = False
            kept = [m for m in self.decision.included(self.plan.members) if m not in self.scatter.barred]
            return self.settle(kept, alive, "whoever is left merges everything anew")
        included = self.decision.included(self.plan.members)
        lost = self.scatter.unobtainable(included, alive, self._unmerged)
        if lost:
            why = f"the contributions of {self.names(sorted(lost))} died with their holders"
            return self.settle([m for m in included if m not in lost], alive, why)
        if step := self.sums.step(self, alive, self.decision):
            return step
        return self._maybe_commit(now, alive, self.decision)

    def cut_off(self, alive: set[str]) -> set[str]:
        """Living members that should own nothing: others can't reach them, or get nothing usable from them."""
        said: set[str] = alive & (self.impossible.keys() | self.censors | self.sums.at_odds.keys())
        for reporter, report in self.reports.items():
            if not report.cut_off or reporter not in alive:
                continue  # asked after every report of a thousand members: hardly any says this
            others = alive & self.groups.group_of(reporter) - {reporter}
            about = set(report.cut_off) & alive
            # A member that can reach hardly anybody is itself cut off; among three, either of two may be.
            if 2 * len(about & others) <= len(others) or len(others) < 2:
                said |= about & others | about & self.sums.beside(self.groups, reporter)
        return said

    def _withheld(self, alive: set[str], dialable: set[str]) -> frozenset[str]:
        """Living owners without results at the end of the time, unless there is nobody to own their chunks instead."""
        if self.decision is None:
            owing = self._uncompared & alive or self.scatter.deaf(alive)
        else:
            unmerged = self._unmerged
            if self.sums.held_back:
                unmerged = sum(self.groups.roots.get(root, 0) for root in self.sums.lacking(self.groups))
            owing = {
                peer
                for chunk in bits(unmerged)
                for peer in self.sums.owing(self.groups, chunk, self.decision)
            } & alive
        others = (alive & dialable & set(self.plan.members)) - owing
        return frozenset(owing) if others else frozenset()

    def _replace_the_lost(self, alive: set[str], dialable: set[str]) -> Step | None:
        """Owners that died, or that others can't get through to, are replaced."""
        members, cut_off = self.plan.members, self.cut_off(alive)
        able = alive & dialable & set(members)
        ended = self.ended.keys()
        made = inherited(self.groups, alive, able, cut_off, self._shown(able), ended, self.rules.lines)
        if made is None:
            return None
        if len(made.ended | ended) == len(self.groups.members):
            told = "no living member can be dialled, so nobody can own a chunk"
            return Failed(told, AbortCause.NO_OWNER)
        self._inherit(made)
        plan, lost = self.plan, {members.index(member) for member in made.lost}
        names = self.names(members[index] for index in sorted(lost))
        unfit = frozenset(members[index] for index in lost) & alive
        how = "can't be reached by others" if len(unfit) == len(lost) else "is lost"
        useless = {**self.sums.at_odds, **self.impossible, **self.scatter.accused}
        useless |= {member: barred.text for member, barred in self.scatter.barred.items()}
        why = "; ".join(sorted(useless[member] for member in unfit if member in useless))
        how = f"sent what is of no use ({why})" if why else how
        return OwnersMoved(plan, f"owner {names} {how}; its chunks moved", unfit)

    def _shown(self, able: Set[str]) -> ProvenHoldings:
        return ProvenHoldings(
            self.gather.merged.keys(),
            lambda member, chunk: (
                member in able and chunk in self.gather.merged and bool(self._got(member) >> chunk & 1)
            ),
            lambda member, owner, chunk: bool(self.scatter.held_by(member, owner) >> chunk & 1),
        )

    def _inherit(self, made: Reassignment) -> None:
        if made.anew:
            self.gather.take_back(made.anew)  # nobody alive can show these bytes
        for member in made.lost:
            self.scatter.held.pop(member, None)
        for group in made.ended:
            self.ended[group] = "nobody is left in its group who could own a chunk"
            out = set(self.groups.members[group])
            for member in out:
                self.scatter.barred.setdefault(member, Excluded(ExclusionCause.LOST, self.ended[group]))
            if self.decision is not None and len(self.gather.merged) < self.plan.count:
                # What is decided with a part of it is decided anew, if it is still needed.
                self.void = self.void or not out.isdisjoint(self.decision.included(self.plan.members))
        before = self.plan
        plan = replace(
            before,
            epoch=before.epoch + 1,
            owners=tuple(made.owners),
            roots=tuple(made.roots) if before.roots else UNSET,
            kept=mask_to_bytes(made.kept),
        )
        self.go_by(plan)
        self.told = self.sums.touched(before, self.plan)
        self._epochs |= {member: before.epoch for member in self.plan.members if member not in self._epochs}
        self._epochs |= dict.fromkeys(self.told, self.plan.epoch)

    def _decide(self, now: float, alive: set[str]) -> Step:
        ready = [m for m in self.plan.members if self.scatter.is_whole(m)]
        if self.rules.whole:
            waited = sorted(self.rules.whole - set(ready))
            if waited:
                return RoundWaits(f"scatter: waiting for {self.names(waited)}")
            return self._settle_whole(ready, alive)
        late = self.scatter.late(ready, alive, now)
        if late and not (self.scatter.grace_is_over(now) and len(ready) >= self.scatter.least):
            return RoundWaits(f"scatter: waiting for {self.names(late)}")
        reason = "the grace window is over" if late else "every living member's contribution is in"
        # Without tokens there is no weight, and without a weight nobody counts towards the quorum (P2, P9).
        ready = [m for m in ready if self.scatter.sent[m].tokens > 0] or ready
        if self.rules.merge.robust and len(ready) >= self.scatter.least:
            self._uncompared = set(self.comparing.lacking(ready, self.groups))
            if self._uncompared:
                missing = self.names(sorted(self._uncompared))
                return RoundWaits(f"decide: waiting for the dot products of {missing}")
            merge = self.rules.merge
            among = self.comparing.compared(ready, self.groups)
            work = {m: longer(m, self.scatter.sent[m].tokens, merge) for m in ready}
            self.screening = screened_in_groups(among, merge.clip, merge.trusted, work)
        return self.settle(ready, alive, reason)

    def _foresee(self, alive: set[str]) -> Foreseen | None:
        """Once in a round, before it is decided."""
        if not self.foresees or self.foreseen is not None:
            return None
        weights = weights_foreseen(self.scatter, alive)
        if weights is None:
            return None
        told = tuple(weights.get(member, 0.0) for member in self.plan.members)
        self.foreseen = Decision(self.plan.round_no, 1, told, {}, foreseen=True)
        return Foreseen(self.foreseen)

    def settle(self, ready: list[str], alive: set[str], reason: str) -> Step:
        """`ready`: who has a whole contribution.  A member that is out for its direction counts towards the quorum:
        one liar must not be able to stop a run that needs everybody."""
        if len(ready) < self.scatter.least:
            return self._too_few(len(ready))
        out = self.out()
        sent, samples = self.scatter.sent, self.scatter.samples
        claims = {m: WorkClaim(sent[m].tokens, samples.get(m, 0)) for m in ready if m not in out}
        self.believed = believed(claims, self.rules.merge)
        tokens = self.believed.tokens
        made = weighted(tokens, self.rules.merge, self.screening)
        if made.refusal:
            return Failed(made.refusal, AbortCause.GUARD, dropped=True)
        self.norm = made.norm
        told = self.screening.told if self.screening is not None else ""
        merged = "; ".join(each for each in (told, made.told) if each)
        return self.decide_on(made.weights, tokens, alive, reason, merged)

    def decide_on(
        self, weights: dict[str, float], tokens: Container[str], alive: set[str], reason: str, merged: str
    ) -> RoundCommitted:
        members, before = self.plan.members, self.merged_by
        told = tuple(weights.get(m, 0.0) for m in members)
        if self.decision is None:
            self.as_foreseen = weights == weights_foreseen(self.scatter, alive)
        # What was foreseen has come: it has this number, and what was made by it stands.
        stands = self.decision is None and before is not None and before.weights == told
        number = 1 if before is None else before.decision_no + (not stands)
        self.excluded = {m: self._why_out(m, tokens, alive) for m in members if not weights.get(m)}
        decision = Decision(
            self.plan.round_no,
            number,
            told,
            {member: why.text for member, why in self.excluded.items()},
            **self.sums.marks(self.groups, weights, self.screening is not None),
        )
        self.decision = decision
        self.sums.begin(decision, self.groups)
        if not stands:
            self.gather.take_back([*self.gather.merged])
        return RoundCommitted(decision, reason, merged)

    def out(self) -> dict[str, str]:
        """Who is out for a direction, its own or its group's."""
        own = self.screening.out if self.screening is not None else {}
        return own | {m: why for group, why in self.sums.captured.items() for m in self.groups.members[group]}

    def suspects(self, far_too_long: float) -> tuple[str, ...]:
        """Of whom the judgement is that of an honest majority: in a captured group it is not known who was right."""
        found = self.screening.suspects(far_too_long) if self.screening is not None else ()
        return tuple(member for member in found if self.groups.of[member] not in self.sums.captured)

    # ---- a round in which nobody may be left out ---------------------------------------------------------

    def _share_lost(self, alive: set[str]) -> Failed | None:
        """Somebody is lost before its contribution is safe, or sent what is of no use: its share of the batch is
        computed again, and all others keep theirs.  Who is lost after that costs nothing."""
        scatter, barred, whole = self.scatter, self.scatter.barred, self.rules.whole
        if not whole:
            return None
        if self.decision is None:
            lost = {m for m in whole if m in barred or (m not in alive and not scatter.is_whole(m))}
        else:
            lost = scatter.unobtainable(self.decision.included(self.plan.members), alive, self._unmerged)
        if not lost:
            return None
        why = "; ".join(
            f"{self.name(m)}: {barred[m].text}" if m in barred else f"{self.name(m)} is lost"
            for m in sorted(lost)
        )
        told = f"a share of the batch is lost before it was safe, and computed again ({why})"[:1500]
        return Failed(told, AbortCause.SHARE_LOST, lost=frozenset(lost))

    def _not_whole_in_time(self, late: str) -> Failed:
        """A few did not get their contribution across: their share is for others.  If it is most of them, those are to
        blame who should have taken it in."""
        waited = {m for m in self.rules.whole if not self.scatter.is_whole(m)}
        lacking = {
            owner: sum(bool(share & ~self.scatter.held_by(owner, m)) for m in self.rules.whole)
            for owner, share in self.groups.shares.items()
        }
        deaf = frozenset(owner for owner, count in lacking.items() if 2 * count > len(self.rules.whole))
        if deaf and deaf < frozenset(self.plan.members):
            return Failed(late, AbortCause.TIMED_OUT, deaf)
        return Failed(late, AbortCause.TIMED_OUT, lost=frozenset(waited))

    def _settle_whole(self, ready: list[str], alive: set[str]) -> Step:
        """The mean over all tokens of the batch, whoever counted them."""
        tokens = {m: self.scatter.sent[m].tokens for m in ready if m in self.rules.whole}
        tokens = {m: count for m, count in tokens.items() if count} or tokens
        self.believed = Believed(tokens, {}, None)
        weights = dict(zip(tokens, token_weights(list(tokens.values()), math.inf), strict=True))
        return self.decide_on(weights, tokens, alive, "every share of the batch is in", "")

    def _too_few(self, count: int) -> Failed:
        barred = sorted((m, why) for m, why in self.scatter.barred.items() if m not in self.rules.helpers)
        back = any(why.cause is ExclusionCause.RESTARTED for _, why in barred)
        whose = "".join(f"; {self.name(member)} is out: {why.text}" for member, why in barred)
        told = f"{count} whole contributions, at least {self.scatter.least} are needed{whose}"[:1500]
        return Failed(told, AbortCause.MEMBER_RESTARTED if back else AbortCause.TOO_FEW)

    def _maybe_commit(self, now: float, alive: set[str], decision: Decision) -> Step:
        chunks = self.plan.count
        missing = chunks - len(self.gather.merged)
        if missing:
            self.last_holders.begin()
            return RoundWaits(f"gather: {missing} of {chunks} chunks not merged yet")
        holders = self._holders(alive)
        thin = len(holders.thin())
        if not holders.got or (thin and not self._may_go_without(now, holders)):
            return RoundWaits(f"gather: {thin} of {chunks} results not yet held by {holders.needed()} peers")
        hashes = b"".join(self.gather.merged[chunk] for chunk in range(chunks))
        return Done(
            Commit(
                self.plan.version + 1,
                self.plan.round_no,
                self.plan.members,
                decision.weights,
                hashes,
                self.rules.gather_codec,
                self.plan.fragment,
            ),
            self.norm,
            holders.late if thin else frozenset(),
            tuple(self.gather.lengths[chunk] for chunk in range(chunks)) if self.rules.measures else (),
        )

    def _may_go_without(self, now: float, holders: Holders) -> bool:
        """Most of the run hold all results, and whoever lacks some was waited for."""
        if holders.thin(waited=True):
            self.last_holders.begin()
            return False
        return self.last_holders.may_go_without(holders.late, now, self.rules.chunk_patience_s)

    def _holders(self, alive: set[str]) -> Holders:
        """Whose results count towards a commit."""
        out = {m for group in self.ended for m in self.groups.members[group]}
        here = [m for m in self.plan.members if m in alive and m not in self.rules.helpers and m not in out]
        return Holders({m: self._got(m) for m in here}, self.groups.every_chunk, self.rules)

    def _who_keeps_results(self, now: float, alive: set[str]) -> set[str]:
        """Living owners that do not give away what they merged: others merge it again."""
        if self.decision is None:
            return set()
        if not self.gather.merged:
            return self._spread.stuck((), {}, now, self.rules.chunk_patience_s)
        got = {member: self._got(member) for member in self.plan.members}
        # What most of the run hold is not kept from anybody: who lacks it is late, and no owner is to blame for that.
        thin = [chunk for chunk in self._holders(alive).thin(waited=True) if chunk in self.gather.merged]
        owing = {peer for chunk in thin for peer in self.sums.keeping(self.groups, chunk, got)} & alive
        shares, group_of = self.groups.shares, self.groups.group_of
        # How many results of each owner its group holds, all in all.
        held = {o: sum((got[m] & shares.get(o, 0)).bit_count() for m in group_of(o)) for o in owing}
        return self._spread.stuck(owing, held, now, self.rules.chunk_patience_s)

    # ---- questions -------------------------------------------------------------------------------------

    def _why_out(self, member: str, counted: Container[str], alive: set[str]) -> Excluded:
        if (group := self.groups.of[member]) in self.sums.captured:
            told = f"its group is out as a whole: {self.sums.captured[group]}"
            return Excluded(ExclusionCause.CAPTURED, told)
        if self.screening is not None and member in self.screening.out:
            return Excluded(ExclusionCause.DIRECTION, self.screening.out[member])
        if self.screening is not None and member in counted:
            return Excluded(ExclusionCause.SHORTENED, self.screening.clipped[member])
        if member in self.scatter.barred:
            return self.scatter.barred[member]
        if self.scatter.is_whole(member):
            return Excluded(ExclusionCause.NO_TOKENS, "it counts no tokens")
        if member not in alive:
            return Excluded(ExclusionCause.LOST, "it was lost before its contribution was safe")
        if member in self.scatter.sent:
            said = f"; {self.scatter.accused[member]}" if member in self.scatter.accused else ""
            return Excluded(ExclusionCause.NOT_WHOLE, f"its contribution was not whole in time{said}")
        return Excluded(ExclusionCause.NO_LIST, "it sent no hash list in time")

    def names(self, members: Iterable[str]) -> str:
        """The first ones: of a thousand no message has room for all."""
        names = [*map(self.name, members)]
        others = f" and {len(names) - NAMES_TOLD} others" if len(names) > NAMES_TOLD else ""
        return ", ".join(names[:NAMES_TOLD]) + others

    def _lag(self, alive: set[str]) -> str:
        dead = [m for m in self.plan.members if m not in alive]
        late = [m for m in self.plan.members if m in alive and not self.scatter.is_whole(m)]
        mute = f"; no dot products from {self.names(sorted(self._uncompared))}" if self._uncompared else ""
        return f"late: {self.names(late) or 'nobody'}; lost: {self.names(dead) or 'nobody'}{mute}"


# ---- patience ----------------------------------------------------------------------------------------------
# When a round is looked at as a whole: a small one after each word, a large one when that can be of use.
# Pure.
#
# Used by the driver. A look at a round costs as much as it has members, and each member says some dozens of
# words in it: looked at after each, a round would cost the square of its members. Nearly every word changes
# nothing: a phase ends when the last one that it waits for has spoken, and who that is can be seen in
# passing. So a large round is looked at when nobody is left whom its phase waits for, when somebody was lost,
# and else with a pause that grows with it, in which deadlines, stragglers and whoever is of no use are found.
# Must not know what a look finds.

SMALL = 32  # a round of so many is looked at after each word
PAUSE_S_PER_MEMBER, PAUSE_MOST_S = 0.004, 1.0  # of one in flight
# While none is: its members get ready, or show a new version.  And in phases that are short: when all is here and it
# waits for something else, when sums are compared, and at the end, which comes before all have all.
BRIEF_S_PER_MEMBER = 0.001


class Flight(Protocol):
    @property
    def plan(self) -> Plan: ...

    @property
    def phase(self) -> object: ...

    @property
    def is_brief(self) -> bool: ...

    def awaits(self, member: str) -> bool: ...


class Patience:
    def __init__(self) -> None:
        self._looked_at = -math.inf
        self._losses = 0  # members that the run had lost then
        self._phase: object = None
        self._left: list[str] = []  # of its members, without some that the phase does not wait for any more

    def is_due(
        self, flight: Flight | None, members: int, losses: int, is_here: Callable[[str], bool], now: float
    ) -> bool:
        """`members`: of the round in flight, or that could be in one; `losses`: how many the run has lost so far;
        `is_here`: the round counts on that member."""
        is_over = flight is not None and self._is_over(flight, is_here)
        brief = flight is None or flight.is_brief or not self._left
        each_s = BRIEF_S_PER_MEMBER if brief else PAUSE_S_PER_MEMBER
        pause_s = min(PAUSE_MOST_S, members * each_s) if members > SMALL else 0.0
        if is_over or now - self._looked_at >= pause_s or losses != self._losses:
            self._looked_at, self._losses = now, losses
            return True
        return False

    def _is_over(self, flight: Flight, is_here: Callable[[str], bool]) -> bool:
        """True once for each phase: then it waits for something else."""
        if flight.phase != self._phase:
            self._phase, self._left = flight.phase, list(flight.plan.members)
        elif not self._left:
            return False
        while self._left and not (is_here(self._left[-1]) and flight.awaits(self._left[-1])):
            self._left.pop()
        return not self._left


# Whose process stays for as long as it owes something, and who is not counted on for a while.  Pure.
#
# A member owes the others its part in a round that is in flight, and for two commits the bytes that it contributed:
# nobody can audit a sum without them.  Whoever comes back as another process has neither.  Machines crash, and that is
# nobody's fault; but an accomplice could restart after every round, so that what its owner sums is never looked at, or
# in the middle of each, so that chunks move again and again.  So the first restarts cost nothing, and with each further
# one of the last so many commits a member stays out of twice as many rounds, and nobody waits for it.  Where too few
# others are there, it takes part all the same.
#
# Owned by the driver of a fragment.  Not durable: a coordinator that restarts forgives.

FORGIVEN = 2  # restarts that owed something, among so many commits
WINDOW = 64


class Steadiness:
    def __init__(self) -> None:
        self._commits = 0
        self._owes: dict[str, tuple[bytes, int]] = {}  # member -> the process that contributed last, and when
        self._broken: dict[str, deque[int]] = {}  # member -> when it came back without what it owed
        self._gone: dict[str, bytes] = {}  # member -> its process that is known to be gone

    def on_commit(self, processes: Mapping[str, bytes]) -> None:
        """`processes`: of the members whose contributions are in it."""
        self._commits += 1
        self._owes = {peer: owed for peer, owed in self._owes.items() if self._is_kept(owed[1])}
        self._owes |= {peer: (process, self._commits) for peer, process in processes.items()}
        for peer, when in list(self._broken.items()):
            while when and self._commits - when[0] >= WINDOW:
                when.popleft()
            if not when:
                del self._broken[peer], self._gone[peer]

    def comes(self, peer: str, process: bytes, was_in_round: bytes) -> None:
        """A session begins.  `was_in_round`: its process that the round in flight counts on; empty: none."""
        before, at = self._owes.get(peer, (process, 0))
        owed = {before} if self._is_kept(at) else set()
        gone = (owed | {was_in_round}) - {b"", process, self._gone.get(peer)}
        if gone:  # of both it is the same process that is gone
            self.breaks(peer, gone.pop())

    def breaks(self, peer: str, process: bytes) -> None:
        """Of this process nothing that was owed is here any more: it is gone, or has lost its state in a round."""
        self._gone[peer] = process
        self._broken.setdefault(peer, deque(maxlen=WINDOW)).append(self._commits)

    def rounds_out(self, peer: str) -> int:
        """So many more commits are made without it, if there are others to make them."""
        when = self._broken.get(peer)
        if not when or len(when) <= FORGIVEN:
            return 0
        stays = min(WINDOW, 1 << (len(when) - FORGIVEN))
        return max(0, when[-1] + stays - self._commits)

    def counted_on(self, peers: Iterable[str]) -> set[str]:
        return {peer for peer in peers if not self.rounds_out(peer)}

    def _is_kept(self, at: int) -> bool:
        return self._commits - at < ROUNDS_KEPT
