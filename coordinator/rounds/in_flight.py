"""One round at the coordinator: when each phase ends, who is in, and why.  Pure.

`InFlight` collects what members report; `next_step` says which transition is due now, with its reason, and the
run machine writes it down and announces it.  Must not know sockets, journals or membership beyond the set of
peers alive and dialable at the moment.  Chunks are counted within the round's fragment here.

Order matters: the dead are replaced first, then the decision is made or remade, then the commit is considered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from farflung.coordinator.rounds import ahead, shares
from farflung.coordinator.rounds.audits_first import AuditsFirst
from farflung.coordinator.rounds.comparing import Comparing
from farflung.coordinator.rounds.opening import RoundRules
from farflung.coordinator.rounds.screening import Screening, screened
from farflung.coordinator.rounds.steps import Done, Failed, Moved, Settled, Step, Waiting
from farflung.coordinator.rounds.weighting import (
    Believed,
    Claim,
    believed,
    token_weights,
    weighted,
)
from farflung.coordinator.rounds.withholding import (
    LastHolders,
    Spread,
    are_most,
    holders_needed,
    lacking_alone,
    lacks_most,
)
from farflung.protocol.causes import AbortCause, Excluded, ExclusionCause
from farflung.protocol.digests import (
    bits,
    combined,
    full_mask,
    hash_at,
    length_to_bytes,
    mask_from_bytes,
    mask_of,
    mask_to_bytes,
    split_hashes,
    split_lengths,
)
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.verdicts import Verdict

UNUSABLE = {
    Verdict.BAD_HASH: "frames whose bytes do not match their hash",
    Verdict.OVERSIZE: "frames that are longer than any of this run",
    Verdict.UNAUTHORISED: "frames of another run",
    Verdict.MALFORMED: "frames that are cut short or no frames at all, bytes in another codec, or values not finite",
}

HELPS = Excluded(ExclusionCause.EMPTY, "it helps, and contributes nothing")


@dataclass(frozen=True)
class Made:
    """The first word for a chunk's result.  An heir that holds the bytes passes them on, and this stays."""

    peer: str
    report: ProgressReport


