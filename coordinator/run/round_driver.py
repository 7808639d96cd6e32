"""Conducts the rounds of one fragment: opens them, moves them on, commits them.

One of the two halves of the run machine (the other is machine.py, which listens to members); there is one driver
for each fragment, and their rounds are in flight side by side.  Pure.  The rules that a round is opened with, and the
witness that checks the signed hash lists, are its own parts; what state a version is, is its settling's business.
Each decision leaves a reason in `reason`, which the status shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, DecidedOn, Opened
from farflung.coordinator.rounds.owners import LastHolders
from farflung.coordinator.rounds.round import Foresight, Patience, Round, Steadiness, can_be_foreseen
from farflung.coordinator.rounds.round_policy import (
    Done,
    Failed,
    Foreseen,
    LineShares,
    OwnersMoved,
    RoundCommitted,
    RoundPolicy,
    RoundWaits,
    SeatShare,
)
from farflung.coordinator.rounds.round_rules import Groups, chosen, lines_of, planned, rules_for, within
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.digest_agreement import DigestAgreement, SignedResults, record_of
from farflung.coordinator.run.membership import Looks, Member, Standing
from farflung.protocol.errors import AbortCause, Excluded, ExclusionCause, NoteCause
from farflung.protocol.limits import MEMBERS_PER_ROUND
from farflung.protocol.messages import Aborted, Beat, Decided, FragmentBeat, OpenRound, ProgressReport, Sent
from farflung.protocol.round_words import CROWD, Decision

# ---- eligibility -------------------------------------------------------------------------------------------
# Who holds a fragment, who of them is ready for a round, and why none is opened. Pure.
#
# The ground that a driver stands on: what members last said of its fragment, read and never
# written. Whether a round may be opened depends on who is ready, who is about to be, whose line is slow, who
# keeps restarting, and who can be dialled. Must not know rounds in flight.


RETRY_S = 1.0  # after an abort; doubles with each further abort of the same version
RETRY_MAX_S = 30.0
FORGOTTEN_S = 3600.0  # for so long nobody who left wins new patience by coming back


class Retries:
    """Rounds that failed, one after the other."""

    def __init__(self) -> None:
        self._aborts = 0
        self._not_before = 0.0

    def left_s(self, now: float) -> float:
        """Until the next try."""
        return self._not_before - now

    def on_abort(self, now: float) -> None:
        self._aborts += 1
        self._not_before = now + min(RETRY_MAX_S, RETRY_S * 2 ** (self._aborts - 1))

    def on_commit(self) -> None:
        self._aborts, self._not_before = 0, 0.0


class Eligibility:
    def __init__(self, core: Core, fragment: int) -> None:
        self.core = core
        self.fragment = fragment
        self.lines = LineShares(fragment, lambda: core.manifest)
        self._steadiness = Steadiness()
        self._retries = Retries()
        # Members that a few results bring to the run's version: since when, until they are there.
        self._near_since: dict[str, float] = {}

    @property
    def book(self) -> FragmentBook:
        return self.core.ledger.books[self.fragment]

    @property
    def holders(self) -> Collection[Member]:
        """Living members that hold this fragment: nobody else has a part in its rounds."""
        return self.core.members.holding(self.fragment).values()

    def standing(self, member: Member) -> Standing:
        """Of a member that holds this fragment."""
        return member.standings[self.fragment]

    def beat_of(self, member: Member) -> FragmentBeat | None:
        """What the member last said of this fragment."""
        return member.beat.of(self.fragment) if member.beat is not None else None

    @property
    def _of_several_stages(self) -> bool:
        return self.core.manifest.pipeline.stages > 1

    @property
    def able(self) -> list[Member]:
        return [m for m in self.holders if self.standing(m).verified and not m.helps]

    @property
    def _helping(self) -> set[str]:
        return self.core.members.helping(self.fragment, self.core.now)

    @property
    def _least(self) -> int:
        """Contributions that a round needs.  Members whose data is at its end are here, and have none to give: others
        must be able to go on, or they would never find that end themselves."""
        without = sum(m.without_data and not self.is_ready(m) for m in self.able)
        return max(1, self.core.manifest.run.min_peers - without)

    def _counted_on(self, ready: list[Member]) -> list[Member]:
        """Without those that keep restarting with what they owe, where there are enough others."""
        steady = self._steadiness.counted_on(member.peer for member in ready)
        owners = self.core.members.can_own(self.core.now, steady | self._helping)
        enough = len(steady) >= self._least and owners
        return [member for member in ready if member.peer in steady] if enough else ready

    def is_ready(self, member: Member) -> bool:
        beat = self.beat_of(member)
        if beat is None or beat.dropped != self.book.dropped_round:
            return False  # a member that has not heard that the guard threw a round away might bring its work again
        return beat.ready and beat.version == self.book.version and beat.round_no == 0

    def _why_not_open(self, able: list[Member], ready: list[Member]) -> str:
        rules, now = self.core.manifest.round, self.core.now
        least = self.core.manifest.run.min_peers
        if len(able) < least:
            held = f"version {self.book.version}{self.core.of(self.fragment)}"
            return f"{len(able)} of at least {least} peers hold {held}"
        if len(ready) < self._least:
            return f"inner steps: {len(ready)} of at least {least} peers are ready"
        if (left_s := self._retries.left_s(now)) > 0:
            return f"the last round failed; trying again in {left_s:.1f} s"
        slow = self.lines.slow
        setting_the_pace = [m for m in ready if m.peer not in slow] or ready
        since = [self.standing(m).ready_since for m in setting_the_pace]
        first = min(at for at in since if at is not None)
        here = {m.peer for m in ready}
        expected = [m for m in able if m.peer in here or (m.trains and not m.without_data)]
        near = self.nearly_here(ready)
        expected += self._arriving + near
        expected = [m for m in expected if not m.leaving and m.peer not in slow.keys() - here]
        expected = [m for m in expected if m.peer in here or not self._steadiness.rounds_out(m.peer)]
        if len(ready) < len(expected) and now < first + rules.deadline_s:
            left_s = first + rules.deadline_s - now
            if near and len(ready) + len(near) == len(expected):
                who = self.core.name(near[0].peer) if len(near) == 1 else f"{len(near)} newcomers"
                return f"waiting for {who}, a few versions behind, at most {left_s:.1f} s more"
            return f"inner steps: {len(ready)} of {len(expected)} ready, at most {left_s:.1f} s more"
        here |= self._helping
        if not self.core.members.can_own(self.core.now, here):
            return "no ready peer can be dialled, so nobody can own a chunk"
        return ""

    @property
    def _arriving(self) -> list[Member]:
        """Members that are just applying the newest commit: a slow disk or CPU must not cost them the next round."""
        return [member for member in self.holders if self.is_arriving(member) and not member.helps]

    def nearly_here(self, ready: Collection[Member]) -> list[Member]:
        """Members that a few results bring to the run's version, where they are no fewer than those that are ready: the
        rounds of few, or of one alone, may follow each other faster than a home line brings their results, and nobody
        would ever come in.  No longer than a deadline each, or a line that is too slow would hold up every round."""
        since = self.core.now - self.core.manifest.round.deadline_s
        near = [
            m
            for m in self.holders
            if self._near_since.get(m.peer, -math.inf) > since
            and self._is_behind(m)
            and m.trains
            and not (m.without_data or m.leaving or m.peer in self.lines.slow)
            and not self._steadiness.rounds_out(m.peer)
        ]
        return near if len(near) >= len(ready) else []

    def _is_behind(self, member: Member) -> bool:
        standing, beat = self.standing(member), self.beat_of(member)
        if beat is None or not standing.vouched or standing.verified or standing.quarantined:
            return False
        least = self.book.version - self.core.manifest.round.keep_results
        return max(0, least) <= beat.version < self.book.version - 1

    def note_behind(self, member: Member) -> None:
        """With each of its beats."""
        if self.standing(member).verified:
            self._near_since.pop(member.peer, None)
        elif self._is_behind(member):
            self._near_since.setdefault(member.peer, self.core.now)

    def is_arriving(self, member: Member) -> bool:
        standing, beat = self.standing(member), self.beat_of(member)
        known = standing.vouched and not (standing.verified or standing.quarantined)
        return known and beat is not None and beat.version >= max(0, self.book.version - 1)

    def _can_own(self, members: Collection[str]) -> set[str]:
        """Those that others get through to.  Whoever is alone in the round of a stage need not be dialled: the other
        stages wait for it."""
        alone = self._of_several_stages and len(members) == 1
        return set(members) if alone else self.core.members.can_own(self.core.now, members)

    def _why_without(self, member: Member) -> str:
        """A round was opened without this able member."""
        if rounds := self._steadiness.rounds_out(member.peer):
            left = "1 more round" if rounds == 1 else f"{rounds} more rounds"
            why = "it restarted again and again while others needed what it had sent"
            return f"{why}; it takes part again after {left}"
        if member.peer in self.lines.slow:
            return f"what it learned is on its way: {self.lines.slow[member.peer].told}"
        return "all its places were taken" if self.is_ready(member) else "it was not ready in time"


# ---- participants ------------------------------------------------------------------------------------------


class Participants:
    """Whom the round in flight counts on: of each member the very process that was here when it was opened.  What they
    are told of it, and who is left out.  Nobody between rounds."""

    def __init__(self, core: Core, fragment: int) -> None:
        self._core, self._fragment = core, fragment
        self.processes: Mapping[str, bytes] = {}
        # Of these: who lost what the round goes from.  What it had sent counts, and nobody waits for more.
        self._gone: set[str] = set()

    def begin(self, peers: Collection[str]) -> None:
        self.processes = {peer: self._core.members.members[peer].process for peer in peers}
        self._gone = set()

    def end(self) -> None:
        self.processes = {}

    def lose(self, member: Member) -> None:
        self._gone.add(member.peer)

    def counts_on(self, member: Member) -> bool:
        return self.processes.get(member.peer) == member.process

    def awaits(self, member: Member) -> bool:
        return self.counts_on(member) and member.peer not in self._gone

    def is_living(self, peer: str) -> bool:
        """It can still do something in the round."""
        here = self._core.members.holding(self._fragment)
        return peer in here and self.awaits(here[peer])

    @property
    def living(self) -> set[str]:
        return set(filter(self.is_living, self.processes))

    def being_dialled(self, alive: set[str]) -> list[str]:
        """After a restart of the coordinator a round may open before all addresses are tried: one that is may own."""
        members = self._core.members.members
        return [peer for peer in sorted(alive) if members[peer].is_being_dialled]

    @property
    def hearing(self) -> list[Member]:
        """Those that can hear of the round."""
        found = map(self._core.members.members.get, self.processes)
        return [member for member in found if member is not None and member.alive and self.counts_on(member)]

    def tell_plan(self, flight: Round, members: Iterable[Member]) -> None:
        for member in members:
            plan = flight.sums.plan_for(flight.groups, member.peer, flight.epoch_of(member.peer))
            amended = self._core.amended_for(flight.plan.version)
            self._core.tell(member, OpenRound, plan=plan, amended=amended)

    def tell_decision(self, flight: Round, decision: Decision, members: Iterable[Member]) -> None:
        for member in members:
            its = flight.sums.decision_for(flight.groups, decision, member.peer)
            self._core.tell(member, Decided, decision=its)

    def leave_out(self, flight: Round, peer: str, why: str) -> None:
        """For the status: the member's owner wants to know, also when the round itself is forgotten."""
        member = self._core.members.members.get(peer)
        if member is not None:
            member.told.left_out = f"round {flight.plan.round_no}: {why}"
            self._core.members.ways.left_out(peer, self._core.now)


