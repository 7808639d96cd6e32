"""Conducts the rounds: opens them when due, moves them on, commits them, and settles the digest of a version.

One of the two halves of the run machine (the other is run.py, which listens to members).  Pure.
Each decision leaves a reason in `reason`, which the status shows.
"""

from __future__ import annotations

from collections import Counter

from farflung.collectives import shares
from farflung.collectives.ladder import AUTO, BITS_PER_VALUE, LADDER, codecs_by_member
from farflung.collectives.limits import MEMBERS_PER_ROUND
from farflung.collectives.plan import Plan
from farflung.coordinator.core import Core
from farflung.coordinator.membership import Member
from farflung.coordinator.messages import Aborted, Committed, Decided, OpenRound, Sent
from farflung.coordinator.records import AbortedRound, CommittedRound, DecidedOn, DigestFixed, Opened
from farflung.coordinator.rounds import Done, Failed, InFlight, Moved, RoundRules, Settled, Waiting

RETRY_S = 1.0  # after an abort; doubles with each further abort of the same version
RETRY_MAX_S = 30.0


class Conductor:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.round: InFlight | None = None
        self.processes: dict[str, bytes] = {}  # which process of each member the round counts on
        self.reason = "starting"
        self._not_before = 0.0
        self._aborts = 0
        self._tx_at_commit = 0
        self._committed_at = 0.0
        self._codecs: dict[str, str] = {}  # what each peer was given last, where the run leaves it open

    @property
    def since_commit_s(self) -> float:
        return self.core.now - self._committed_at

    # ---- opening -------------------------------------------------------------------------------------

    def maybe_open(self) -> None:
        core = self.core
        if self.round is not None or core.finished:
            self.reason = self.reason if self.round is not None else "finished"
            return
        able = [m for m in core.members.alive.values() if m.verified]
        ready = [m for m in able if self._is_ready(m)]
        why_not = self._why_not_open(able, ready)
        if why_not:
            self.reason = why_not
            return
        # Who was left out last time comes first, where not all fit into one round.
        ready.sort(key=lambda m: (-m.missed, m.ready_since or 0.0, m.joined_no))
        self._open(sorted(m.peer for m in ready[:MEMBERS_PER_ROUND]))

    def _is_ready(self, member: Member) -> bool:
        beat, ledger = member.beat, self.core.ledger
        return beat is not None and beat.ready and beat.version == ledger.version and beat.round_no == 0

    def _why_not_open(self, able: list[Member], ready: list[Member]) -> str:
        rules, now = self.core.manifest.round, self.core.now
        least = self.core.manifest.run.min_peers
        if len(able) < least:
            return f"{len(able)} of at least {least} peers hold version {self.core.ledger.version}"
        if len(ready) < least:
            return f"inner steps: {len(ready)} of at least {least} peers are ready"
        if now < self._not_before:
            return f"the last round failed; trying again in {self._not_before - now:.1f} s"
        first = min(m.ready_since for m in ready if m.ready_since is not None)
        if len(ready) < len(able) and now < first + rules.deadline_s:
            left_s = first + rules.deadline_s - now
            return f"inner steps: {len(ready)} of {len(able)} ready, at most {left_s:.1f} s more"
        if not {m.peer for m in ready} & self.core.members.can_own(self.core.now):
            return "no ready peer can be dialled, so nobody can own a chunk"
        return ""

    def _open(self, peers: list[str]) -> None:
        core, manifest = self.core, self.core.manifest
        assert core.ledger.model is not None
        codecs = self._codecs_for(peers)
        owners = shares.assign(
            core.ledger.model.chunk_count,
            peers,
            core.members.can_own(core.now),
            [self._rates(peer, codec) for peer, codec in zip(peers, codecs, strict=True)],
            BITS_PER_VALUE[manifest.round.gather_codec],
        )
        plan = Plan(core.ledger.round_no + 1, 1, core.ledger.version, tuple(peers), owners, codecs)
        rules = RoundRules(
            manifest.run.min_peers,
            manifest.round.scatter_grace_s,
            manifest.round.round_timeout_s,
            manifest.round.weight_cap,
            manifest.round.gather_codec,
        )
        core.write(Opened(plan=plan))
        self.round = InFlight(plan, rules, core.now)
        self.processes = {peer: core.members.members[peer].process for peer in peers}
        core.log(f"round {plan.round_no} opened from version {plan.version} with {_peers(len(peers))}")
        self._tell_members(OpenRound, plan=plan)

    def _codecs_for(self, peers: list[str]) -> tuple[str, ...]:
        """The codec of each one's contribution: the run's, or what its line can carry in time."""
        core, rules = self.core, self.core.manifest.round
        if rules.codec != AUTO:
            return (rules.codec,) * len(peers)
        assert core.ledger.model is not None
        values = core.ledger.model.chunk_count * core.ledger.model.chunk_elements
        sizes = {name: int(values * BITS_PER_VALUE[name] / 8) for name in LADDER}
        up = {peer: self._rates(peer, LADDER[0]).up_bytes_per_s for peer in peers}
        chosen = codecs_by_member(sizes, up, rules.scatter_grace_s, {}, self._codecs)
        self._codecs |= chosen
        return tuple(chosen[peer] for peer in peers)

    def _rates(self, peer: str, codec: str) -> shares.Rates:
        beat = self.core.members.members[peer].beat
        assert beat is not None, "a peer that never spoke is not ready"
        return shares.Rates(beat.up_bytes_per_s or None, beat.down_bytes_per_s or None, BITS_PER_VALUE[codec])

    # ---- moving on -----------------------------------------------------------------------------------

    def counts_on(self, member: Member) -> bool:
        """The round in flight counts on this very process."""
        return self.round is not None and self.processes.get(member.peer) == member.process

    def on_sent(self, member: Member, sent: Sent) -> None:
        assert self.round is not None
        problem = self.core.ledger.leases.problem(member.peer, sent.used)
        if problem and member.peer not in self.round.sent:
            self.round.barred[member.peer] = problem
        why = self.round.on_sent(member.peer, sent)
        if why:
            self.core.note(f"{self.core.name(member.peer)} is out of round {sent.round_no}: {why}")

    def on_restart(self, peer: str) -> None:
        """A member came back as another process: what its former self sent may not be acknowledged twice."""
        if self.round is not None and peer in self.round.plan.members and self.round.decision is None:
            self.round.barred[peer] = "it restarted during the round"

    def advance(self) -> None:
        """Take every transition that is due now."""
        while self.round is not None:
            alive = {p for p, m in self.core.members.alive.items() if self.counts_on(m)}
            step = self.round.next_step(self.core.now, alive, self.core.members.can_own(self.core.now))
            match step:
                case Waiting(reason):
                    self.reason = reason
                    return
                case Moved(plan, reason, unfit):
                    self.core.members.doubt(unfit, self.core.now)
                    self.core.note(f"round {plan.round_no}, epoch {plan.epoch}: {reason}")
                    self.core.write(Opened(plan=plan))
                    self._tell_members(OpenRound, plan=plan)
                case Settled(decision, reason):
                    self.core.write(DecidedOn(decision=decision))
                    for peer, why in decision.reasons.items():
                        self.core.note(f"{self.core.name(peer)} is not in round {decision.round_no}: {why}")
                    self._tell_members(Decided, decision=decision)
                    self.reason = reason
                case Failed(reason):
                    self.abort(reason)
                case Done():
                    self._commit(step)

    def abort(self, reason: str) -> None:
        assert self.round is not None
        number = self.round.plan.round_no
        self.core.write(AbortedRound(round_no=number, reason=reason))
        self.core.note(f"round {number} aborted: {reason}; local work is kept")
        self._tell_members(Aborted, round_no=number, reason=reason)
        self.round = None
        self._aborts += 1
        self._not_before = self.core.now + min(RETRY_MAX_S, RETRY_S * 2 ** (self._aborts - 1))

    def _commit(self, done: Done) -> None:
        assert self.round is not None
        core, commit, sent = self.core, done.commit, self.round.sent
        assert self.round.decision is not None
        included = commit.included
        losses = [(sent[m].loss, sent[m].tokens) for m in included]
        tokens = sum(sent[m].tokens for m in included)
        known = [(loss, weight) for loss, weight in losses if loss is not None and loss == loss]
        weight = sum(w for _, w in known)
        tx_bytes = sum(m.beat.tx_bytes for m in core.members.members.values() if m.beat is not None)
        core.write(
            CommittedRound(
                commit=commit,
                used={m: sent[m].used for m in included},
                excluded=dict(self.round.decision.reasons),
                tokens=tokens,
                steps=sum(sent[m].steps for m in included),
                loss=sum(loss * w for loss, w in known) / weight if weight else None,
                seconds=core.now - self.round.opened_at,
                tx_bytes=max(0, tx_bytes - self._tx_at_commit),
            )
        )
        self._tx_at_commit = tx_bytes
        self._aborts, self._not_before, self._committed_at = 0, 0.0, core.now
        self.round = None
        self._count_participation(included)
        core.log(
            f"version {commit.version} committed by round {commit.round_no} with {_peers(len(included))}"
        )
        for member in core.members.alive.values():
            member.verified = False  # until it shows the digest of the new version
            if member.vouched:  # others would roll results onto a state that is not the run's
                core.tell(member, Committed, commit=commit)

    def _count_participation(self, included: tuple[str, ...]) -> None:
        for peer, member in self.core.members.alive.items():
            if peer in included:
                member.missed = 0
            elif member.verified:
                member.missed += 1

    def _tell_members(self, kind: type, **body: object) -> None:
        assert self.round is not None
        for peer in self.round.plan.members:
            member = self.core.members.members.get(peer)
            if member is not None and member.alive and self.counts_on(member):
                self.core.tell(member, kind, **body)

    # ---- the digest of a version -----------------------------------------------------------------------

    def maybe_fix_digest(self) -> bool:
        """Settle the digest of a version that has just been made.  True when it was settled now."""
        ledger = self.core.ledger
        version = ledger.version
        if version == 0 or version in ledger.digests:
            return False
        reports = {
            m.joined_no: m.beat.digest
            for m in self.core.members.alive.values()
            # Who speaks for a new version: peers that have shown the run's state before, in whatever session.
            if m.peer in ledger.vouched and m.beat is not None and m.beat.version == version and m.beat.digest
        }
        if not reports:
            return False
        digest, agreeing = Counter(reports.values()).most_common(1)[0]
        patience_over = self.since_commit_s >= 2 * self.core.manifest.net.dead_after_s
        still_to_come = any(
            m.peer in ledger.vouched and m.beat is not None and 0 <= m.beat.version < version
            for m in self.core.members.alive.values()
        )
        if agreeing < 2 and still_to_come and not patience_over:
            return False  # one voice alone decides only when no other voice will be heard soon
        if agreeing < 2:
            digest = reports[min(reports)]
        self.core.write(DigestFixed(version=version, digest=digest))
        return True


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"