@dataclass
class InFlight:
    """What the coordinator knows of the round in flight.  Volatile: a restart aborts the round."""

    plan: Plan
    rules: RoundRules
    opened_at: float
    name: Callable[[str], str] = str  # of a peer: what is told of it is for people
    decision: Decision | None = None
    excluded: dict[str, Excluded] = field(default_factory=dict)  # by the decision
    sent: dict[str, Sent] = field(default_factory=dict)
    # Member -> leased samples that its work has learned from.
    samples: dict[str, int] = field(default_factory=dict)
    believed: Believed = field(default_factory=lambda: Believed({}, {}, None))  # by the decision
    barred: dict[str, Excluded] = field(default_factory=dict)  # member -> why its contribution can't count
    accused: dict[str, str] = field(default_factory=dict)  # member -> what somebody says is of no use
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # owner -> member -> proven mask
    merged: dict[int, bytes] = field(default_factory=dict)  # chunk -> result hash
    # Chunk -> how long its result is, where the gradient of a batch is clipped: as its maker says, and as all prove it.
    lengths: dict[int, float] = field(default_factory=dict)
    makers: dict[int, Made] = field(default_factory=dict)  # chunk -> who merged it, and its signed word
    reports: dict[str, ProgressReport] = field(default_factory=dict)
    comparing: Comparing = field(init=False)
    screening: Screening | None = None  # made once: a later decision of the round keeps its verdicts
    norm: float | None = None
    # Owners that say they lack what most sent, or keep what they merged: they own nothing.
    censors: set[str] = field(default_factory=set)
    last_holders: LastHolders = field(default_factory=LastHolders)
    _spread: Spread = field(default_factory=Spread)
    # Member -> owners that hold other bytes of it than it says it sent.
    _contradicted: dict[str, set[str]] = field(default_factory=dict)
    _scatter_since: float | None = None  # when owners changed last: who sends has as long again
    audits: AuditsFirst | None = None  # where nothing is committed that was not merged again
    void: bool = False  # who is out has a part in what is decided: it is decided anew
    # Its end waits for the rounds of other stages.  If somebody goes meanwhile, it has all its time again.
    prepared: bool = False
    _prepared_at: float = -math.inf
    _uncompared: set[str] = field(default_factory=set)  # owners whose dot products are waited for
    _named_by: float | None = None  # until then whoever sent its work ahead may say so
    _shares_of: Plan | None = None
    _share_masks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comparing = Comparing(self.plan.members)
        self.barred |= dict.fromkeys(self.rules.helpers, HELPS)

    @property
    def _shares(self) -> dict[str, int]:
        """Owner -> mask of its chunks."""
        if self._shares_of is not self.plan:
            self._shares_of, self._share_masks = self.plan, {}
            for chunk, owner in enumerate(self.plan.owners):
                peer = self.plan.members[owner]
                self._share_masks[peer] = self._share_masks.get(peer, 0) | 1 << chunk
        return self._share_masks

    @property
    def _every_chunk(self) -> int:
        return full_mask(len(self.plan.owners))

    # ---- what members report -------------------------------------------------------------------------

    def on_sent(self, peer: str, sent: Sent, samples: int = 0) -> str | None:
        """Returns why the contribution is barred, if it is.  `samples`: that are leased to it and named in it."""
        if peer in self.sent:
            return None
        if peer in self.rules.helpers:
            self.sent[peer] = sent  # seen, so that it is not said again
            return None
        if len(sent.hashes) != 32 * len(self.plan.owners):
            told = f"its hash list names {len(sent.hashes) // 32} of {len(self.plan.owners)} chunks"
            self.barred[peer] = Excluded(ExclusionCause.SHORT_LIST, told)
        elif sent.tokens == 0 and sent.steps == 0:
            self.barred[peer] = Excluded(ExclusionCause.EMPTY, "it has nothing to contribute")
        self.sent[peer], self.samples[peer] = sent, samples
        for owner, report in self.reports.items():
            self._prove_held(owner, report, peer)  # an owner's report may have overtaken the hash list
        return self.barred[peer].text if peer in self.barred else None

    def on_progress(self, peer: str, report: ProgressReport) -> None:
        self.reports[peer] = report
        for member, verdict in self._refused_by(peer, report).items():
            what = UNUSABLE.get(verdict, "frames of no use")
            told = f"what {self.name(peer)} got from it was unusable: {what}"
            self.accused.setdefault(member, told)
            if self._is_most_owners(self.accusers_of(member), member):
                first = Excluded(ExclusionCause.UNUSABLE, self.accused[member])
                self.barred.setdefault(member, first)
        self._prove_held(peer, report)
        if self.decision is None and self.rules.merge.robust:
            self.comparing.on_report(peer, report.dots)
        if self.decision is not None and report.decision_no == self.decision.decision_no:
            mask, hashes = mask_from_bytes(report.merged), split_hashes(report.merged_hashes)
            squares = split_lengths(report.lengths) if self.rules.measures else [0.0] * len(hashes)
            if len(report.merged_hashes) != 32 * mask.bit_count() or len(squares) != len(hashes):
                return  # a report that contradicts itself says nothing
            for chunk, digest, square in zip(bits(mask), hashes, squares, strict=True):
                if chunk < len(self.plan.owners) and self.plan.owner_of(chunk) == peer:
                    if chunk not in self.merged:
                        self.merged[chunk], self.makers[chunk] = digest, Made(peer, report)
                        self.lengths[chunk] = square

    def on_found_out(self, peer: str, why: Excluded) -> None:
        """Nothing of it counts, and nothing that it made: everything is merged anew without it."""
        self.barred[peer] = why
        for chunk in [chunk for chunk, made in self.makers.items() if made.peer == peer]:
            del self.makers[chunk], self.merged[chunk]  # nobody is to inherit it
        self.void = self.decision is not None

    def accusers_of(self, peer: str) -> set[str]:
        return {who for who, said in self.reports.items() if peer in self._refused_by(who, said)}

    def _refused_by(self, peer: str, report: ProgressReport) -> dict[str, Verdict]:
        """Members that the report refuses.  A member that refuses most of the others is not believed (P9)."""
        others = set(self.plan.members) - {peer}
        about = {member: why for member, why in report.refused.items() if member in others}
        return about if 2 * len(about) <= len(others) or len(others) < 2 else {}

    def _is_most_owners(self, accusers: set[str], member: str) -> bool:
        return are_most(accusers, self._shares.keys() - {member}, len(self.plan.members))

    def _prove_held(self, owner: str, report: ProgressReport, only: str = "") -> None:
        """Count only chunks that hash to what their sender says it sent."""
        proven = self.held.setdefault(owner, {})
        for member in report.held if not only else report.held.keys() & {only}:
            raw, digest = report.held[member]
            mask = mask_from_bytes(raw) & full_mask(len(self.plan.owners))
            sent = self.sent.get(member)
            if sent is None or member in self.barred:
                continue
            if combined((chunk, hash_at(sent.hashes, chunk)) for chunk in bits(mask)) == digest:
                proven[member] = mask
                continue
            proven.pop(member, None)
            contradicting = self._contradicted.setdefault(member, set())
            contradicting.add(owner)
            if self._is_most_owners(contradicting, member):
                told = f"the bytes that {self.name(owner)} holds are not the bytes it says it sent"
                self.barred[member] = Excluded(ExclusionCause.OTHER_BYTES, told)

    # ---- what is due -----------------------------------------------------------------------------------

    def next_step(self, now: float, alive: set[str], dialable: set[str]) -> Step:
        if self.decision is None and self._grace_is_over(now):
            self.censors |= lacks_most(self.lacking_alone(alive), self._senders(alive))
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
            silent = self.audits.silent(self.merged, now) if self.audits is not None else frozenset()
            return Failed(late, AbortCause.TIMED_OUT, self._withheld(alive, dialable), silent=silent)
        if self.decision is None:
            return self._decide(now, alive)
        if self.void:
            self.void = False
            kept = [m for m in self.decision.included(self.plan.members) if m not in self.barred]
            return self._settle(kept, alive, "whoever is left merges everything anew")
        lost = self._unobtainable(alive, self.decision)
        if lost:
            return self._settle(
                [m for m in self.decision.included(self.plan.members) if m not in lost],
                alive,
                f"the contributions of {self._names(sorted(lost))} died with their holders",
            )
        return self._maybe_commit(now, alive, self.decision)

    def cut_off(self, alive: set[str]) -> set[str]:
        """Living members that should own nothing: others can't reach them, or get nothing usable from them."""
        said: set[str] = alive & (self.comparing.impossible.keys() | self.censors)
        for reporter, report in self.reports.items():
            others = alive & set(self.plan.members) - {reporter}
            about = set(report.cut_off) & others
            # A member that can reach hardly anybody is itself cut off; among three, either of two may be.
            if reporter in alive and (2 * len(about) <= len(others) or len(others) < 2):
                said |= about
        return said

    def _grace_is_over(self, now: float) -> bool:
        since = self.opened_at if self._scatter_since is None else self._scatter_since
        return now - since >= self.rules.scatter_grace_s

    def lacking_alone(self, alive: set[str]) -> dict[str, set[str]]:
        """Owner -> members whose contribution it alone says it lacks."""
        senders = self._senders(alive)
        lacks = {
            owner: {m for m in senders - {owner} if share & ~self._held(owner, m)}
            for owner, share in self._shares.items()
            if owner in alive
        }
        return lacking_alone(lacks, senders)

    def _senders(self, alive: set[str]) -> set[str]:
        return {m for m in self.sent.keys() & alive if m not in self.barred} - self.rules.unawaited

    def _withheld(self, alive: set[str], dialable: set[str]) -> frozenset[str]:
        """Living owners without results at the end of the time, unless there is nobody to own their chunks instead."""
        if self.decision is None:
            owing = self._uncompared & alive
        else:
            unmerged = bits(self._every_chunk & ~mask_of(self.merged))
            owing = {self.plan.owner_of(chunk) for chunk in unmerged} & alive
        others = (alive & dialable & set(self.plan.members)) - owing
        return frozenset(owing) if others else frozenset()

    def _replace_the_lost(self, alive: set[str], dialable: set[str]) -> Step | None:
        """Owners that died, or that others can't get through to, are replaced."""
        members, cut_off = self.plan.members, self.cut_off(alive)
        able = {i for i, member in enumerate(members) if member in alive and member in dialable}
        heirs = sorted(i for i in able if members[i] not in cut_off)
        fit = alive - cut_off if heirs else alive  # somebody must own the chunks
        lost = {index for index in set(self.plan.owners) if members[index] not in fit}
        heirs = heirs or sorted(able)
        if not lost:
            return None
        if not heirs:
            told = "no living member can be dialled, so nobody can own a chunk"
            return Failed(told, AbortCause.NO_OWNER)
        owners = list(shares.reassign(self.plan.owners, lost, heirs))
        kept = mask_from_bytes(self.plan.kept)
        for chunk, owner in enumerate(self.plan.owners):
            holders = [i for i in heirs if chunk in self.merged and self._got(members[i]) >> chunk & 1]
            if owner in lost and holders:
                owners[chunk] = min(holders, key=lambda index: (owners.count(index), index))
                kept |= 1 << chunk
            elif owner in lost:
                kept &= ~(1 << chunk)
                self.makers.pop(chunk, None)
                self.merged.pop(chunk, None)  # nobody alive can show these bytes: they will be made again
        for index in lost:
            self.held.pop(members[index], None)
        self.plan = plan = replace(
            self.plan, epoch=self.plan.epoch + 1, owners=tuple(owners), kept=mask_to_bytes(kept)
        )
        names = self._names(members[index] for index in sorted(lost))
        unfit = frozenset(members[index] for index in lost) & alive
        how = "can't be reached by others" if len(unfit) == len(lost) else "is lost"
        useless = self.comparing.impossible | self.accused
        useless |= {member: barred.text for member, barred in self.barred.items()}
        why = "; ".join(sorted(useless[member] for member in unfit if member in useless))
        how = f"sent what is of no use ({why})" if why else how
        return Moved(plan, f"owner {names} {how}; its chunks moved", unfit)

    def _decide(self, now: float, alive: set[str]) -> Step:
        ready = [m for m in self.plan.members if self._complete(m)]
        if self.rules.whole:
            waited = sorted(self.rules.whole - set(ready))
            if waited:
                return Waiting(f"scatter: waiting for {self._names(waited)}")
            return self._settle_whole(ready, alive)
        late = [m for m in self.plan.members if m in alive and m not in ready and m not in self.barred]
        if late and self.rules.unawaited.issuperset(late) and len(ready) >= self.rules.min_peers:
            # What they sent ahead is only to be named: nobody waits for more than that.
            self._named_by = (
                now + ahead.patience_s(now - self.opened_at) if self._named_by is None else self._named_by
            )
            late = late if now < self._named_by else []
        grace_over = self._grace_is_over(now)
        if late and not (grace_over and len(ready) >= self.rules.min_peers):
            return Waiting(f"scatter: waiting for {self._names(late)}")
        reason = "the grace window is over" if late else "every living member's contribution is in"
        # Without tokens there is no weight, and without a weight nobody counts towards the quorum (P2, P9).
        ready = [m for m in ready if self.sent[m].tokens > 0] or ready
        if self.rules.merge.robust and len(ready) >= self.rules.min_peers:
            self._uncompared = set(self.comparing.lacking(ready, self._shares))
            if self._uncompared:
                missing = self._names(sorted(self._uncompared))
                return Waiting(f"decide: waiting for the dot products of {missing}")
            shares = self.comparing.shares_of(ready, self._shares)
            merge = self.rules.merge
            self.screening = screened(ready, shares, merge.clip, merge.trusted)
        return self._settle(ready, alive, reason)

    def _settle(self, ready: list[str], alive: set[str], reason: str) -> Step:
        """`ready`: who has a whole contribution.  A member that is out for its direction counts towards the quorum:
        one liar must not be able to stop a run that needs everybody."""
        if len(ready) < self.rules.min_peers:
            return self._too_few(len(ready))
        out = self.screening.out if self.screening is not None else {}
        claims = {m: Claim(self.sent[m].tokens, self.samples.get(m, 0)) for m in ready if m not in out}
        self.believed = believed(claims, self.rules.merge)
        tokens = self.believed.tokens
        made = weighted(tokens, self.rules.weight_cap, self.rules.merge, self.screening)
        if made.refusal:
            return Failed(made.refusal, AbortCause.GUARD, dropped=True)
        self.norm = made.norm
        told = self.screening.told if self.screening is not None else ""
        merged = "; ".join(each for each in (told, made.told) if each)
        return self._decide_on(made.weights, tokens, alive, reason, merged)

    def _decide_on(
        self, weights: dict[str, float], tokens: Container[str], alive: set[str], reason: str, merged: str
    ) -> Settled:
        number = 1 if self.decision is None else self.decision.decision_no + 1
        members = self.plan.members
        self.excluded = {m: self._why_out(m, tokens, alive) for m in members if not weights.get(m)}
        decision = Decision(
            self.plan.round_no,
            number,
            tuple(weights.get(m, 0.0) for m in members),
            {member: why.text for member, why in self.excluded.items()},
        )
        self.decision = decision
        self.merged.clear()
        self.makers.clear()
        return Settled(decision, reason, merged)

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
            if self.void:  # what is decided has a part of somebody who is out
                lost |= self.rules.whole & self.barred.keys()
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
        return self._decide_on(weights, tokens, alive, "every share of the batch is in", "")

    def _too_few(self, count: int) -> Failed:
        barred = sorted((m, why) for m, why in self.barred.items() if m not in self.rules.helpers)
        back = any(why.cause is ExclusionCause.RESTARTED for _, why in barred)
        whose = "".join(f"; {self.name(member)} is out: {why.text}" for member, why in barred)
        told = f"{count} whole contributions, at least {self.rules.min_peers} are needed{whose}"[:1500]
        return Failed(told, AbortCause.MEMBER_RESTARTED if back else AbortCause.TOO_FEW)

    def _unobtainable(self, alive: set[str], decision: Decision) -> set[str]:
        """Included members that can't send any more and whose bytes for a chunk still to be merged nobody holds."""
        unmerged = self._every_chunk & ~mask_of(self.merged)
        return {
            member
            for member in decision.included(self.plan.members)
            if (member not in alive or member in self.barred)
            and any(share & unmerged & ~self._held(owner, member) for owner, share in self._shares.items())
        }

    def _maybe_commit(self, now: float, alive: set[str], decision: Decision) -> Step:
        chunks = len(self.plan.owners)
        missing = chunks - len(self.merged)
        if missing:
            self.last_holders.begin()
            return Waiting(f"gather: {missing} of {chunks} chunks not merged yet")
        if self.audits is not None and (orphans := self.audits.orphans(self.merged)):
            told = (
                f"too few are left who could merge {len(orphans)} of {chunks} chunks again before the commit"
            )
            return Failed(told, AbortCause.TOO_FEW)
        here = self._here(alive)
        thin = len(self._thin(alive))
        if not here or (thin and not self._may_go_without(now, alive)):
            needed = self._holders_needed(here)
            return Waiting(f"gather: {thin} of {chunks} results not yet held by {needed} peers")
        if self.audits is not None and (lacking := self.audits.lacking(self.merged)):
            return Waiting(f"audit: {len(lacking)} of {chunks} results not yet merged again by others")
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
        return [m for m in self.plan.members if m in alive and m not in self.rules.helpers]

    def _late(self, alive: set[str]) -> frozenset[str]:
        return frozenset(m for m in self._here(alive) if self._every_chunk & ~self._got(m))

    def _holders_needed(self, here: Sequence[str], waited: bool = False) -> int:
        least, most = self.rules.min_peers, self.rules.most_of_run
        return holders_needed(len(here), least if most is None or not waited else min(least, most))

    def _thin(self, alive: set[str], waited: bool = False) -> list[int]:
        """Chunks whose results too few living members hold.  `waited`: for those that a round needs besides most."""
        here = self._here(alive)
        needed = self._holders_needed(here, waited)
        held = [0] * len(self.plan.owners)
        for member in here:
            for chunk in bits(self._got(member)):
                held[chunk] += 1
        return [chunk for chunk, count in enumerate(held) if count < needed]

    def _who_keeps_results(self, now: float, alive: set[str]) -> set[str]:
        """Living owners that do not give away what they merged: others merge it again."""
        if self.decision is None:
            return set()
        held: Counter[str] = Counter()
        for member in self.plan.members:
            held.update(self.plan.owner_of(chunk) for chunk in bits(self._got(member)))
        # What most of the run hold is not kept from anybody: who lacks it is late, and no owner is to blame for that.
        thin = self._thin(alive, waited=True)
        owing = {self.plan.owner_of(chunk) for chunk in thin if chunk in self.merged} & alive
        return self._spread.stuck(owing, held, now, self.rules.chunk_patience_s)

    # ---- questions -------------------------------------------------------------------------------------

    def _held(self, owner: str, member: str) -> int:
        return self.held.get(owner, {}).get(member, 0)

    def _complete(self, member: str) -> bool:
        """Every owner holds its share of the member's contribution."""
        if member not in self.sent or member in self.barred:
            return False
        return all(not share & ~self._held(owner, member) for owner, share in self._shares.items())

    def _got(self, member: str) -> int:
        """Mask of the results that a member proved to hold, under the hashes that owners answer for."""
        report = self.reports.get(member)
        if report is None or self.decision is None or report.decision_no != self.decision.decision_no:
            return 0
        mask = mask_from_bytes(report.got) & self._every_chunk
        if self._is_proven(mask, report.got_hash):
            return mask
        if not report.got_by:
            return 0
        # Of some owner it has other bytes than that one answers for: the others' results are here all the same.
        parts = {owner: mask & share for owner, share in self._shares.items() if owner in report.got_by}
        proven = [part for owner, part in parts.items() if self._is_proven(part, report.got_by[owner])]
        return sum(proven)  # no two owners have a chunk

    def _is_proven(self, mask: int, digest: bytes) -> bool:
        if mask & ~mask_of(self.merged):
            return False  # the proof speaks of chunks that nobody answers for yet
        return combined((c, self.merged[c] + self._length_of(c)) for c in bits(mask)) == digest

    def _length_of(self, chunk: int) -> bytes:
        return length_to_bytes(self.lengths[chunk]) if self.rules.measures else b""

    def _why_out(self, member: str, counted: Container[str], alive: set[str]) -> Excluded:
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

    def _names(self, members: Iterable[str]) -> str:
        return ", ".join(map(self.name, members))

    def _lag(self, alive: set[str]) -> str:
        dead = [m for m in self.plan.members if m not in alive]
        late = [m for m in self.plan.members if m in alive and not self._complete(m)]
        mute = f"; no dot products from {self._names(sorted(self._uncompared))}" if self._uncompared else ""
        lacking = self.audits.lacking(self.merged) if self.audits is not None else ()
        again = f"; {len(lacking)} results not merged again by others" if lacking else ""
        return f"late: {self._names(late) or 'nobody'}; lost: {self._names(dead) or 'nobody'}{mute}{again}"

    def done_by(self, member: str) -> tuple[float, float]:
        """(how much of its contribution owners hold, how many of the results it holds) for the status."""
        kept = sum((share & self._held(owner, member)).bit_count() for owner, share in self._shares.items())
        return kept / len(self.plan.owners), self._got(member).bit_count() / len(self.plan.owners)

    def fractions(self) -> tuple[int, float, float, float]:
        """(members whose contribution is whole, held, merged, got) for the status."""
        chunks, members = len(self.plan.owners), self.plan.members
        held = sum(mask.bit_count() for by in self.held.values() for mask in by.values())
        got = sum(self._got(m).bit_count() for m in members)
        whole = sum(1 for m in members if self._complete(m))
        return whole, held / (chunks * len(members)), len(self.merged) / chunks, got / (chunks * len(members))