# ---- round driver ------------------------------------------------------------------------------------------

MUCH_SHORTENED = 0.5  # to this or less: people are told
# Contributions that an owner alone lacks, in rounds in a row; then it owns nothing for a while.
WITHHELD_MOST = 3
LEAST_ACCUSERS = 2  # of a member whose bytes are of no use
LATE_OWNER = "it owned chunks and did not give their results in time"


class RoundDriver(Eligibility):
    def __init__(self, core: Core, fragment: int) -> None:
        super().__init__(core, fragment)
        self.policy = RoundPolicy()
        self.round: Round | None = None
        self.participants = Participants(core, fragment)
        self.agreement = DigestAgreement(core, fragment)
        self._witness = SignedResults(core)
        # By the policy: what the round in flight is to merge of whom.
        self._shares: Mapping[str, SeatShare] = {}
        self._last_holders = LastHolders()
        self._foresight = Foresight()
        # Owner -> contributions that it alone lacked, in rounds in a row.
        self._withheld: Counter[str] = Counter()
        self.reason = "starting"
        self.merged = ""  # how the round in flight is merged, once that is decided
        # Its round is at its end, and is committed with those of all other stages.
        self.prepared: Done | None = None
        self._looks, self._patience = Looks(), Patience()
        self._committed_at = 0.0

    def goes_by(self, policy: RoundPolicy) -> None:
        """A mode has another one than the core."""
        self.policy, self.lines = policy, policy.lines(self.fragment, lambda: self.core.manifest)

    @property
    def since_commit_s(self) -> float:
        return self.core.now - self._committed_at

    # ---- opening -------------------------------------------------------------------------------------

    def maybe_open(self) -> None:
        if self.round is not None:
            return
        if self.core.finished:
            self.reason = "finished"
            return
        if self.policy.names_members:
            self._maybe_open_by(self.policy)
            return
        if not self._looks.is_due(len(self.holders), self.core.now):
            return
        able = self.able
        self._look_for_slow_lines()
        ready = self._counted_on([m for m in able if self.is_ready(m)])
        why_not = self.core.held or self.agreement.reason or self._why_not_open(able, ready)
        if why_not:
            self.reason = why_not
            return
        # Who left and comes back is waited for no longer than if it had stayed.
        since, here = self.core.now - FORGOTTEN_S, self.core.members.holding(self.fragment)
        self._near_since = {p: at for p, at in self._near_since.items() if p in here or at > since}
        # A member that was left out last time comes first, where not all fit into one round.
        ready.sort(key=lambda m: (-self.standing(m).missed, self.standing(m).ready_since or 0.0, m.joined_no))
        owners = self.core.members.can_own(self.core.now, {m.peer for m in ready} | self._helping)
        most = self.policy.most(len(owners))
        self._open(sorted(chosen([m.peer for m in ready], owners, most)))

    def _maybe_open_by(self, policy: RoundPolicy) -> None:
        """With exactly those who have a share; where none of them can be dialled, others own the chunks."""
        self._shares, waits = policy.shares()
        held = "" if policy.under_way else self.core.held
        why_not = held or self.agreement.reason or waits
        if why_not:  # nearly always: who could own a chunk is looked for when there are chunks to own
            self.reason = why_not
            return
        peers, helping = set(self._shares), self._helping
        owners = self._can_own(peers | helping)
        if not (peers | helping) & owners:
            owners = self.core.members.can_own(self.core.now)
            peers |= {m.peer for m in self.able if m.peer in owners}
        left_s = self._retries.left_s(self.core.now)
        if not (peers | helping) & owners:
            self.reason = "no peer can be dialled, so nobody can own a chunk"
        elif left_s > 0:
            self.reason = f"the last round failed; trying again in {left_s:.1f} s"
        else:
            self._open(sorted(peers)[:MEMBERS_PER_ROUND] if len(peers) > len(self._shares) else sorted(peers))

    def _open(self, contribute: list[str]) -> None:
        core, manifest, model = self.core, self.core.manifest, self.core.ledger.model
        if model is None:
            return  # the first member brings it, and nobody is ready before
        room = max(0, MEMBERS_PER_ROUND - len(contribute))
        helpers = sorted(self._helping.difference(contribute))[:room]
        peers = sorted([*contribute, *helpers])
        owners = self._can_own(peers)
        most_bytes_per_s = core.members.ways.share_bytes_per_s(peers, owners)
        beats = within({p: core.members.members[p].beat for p in peers}, most_bytes_per_s)
        groups = self.policy.drawn(peers, owners, self.book.digests.get(self.book.version, b""))
        wider = core.members.wider_owners(core.now, peers, owners)
        codecs, owned = self.lines.shared_out(beats, owners, model, groups, wider)
        numbers = core.ledger.round_no + 1, self.book.version, self.fragment
        plan = planned(numbers, peers, groups, owned, codecs)
        rules = replace(
            rules_for(manifest, self.book, peers, core.ledger.books, core.clock_s),
            min_peers=1 if self._shares else min(self._least, len(contribute)),
            whole=frozenset(self._shares),
            # Whether or not they hold its state yet.
            most_of_run=sum(not m.helps for m in self.holders) // 2 + 1,
            helpers=frozenset(helpers),
            unawaited=frozenset(peers) & self.lines.slow.keys(),
            lines=lines_of(beats),
        )
        core.acquaint(Groups(plan).circles)
        core.members.liveness.await_words([core.members.members[peer] for peer in peers], core.now)
        core.write(Opened(plan=plan))
        self._last_holders.begin()
        self.round = flight = Round(
            plan, rules, core.now, core.name, last_holders=self._last_holders, sums=self.policy.sums()
        )
        flight.foresees = can_be_foreseen(plan, rules) and self._foresight.is_on
        self.participants.begin(peers)
        of = core.of(self.fragment)
        told = f"round {plan.round_no}{of} opened from version {plan.version} with {_peers(len(contribute))}"
        core.log(told, NoteCause.OPENED)
        for member in self.able:
            if member.peer not in peers:
                self.participants.leave_out(flight, member.peer, self._why_without(member))
        self.participants.tell_plan(flight, self.participants.hearing)

    def _look_for_slow_lines(self) -> None:
        """Among those who have shown that they hold the run's state, whether or not they have the newest version."""
        model, holders = self.core.ledger.model, self.holders
        if self.core.manifest.round.group or len(holders) > MEMBERS_PER_ROUND:
            return
        if model is None or not self.lines.is_due(self.core.now):
            return
        known = {
            m.peer: m.beat for m in holders if self.standing(m).vouched and m.beat is not None and m.trains
        }
        staying = {peer: beat for peer, beat in sorted(known.items()) if not beat.leaving}
        told = self.lines.look(staying, self._can_own(staying), model, self.core.now, self.core.name)
        for news in told:
            self.core.note(news)

    # ---- moving on -----------------------------------------------------------------------------------

    def recognise(self, member: Member, said: FragmentBeat) -> bool:
        """Take in what a beat says that the member holds.  True if it is verified now and was not, or the reverse."""
        flight = self.round
        if flight is not None and said.version < flight.plan.version and self.participants.awaits(member):
            # It took part, so it held that version, and has to take the run's state again.
            if member.peer not in flight.rules.helpers:
                self.participants.lose(member)
                self._steadiness.breaks(member.peer, member.process)
                self.participants.leave_out(flight, member.peer, "it had to take the run's state again")
        changed = self.agreement.recognise(member, said)
        self.note_behind(member)
        return changed

    def is_about(self, member: Member, round_no: int) -> bool:
        """That is the round in flight here, and it counts on this very process."""
        flight = self.round
        return flight is not None and flight.plan.round_no == round_no and self.participants.counts_on(member)

    def on_progress(self, member: Member, report: ProgressReport) -> None:
        if self.round is None:
            return
        if self.round.on_progress(member.peer, self._witness.proven(member, self.round, report)):
            self.standing(member).progress_seen = report.seq

    def on_sent(self, member: Member, sent: Sent) -> None:
        if self.round is None:
            return
        leases = self.core.ledger.leases
        cause, problem = ExclusionCause.UNSIGNED, self._witness.problem(member, sent)
        if not problem:
            problem = leases.problem(member.peer, sent.used, self.fragment) or ""
            cause = ExclusionCause.LEASES
        if not problem:
            problem = self.policy.problem(self._shares.get(member.peer), sent)
            cause = ExclusionCause.OTHER_SHARE
        if problem and member.peer not in self.round.scatter.sent:
            self.round.scatter.barred[member.peer] = Excluded(cause, problem)
        samples = 0 if problem else leases.newly_used(sent.used, self.fragment)
        why = self.round.on_sent(member.peer, sent, samples)
        if why:
            self.core.note(f"{self.core.name(member.peer)} is out of round {sent.round_no}: {why}")

    def may_use_work_of(self, peer: str) -> bool:
        """A commit of the round in flight may acknowledge what this peer sent."""
        flight = self.round
        return flight is not None and peer in flight.plan.members and peer not in flight.scatter.barred

    def on_session(self, peer: str, process: bytes) -> None:
        """A member begins a session, with a process that was here before or with another one."""
        self._steadiness.comes(peer, process, self.participants.processes.get(peer, b""))

    def on_restart(self, peer: str) -> None:
        """A member came back as another process: what its former self sent may not be acknowledged twice."""
        if self.round is not None and peer in self.round.plan.members and self.round.decision is None:
            why = Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
            self.round.scatter.barred[peer] = why

    def is_due(self) -> bool:
        """To be looked at now, and not with the next words or in a moment."""
        flight, members = self.round, self.core.members
        count = len(members.holding(self.fragment) if flight is None else flight.plan.members)
        is_living = self.participants.is_living
        return self._patience.is_due(flight, count, members.losses, is_living, self.core.now)

    def advance(self) -> None:
        """Take every transition that is due now."""
        # A fragment that has had its rounds goes on for as long as another one has not: the model learns as a whole.
        if self.round is not None and self.core.finished:
            self.abort(AbortCause.COMPLETE, "the run is complete")
        self.prepared = None
        while (flight := self.round) is not None:
            alive = self.participants.living
            step = flight.next_step(self.core.now, alive, self._can_own(flight.plan.members))
            match step:
                case RoundWaits(reason):
                    self.reason = reason
                    return
                case OwnersMoved(plan, reason, unfit):
                    self.core.members.addresses.doubt(unfit, self.core.now)
                    for peer in unfit:
                        barred, accused = flight.scatter.barred.get(peer), flight.scatter.accused.get(peer)
                        why = (
                            accused or "others could not get through to it" if barred is None else barred.text
                        )
                        self.participants.leave_out(flight, peer, f"it lost its chunks: {why}")
                    self.core.note(f"round {plan.round_no}, epoch {plan.epoch}: {reason}")
                    self.core.write(Opened(plan=plan))
                    self.core.acquaint(flight.groups.circles)
                    told = [m for m in self.participants.hearing if m.peer in flight.told]
                    self.participants.tell_plan(flight, told)
                case RoundCommitted():
                    self._announce(flight, step)
                case Foreseen(decision):
                    self.participants.tell_decision(flight, decision, self.participants.hearing)
                case Failed(cause=AbortCause.NO_OWNER) if tried := self.participants.being_dialled(alive):
                    names = ", ".join(map(self.core.name, tried))
                    self.reason = (
                        f"waiting to see whether {names} can be dialled: nobody else can own a chunk"
                    )
                    return
                case Failed(reason, cause, unfit, dropped, lost):
                    self.core.members.addresses.doubt(unfit, self.core.now)
                    for peer in unfit:
                        self.participants.leave_out(flight, peer, LATE_OWNER)
                    self.abort(cause, reason, dropped)
                    self.policy.give_up(lost, reason)
                case Done() if self._of_several_stages:
                    flight.prepared, self.prepared = True, step
                    self.reason = "every result is held by several: waiting for the other stages' rounds"
                    return
                case Done():
                    (done,) = self.policy.finished([step])
                    record = self.record(flight, done)
                    self.core.write(record)
                    self.on_committed(flight, record, done.late)

    def _announce(self, flight: Round, step: RoundCommitted) -> None:
        core, decision, screening = self.core, step.decision, flight.screening
        causes = {peer: why.cause for peer, why in flight.excluded.items()}
        core.write(DecidedOn(decision=decision, causes=causes, merged=step.merged))
        for peer, why in decision.reasons.items():
            if peer in flight.rules.helpers:
                continue  # of these it is no news
            core.note(f"{core.name(peer)} is not in round {decision.round_no}: {why}")
            self.participants.leave_out(flight, peer, why)
        for peer, factor in screening.factors.items() if screening is not None else ():
            if factor <= MUCH_SHORTENED and peer not in flight.excluded:
                why = screening.clipped[peer] if screening is not None else ""
                core.note(f"{core.name(peer)} counts for less in round {decision.round_no}: {why}")
        for peer, why in flight.believed.why.items():
            core.note(f"{core.name(peer)} counts for less in round {decision.round_no}: {why}")
        self._doubt_who_withholds(flight)
        self.participants.tell_decision(flight, decision, self.participants.hearing)
        self.reason, self.merged = step.reason, step.merged

    def _doubt_who_withholds(self, flight: Round) -> None:
        """An owner may say of few others, round after round, that what they sent did not come: then their work never
        counts.  Or all owners say so of most.  Once is a slow line."""
        core, living = self.core, self.participants.living
        lacks = flight.scatter.lacking_alone(living, flight.scatter.senders(living, awaited=False))
        alone = {owner: len(lacking) for owner, lacking in lacks.items() if lacking}
        if 2 * len(flight.excluded) > len(flight.plan.members):
            alone = dict.fromkeys(flight.scatter.deaf(living), 1) | alone
        self._withheld = Counter({owner: self._withheld[owner] + count for owner, count in alone.items()})
        unfit = [owner for owner, count in self._withheld.items() if count >= WITHHELD_MOST]
        core.members.addresses.doubt(unfit, core.now)
        for owner in unfit:
            del self._withheld[owner]
            why = (
                "what others sent came to all owners but to it, again and again: it owns nothing for a while"
            )
            self.participants.leave_out(flight, owner, why)
            core.note(f"{core.name(owner)}: {why}")

    def asks_anew(self) -> bool:
        """True once after each change of whom owners are to compare, or may encode: they must hear of it at once."""
        flight = self.round
        if flight is None:
            return False
        asks, freed = flight.comparing.asks_anew(), flight.sums.take_news()
        return asks or freed

    def abort(self, cause: AbortCause, reason: str, dropped: bool = False) -> None:
        """Of the round in flight, if there is one."""
        flight = self.round
        if flight is None:
            return
        number = flight.plan.round_no
        for peer, why in flight.scatter.barred.items():
            self.participants.leave_out(flight, peer, why.text)
        fate = f"everybody starts again from version {self.book.version}" if dropped else "local work is kept"
        told = AbortedRound(
            round_no=number, cause=cause, reason=reason, fragment=self.fragment, dropped=dropped
        )
        self.core.write(told)
        self._foresight.on_end(flight.foreseen is not None, flight.as_foreseen)
        self.core.note(f"round {number} aborted: {reason}; {fate}")
        self._strike_useless(flight)
        for member in self.participants.hearing:
            self.core.tell(member, Aborted, round_no=number, reason=reason)
        self.round = self.prepared = None
        self.participants.end()
        if cause is AbortCause.SHARE_LOST:
            return  # the next one opens as soon as the share is computed again
        self._retries.on_abort(self.core.now)

    def _strike_useless(self, over: Round) -> None:
        for peer in found_useless(over):
            self.core.strike(peer, f"what it sent in round {over.plan.round_no} was of no use to the others")

    def record(self, flight: Round, done: Done) -> CommittedRound:
        """What the journal has of a round that is at its end."""
        counted = {peer: share.counted for peer, share in self._shares.items()}
        return record_of(self.core, flight, done, self.merged, counted)

    def on_committed(self, flight: Round, record: CommittedRound, late: frozenset[str]) -> None:
        """It is written: the round is over."""
        core, commit, processes = self.core, record.commit, self.participants.processes
        included = commit.included
        sums = self._witness.on_commit(commit, flight, processes)
        self._steadiness.on_commit({peer: processes[peer] for peer in included})
        self._foresight.on_end(flight.foreseen is not None, flight.as_foreseen)
        for peer in sorted(self._last_holders.on_commit(late)):
            told = "it does not get the results that most others hold; for a while no commit waits for it"
            core.note(f"{core.name(peer)}: {told}")
        core.pace.on_commit(core.ledger.version, core.now)
        self.lines.on_commit(included, core.now)
        self._retries.on_commit()
        self._committed_at = core.now
        self._strike_useless(flight)
        self.round = self.prepared = None
        self.participants.end()
        self._count_participation(included)
        what = f"version {commit.version}{core.of(self.fragment)}"
        told = f"{what} committed by round {commit.round_no} with {_peers(len(included))}"
        core.log(told, NoteCause.COMMITTED)
        at_once = len(self.holders) <= CROWD
        for member in self.holders:
            self.standing(member).verified = False  # until it shows the digest of the new version
            if at_once or member.peer in processes:
                self.agreement.tell_commit(member)
        for mode in self.core.modes:
            mode.on_committed(sums)

    def _count_participation(self, included: tuple[str, ...]) -> None:
        for member in self.holders:
            peer, standing = member.peer, self.standing(member)
            if peer in included:
                standing.missed = 0
            elif standing.verified and not member.helps:
                standing.missed += 1

    # ---- the digest of a version -----------------------------------------------------------------------

    def settle_digest(self) -> bool:
        """True when what stands as the digest of the newest version, or who holds it, changed now."""
        if not self.agreement.is_due(len(self.holders)):
            return False
        said = [(member, beat) for member in self.holders if (beat := self.beat_of(member)) is not None]
        patience_over = self.since_commit_s >= 2 * self.core.manifest.net.dead_after_s
        changed = self.agreement.settle(said, patience_over)
        if self.agreement.contradictions.case is not None:
            # What it would commit may be built on a lie, and whoever knows better would be left behind.
            self.abort(AbortCause.DISPUTED, self.agreement.reason)
        return changed


