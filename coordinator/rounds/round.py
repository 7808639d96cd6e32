"""One round at the coordinator: when each phase ends, who is in, and why.  Pure.

`Round` collects what members report; `next_step` says which transition is due now, with its reason, and the
run machine writes it down and announces it.  Must not know sockets, journals or membership beyond the set of
peers alive and dialable at the moment.  Chunks are counted within the round's fragment here.

Order matters: the dead are replaced first, then the decision is made or remade, then the commit is considered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.rounds.owners import (
    LastHolders,
    ProvenHoldings,
    Reassignment,
    Spread,
    deaf,
    holders_needed,
    inherited,
    lacking_alone,
    lacks_most,
)
from farflung.coordinator.rounds.reported import Reported
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
from farflung.protocol.digests import bits, in_fewer, mask_of, mask_to_bytes
from farflung.protocol.errors import AbortCause, Excluded, ExclusionCause
from farflung.protocol.limits import ROUNDS_KEPT
from farflung.protocol.messages import Sent
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


def weights_foreseen(
    members: Sequence[str],
    alive: Set[str],
    sent: Mapping[str, Sent],
    samples: Mapping[str, int],
    barred: Collection[str],
    rules: RoundRules,
) -> dict[str, float] | None:
    """The weights, if nobody is shortened and nobody who has said what it sends is left out.  None: not yet, or nobody
    can know: somebody has not said it, or went after it had."""
    awaited = [m for m in members if m not in barred and (m in alive or m in sent)]
    if any(m not in sent or m not in alive for m in awaited):
        return None
    claims = {m: WorkClaim(sent[m].tokens, samples.get(m, 0)) for m in awaited if sent[m].tokens > 0}
    if len(claims) < max(1, rules.min_peers):
        return None
    tokens = believed(claims, rules.merge).tokens
    return weighted(tokens, rules.weight_cap, rules.merge, None).weights


# ---- round -------------------------------------------------------------------------------------------------

NAMES_TOLD = 8  # where members are listed
# How long it is waited for who sent its work ahead, when all others' is here; a share of the scatter so far: for words
# that pass no slow line but their own.
NAMED_IN_S, NAMED_SHARE = 0.5, 0.2
HELPS = Excluded(ExclusionCause.EMPTY, "it helps, and contributes nothing")


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
    _scatter_since: float | None = None  # when owners changed last: who sends has as long again
    as_foreseen: bool = False  # it came to that, or to what it would have told
    # Its end waits for the rounds of other stages.  If somebody goes meanwhile, it has all its time again.
    prepared: bool = False
    _prepared_at: float = -math.inf
    _uncompared: set[str] = field(default_factory=set)  # owners whose dot products are waited for
    _named_by: float | None = None  # until then whoever sent its work ahead may say so
    told: set[str] = field(default_factory=set)  # who has to hear of the newest epoch
    ended: dict[int, str] = field(default_factory=dict)  # groups of a mesh that are out as a whole, and why
    _epochs: dict[str, int] = field(default_factory=dict)  # of who heard less than all epochs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.barred |= dict.fromkeys(self.rules.helpers, HELPS)

    # ---- what each member hears of it ----------------------------------------------------------------

    def epoch_of(self, member: str) -> int:
        return self._epochs.get(member, self.plan.epoch)

    def plan_for(self, member: str) -> Plan:
        return self.sums.plan_for(self.groups, member, self.epoch_of(member))

    def decision_for(self, member: str, decision: Decision) -> Decision:
        return self.sums.decision_for(self.groups, decision, member)

    # ---- what is due -----------------------------------------------------------------------------------

    def next_step(self, now: float, alive: set[str], dialable: set[str]) -> Step:
        if self.decision is None and self._grace_is_over(now):
            senders = self.senders(alive)
            alone = self.lacking_alone(alive, senders)
            for group in map(set, self.groups.members):
                self.censors |= lacks_most({o: alone[o] for o in alone.keys() & group}, senders & group)
        self.censors |= self._who_keeps_results(now, alive)
        moved = self._replace_the_lost(alive, dialable)
        if moved is not None:
            self._scatter_since = now if self.censors else self._scatter_since
            return moved
        if lost_share := self._share_lost(alive):
            return lost_share
        if self.prepared and self.decision is not None:
            self.prepared = isinstance(self._maybe_commit(now, alive, self.decision), Done)
            self._prepared_at = now
        if now - max(self.opened_at, self._prepared_at) >= self.rules.round_timeout_s:
            late = f"not finished after {self.rules.round_timeout_s:g} s: {self._lag(alive)}"
            if self.rules.whole and self.decision is None:
                return self._not_whole_in_time(late)
            return Failed(late, AbortCause.TIMED_OUT, self._withheld(alive, dialable))
        if self.decision is None:
            due = self._decide(now, alive)
            return self._foresee(alive) or due if isinstance(due, RoundWaits) else due
        if self.void:
            self.void = False
            kept = [m for m in self.decision.included(self.plan.members) if m not in self.barred]
            return self.settle(kept, alive, "whoever is left merges everything anew")
        lost = self._unobtainable(alive, self.decision)
        if lost:
            return self.settle(
                [m for m in self.decision.included(self.plan.members) if m not in lost],
                alive,
                f"the contributions of {self.names(sorted(lost))} died with their holders",
            )
        if step := self.sums.step(self, alive, self.decision):
            return step
        return self._maybe_commit(now, alive, self.decision)

    def cut_off(self, alive: set[str]) -> set[str]:
        """Living members that should own nothing: others can't reach them, or get nothing usable from them."""
        said: set[str] = alive & (self.impossible.keys() | self.censors | self.sums.at_odds.keys())
        for reporter, report in self.reports.items():
            if not report.cut_off or reporter not in alive:
                continue  # asked after every report of a thousand members: hardly any says this
            others = alive & self._group_of(reporter) - {reporter}
            about = set(report.cut_off) & alive
            # A member that can reach hardly anybody is itself cut off; among three, either of two may be.
            if 2 * len(about & others) <= len(others) or len(others) < 2:
                said |= about & others | about & self.sums.beside(self.groups, reporter)
        return said

    def _grace_is_over(self, now: float) -> bool:
        since = self.opened_at if self._scatter_since is None else self._scatter_since
        return now - since >= self.rules.scatter_grace_s

    def lacking_alone(self, alive: set[str], senders: set[str]) -> dict[str, set[str]]:
        """Owner -> those of the senders whose contribution it alone says it lacks."""
        return {o: its for each in self._lacks(alive, senders) for o, its in lacking_alone(*each).items()}

    def deaf(self, alive: set[str]) -> set[str]:
        """Living owners that say they lack what most others sent."""
        return {owner for each in self._lacks(alive, self.senders(alive)) for owner in deaf(*each)}

    def _lacks(
        self, alive: set[str], all_senders: set[str]
    ) -> Iterator[tuple[dict[str, set[str]], set[str]]]:
        """Of each group: living owner -> senders whose contribution it says it does not have whole; and all senders."""
        for owners, group in zip(self.groups.shares_in, self.groups.members, strict=True):
            senders = all_senders & set(group)
            yield (
                {
                    owner: {m for m in senders - {owner} if share & ~self._held(owner, m)}
                    for owner, share in owners.items()
                    if owner in alive
                },
                senders,
            )

    def senders(self, alive: set[str], awaited: bool = True) -> set[str]:
        """Of those that nobody waits for something may be missing everywhere."""
        found = {m for m in self.sent.keys() & alive if m not in self.barred}
        return found - self.rules.unawaited if awaited else found

    def _withheld(self, alive: set[str], dialable: set[str]) -> frozenset[str]:
        """Living owners without results at the end of the time, unless there is nobody to own their chunks instead."""
        if self.decision is None:
            owing = self._uncompared & alive or self.deaf(alive)
        else:
            unmerged = self._every_chunk & ~mask_of(self.merged)
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
        useless = {**self.sums.at_odds, **self.impossible, **self.accused}
        useless |= {member: barred.text for member, barred in self.barred.items()}
        why = "; ".join(sorted(useless[member] for member in unfit if member in useless))
        how = f"sent what is of no use ({why})" if why else how
        return OwnersMoved(plan, f"owner {names} {how}; its chunks moved", unfit)

    def _shown(self, able: Set[str]) -> ProvenHoldings:
        return ProvenHoldings(
            self.merged.keys(),
            lambda member, chunk: (
                member in able and chunk in self.merged and bool(self._got(member) >> chunk & 1)
            ),
            lambda member, owner, chunk: bool(self._held(member, owner) >> chunk & 1),
        )

    def _inherit(self, made: Reassignment) -> None:
        if made.anew:
            self._take_back(made.anew)  # nobody alive can show these bytes
        for member in made.lost:
            self.held.pop(member, None)
        for group in made.ended:
            self.ended[group] = "nobody is left in its group who could own a chunk"
            self._end_group(group, Excluded(ExclusionCause.LOST, self.ended[group]))
        before = self.plan
        self.plan = replace(
            before,
            epoch=before.epoch + 1,
            owners=tuple(made.owners),
            roots=tuple(made.roots) if before.roots else UNSET,
            kept=mask_to_bytes(made.kept),
        )
        self.told = self.sums.touched(before, self.plan)
        self._epochs |= {member: before.epoch for member in self.plan.members if member not in self._epochs}
        self._epochs |= dict.fromkeys(self.told, self.plan.epoch)

    def _end_group(self, group: int, why: Excluded) -> None:
        """A group is out as a whole; what is decided with a part of it is decided anew, if it is still needed."""
        out = set(self.groups.members[group])
        for member in out:
            self.barred.setdefault(member, why)
        if self.decision is not None and len(self.merged) < self.plan.count:
            self.void = self.void or not out.isdisjoint(self.decision.included(self.plan.members))

    def _decide(self, now: float, alive: set[str]) -> Step:
        ready = [m for m in self.plan.members if self._complete(m)]
        if self.rules.whole:
            waited = sorted(self.rules.whole - set(ready))
            if waited:
                return RoundWaits(f"scatter: waiting for {self.names(waited)}")
            return self._settle_whole(ready, alive)
        late = [m for m in self.plan.members if m in alive and m not in ready and m not in self.barred]
        if late and self.rules.unawaited.issuperset(late) and len(ready) >= self._least:
            # What they sent ahead is only to be named: nobody waits for more than that.
            self._named_by = (
                now + max(NAMED_IN_S, NAMED_SHARE * (now - self.opened_at))
                if self._named_by is None
                else self._named_by
            )
            late = late if now < self._named_by else []
        grace_over = self._grace_is_over(now)
        if late and not (grace_over and len(ready) >= self._least):
            return RoundWaits(f"scatter: waiting for {self.names(late)}")
        reason = "the grace window is over" if late else "every living member's contribution is in"
        # Without tokens there is no weight, and without a weight nobody counts towards the quorum (P2, P9).
        ready = [m for m in ready if self.sent[m].tokens > 0] or ready
        if self.rules.merge.robust and len(ready) >= self._least:
            self._uncompared = set(self.comparing.lacking(ready, self.groups))
            if self._uncompared:
                missing = self.names(sorted(self._uncompared))
                return RoundWaits(f"decide: waiting for the dot products of {missing}")
            merge = self.rules.merge
            among = self.comparing.compared(ready, self.groups)
            work = {m: longer(m, self.sent[m].tokens, merge) for m in ready}
            self.screening = screened_in_groups(among, merge.clip, merge.trusted, work)
        return self.settle(ready, alive, reason)

    @property
    def _least(self) -> int:
        """Contributions that it takes.  Members that took part and say that they have nothing are here, as the run's
        host wants it: others must not wait until they have.  Saying so gains nobody anything: it weighs nothing."""
        without = sum(not said.hashes and peer not in self.rules.helpers for peer, said in self.sent.items())
        return max(1, self.rules.min_peers - without)

    def _foresee(self, alive: set[str]) -> Foreseen | None:
        """Once in a round, before it is decided."""
        if not self.foresees or self.foreseen is not None:
            return None
        weights = self._weights_foreseen(alive)
        if weights is None:
            return None
        told = tuple(weights.get(member, 0.0) for member in self.plan.members)
        self.foreseen = Decision(self.plan.round_no, 1, told, {}, foreseen=True)
        return Foreseen(self.foreseen)

    def _weights_foreseen(self, alive: set[str]) -> dict[str, float] | None:
        members, rules = self.plan.members, self.rules
        return weights_foreseen(members, alive, self.sent, self.samples, self.barred, rules)

    def settle(self, ready: list[str], alive: set[str], reason: str) -> Step:
        """`ready`: who has a whole contribution.  A member that is out for its direction counts towards the quorum:
        one liar must not be able to stop a run that needs everybody."""
        if len(ready) < self._least:
            return self._too_few(len(ready))
        out = self.out()
        claims = {m: WorkClaim(self.sent[m].tokens, self.samples.get(m, 0)) for m in ready if m not in out}
        self.believed = believed(claims, self.rules.merge)
        tokens = self.believed.tokens
        made = weighted(tokens, self.rules.weight_cap, self.rules.merge, self.screening)
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
            self.as_foreseen = weights == self._weights_foreseen(alive)
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
            self._take_back([*self.merged])
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
        if not self.rules.whole:
            return None
        if self.decision is None:
            lost = {
                m for m in self.rules.whole if m in self.barred or (m not in alive and not self._complete(m))
            }
        else:
            lost = self._unobtainable(alive, self.decision)
        if not lost:
            return None
        why = "; ".join(
            f"{self.name(m)}: {self.barred[m].text}" if m in self.barred else f"{self.name(m)} is lost"
            for m in sorted(lost)
        )
        told = f"a share of the batch is lost before it was safe, and computed again ({why})"[:1500]
        return Failed(told, AbortCause.SHARE_LOST, lost=frozenset(lost))

    def _not_whole_in_time(self, late: str) -> Failed:
        """A few did not get their contribution across: their share is for others.  If it is most of them, those are to
        blame who should have taken it in."""
        waited = {m for m in self.rules.whole if not self._complete(m)}
        lacking = {
            owner: sum(bool(share & ~self._held(owner, m)) for m in self.rules.whole)
            for owner, share in self._shares.items()
        }
        deaf = frozenset(owner for owner, count in lacking.items() if 2 * count > len(self.rules.whole))
        if deaf and deaf < frozenset(self.plan.members):
            return Failed(late, AbortCause.TIMED_OUT, deaf)
        return Failed(late, AbortCause.TIMED_OUT, lost=frozenset(waited))

    def _settle_whole(self, ready: list[str], alive: set[str]) -> Step:
        """The mean over all tokens of the batch, whoever counted them."""
        tokens = {m: self.sent[m].tokens for m in ready if m in self.rules.whole}
        tokens = {m: count for m, count in tokens.items() if count} or tokens
        self.believed = Believed(tokens, {}, None)
        weights = dict(zip(tokens, token_weights(list(tokens.values()), math.inf), strict=True))
        return self.decide_on(weights, tokens, alive, "every share of the batch is in", "")

    def _too_few(self, count: int) -> Failed:
        barred = sorted((m, why) for m, why in self.barred.items() if m not in self.rules.helpers)
        back = any(why.cause is ExclusionCause.RESTARTED for _, why in barred)
        whose = "".join(f"; {self.name(member)} is out: {why.text}" for member, why in barred)
        told = f"{count} whole contributions, at least {self._least} are needed{whose}"[:1500]
        return Failed(told, AbortCause.MEMBER_RESTARTED if back else AbortCause.TOO_FEW)

    def _unobtainable(self, alive: set[str], decision: Decision) -> set[str]:
        """Included members that can't send any more and whose bytes for a chunk still to be merged nobody holds."""
        unmerged = self._every_chunk & ~mask_of(self.merged)
        return {
            member
            for member in decision.included(self.plan.members)
            if (member not in alive or member in self.barred)
            and any(
                share & unmerged & ~self._held(owner, member)
                for owner, share in self.groups.shares_around(member).items()
            )
        }

    def _maybe_commit(self, now: float, alive: set[str], decision: Decision) -> Step:
        chunks = self.plan.count
        missing = chunks - len(self.merged)
        if missing:
            self.last_holders.begin()
            return RoundWaits(f"gather: {missing} of {chunks} chunks not merged yet")
        here = self._here(alive)
        thin = len(self._thin(alive))
        if not here or (thin and not self._may_go_without(now, alive)):
            needed = self._holders_needed(here)
            return RoundWaits(f"gather: {thin} of {chunks} results not yet held by {needed} peers")
        hashes = b"".join(self.merged[chunk] for chunk in range(chunks))
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
            self._late(alive) if thin else frozenset(),
            tuple(self.lengths[chunk] for chunk in range(chunks)) if self.rules.measures else (),
        )

    def _may_go_without(self, now: float, alive: set[str]) -> bool:
        """Most of the run hold all results, and whoever lacks some was waited for."""
        if self._thin(alive, waited=True):
            self.last_holders.begin()
            return False
        return self.last_holders.may_go_without(self._late(alive), now, self.rules.chunk_patience_s)

    def _here(self, alive: set[str]) -> list[str]:
        """Whose results count towards a commit."""
        out = {m for group in self.ended for m in self.groups.members[group]}
        return [m for m in self.plan.members if m in alive and m not in self.rules.helpers and m not in out]

    def _late(self, alive: set[str]) -> frozenset[str]:
        return frozenset(m for m in self._here(alive) if self._every_chunk & ~self._got(m))

    def _holders_needed(self, here: Sequence[str], waited: bool = False) -> int:
        least, most = self.rules.min_peers, self.rules.most_of_run
        return holders_needed(len(here), least if most is None or not waited else min(least, most))

    def _thin(self, alive: set[str], waited: bool = False) -> list[int]:
        """Chunks whose results too few living members hold.  `waited`: for those that a round needs besides most."""
        here = self._here(alive)
        needed = self._holders_needed(here, waited)
        return list(bits(in_fewer(map(self._got, here), needed, self._every_chunk)))

    def _who_keeps_results(self, now: float, alive: set[str]) -> set[str]:
        """Living owners that do not give away what they merged: others merge it again."""
        if self.decision is None:
            return set()
        if not self.merged:
            return self._spread.stuck((), {}, now, self.rules.chunk_patience_s)
        got = {member: self._got(member) for member in self.plan.members}
        # What most of the run hold is not kept from anybody: who lacks it is late, and no owner is to blame for that.
        thin = [chunk for chunk in self._thin(alive, waited=True) if chunk in self.merged]
        owing = {peer for chunk in thin for peer in self.sums.keeping(self.groups, chunk, got)} & alive
        held = {owner: self._held_of(owner, got) for owner in owing}
        return self._spread.stuck(owing, held, now, self.rules.chunk_patience_s)

    def _held_of(self, owner: str, got: Mapping[str, int]) -> int:
        """How many results of this owner its group holds, all in all."""
        share = self._shares.get(owner, 0)
        return sum((got[member] & share).bit_count() for member in self._group_of(owner))

    # ---- questions -------------------------------------------------------------------------------------

    def _why_out(self, member: str, counted: Container[str], alive: set[str]) -> Excluded:
        if (group := self.groups.of[member]) in self.sums.captured:
            told = f"its group is out as a whole: {self.sums.captured[group]}"
            return Excluded(ExclusionCause.CAPTURED, told)
        if self.screening is not None and member in self.screening.out:
            return Excluded(ExclusionCause.DIRECTION, self.screening.out[member])
        if self.screening is not None and member in counted:
            return Excluded(ExclusionCause.SHORTENED, self.screening.clipped[member])
        if member in self.barred:
            return self.barred[member]
        if self._complete(member):
            return Excluded(ExclusionCause.NO_TOKENS, "it counts no tokens")
        if member not in alive:
            return Excluded(ExclusionCause.LOST, "it was lost before its contribution was safe")
        if member in self.sent:
            said = f"; {self.accused[member]}" if member in self.accused else ""
            return Excluded(ExclusionCause.NOT_WHOLE, f"its contribution was not whole in time{said}")
        return Excluded(ExclusionCause.NO_LIST, "it sent no hash list in time")

    def names(self, members: Iterable[str]) -> str:
        """The first ones: of a thousand no message has room for all."""
        names = [*map(self.name, members)]
        others = f" and {len(names) - NAMES_TOLD} others" if len(names) > NAMES_TOLD else ""
        return ", ".join(names[:NAMES_TOLD]) + others

    def _lag(self, alive: set[str]) -> str:
        dead = [m for m in self.plan.members if m not in alive]
        late = [m for m in self.plan.members if m in alive and not self._complete(m)]
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