def found_useless(flight: Round) -> list[str]:
    """Members from whom most of the others, and at least two, got bytes that are of no use."""
    others = len(flight.plan.members) - 1
    accusers = {peer: flight.accusers_of(peer) for peer in flight.plan.members}
    return [peer for peer, by in accusers.items() if len(by) >= LEAST_ACCUSERS and 2 * len(by) > others]


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"


# ---- held versions -----------------------------------------------------------------------------------------
# Which version members hold, by what they say and show. Pure.


def newest_held(driver: RoundDriver, settled: bool = False, heard_since: float = float("-inf")) -> int:
    """`settled`: that the run has agreed on the digest of.  `heard_since`: by somebody who spoke since then."""
    book, newest = driver.book, -1
    for member in driver.holders:
        said = driver.beat_of(member)
        if newest >= book.version:
            break  # in a crowd it is nearly always the first one
        if said is None or said.version <= newest or member.heard.at < heard_since:
            continue
        # A version whose digest is not settled yet is held; so is one that this journal does not know.
        known = book.digests.get(said.version)
        unknown = known is None and said.version >= book.version and not settled
        due = book.shown.get(said.version)
        # An echo of the digest holds nothing.
        shows = due is None or driver.agreement.has_shown(said) == due
        if (said.digest == known and shows) or unknown:
            newest = said.version
    return min(newest, book.version)


def in_this_era(beat: Beat, era: int) -> Beat:
    """A member that has not heard yet that the run went back holds nothing of it, whatever its numbers say."""
    if beat.era >= era:
        return beat
    return msgspec.structs.replace(beat, fragments=tuple(map(_nothing_of, beat.fragments)))


def _nothing_of(said: FragmentBeat) -> FragmentBeat:
    return FragmentBeat(said.fragment, -1, b"", 0, 0, 0, False, ())
