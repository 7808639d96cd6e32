"""The witness of a fragment's rounds: checks what members sign, and keeps it until the round is over.  Pure.

One of the parts of a conductor.  Members sign the list of what they send (`Sent`), and owners what they made of it
(`Results`); a commit rests on nothing that is not signed.  Whether a sum is right is not judged here: that is the
audit's (auditing.py), which is handed all that was signed with the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from farflung.coordinator.ledger.records import CommittedRound
from farflung.coordinator.rounds.in_flight import InFlight
from farflung.coordinator.rounds.reported import Made
from farflung.coordinator.rounds.steps import Done
from farflung.coordinator.rounds.weighting import likeness, shortened
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import HASH_BYTES, bits, mask_from_bytes
from farflung.protocol.limits import AMOUNT_MAX
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Decision, Plan
from farflung.protocol.signed_words import Results, Said, inputs_of, is_signed, results_part
from farflung.protocol.signing import verify

# Shortened to this or less: no honest work is, and the peer's trust begins anew.
FAR_TOO_LONG = 0.1


@dataclass(frozen=True)
class CommittedSums:
    """A commit, or what is to be one, and who signed for what it is made of."""

    plan: Plan
    decision: Decision
    commit: Commit
    said: Mapping[str, Said]
    makers: Mapping[int, Made]  # by chunk of the fragment
    identities: Mapping[str, bytes]  # of the makers
    processes: Mapping[str, bytes]  # of all members: another one has not got what it sent any more


class Witness:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, Said] = {}
        self._proven: dict[str, bytes] = {}  # owner -> the statement that it was found to have signed last
        self._identities: dict[str, bytes] = {}

    def problem(self, member: Member, sent: Sent) -> str:
        """Why this hash list is none, or empty."""
        before = self._said.get(member.peer)
        if before is not None and before.sent.round_no == sent.round_no:
            return ""  # the first one counts
        if not is_signed(member.identity, self._core.run_id, sent):
            return "its hash list is not signed by it"
        self._said[member.peer] = Said(member.identity, sent)
        return ""

    def proven(self, member: Member, flight: InFlight, report: ProgressReport) -> ProgressReport:
        """The report, without results that its sender has not signed to be made of what the others sent."""
        decision = flight.decision
        if not report.merged or decision is None or report.decision_no != decision.decision_no:
            return report
        seen = flight.plan_for(member.peer), flight.decision_for(member.peer, decision)
        results = Results.of(*seen, flight.rules.gather_codec, report)
        statement = results_part(self._core.run_id, results)
        if self._proven.get(member.peer) == statement:
            return report
        problem = self._problem_of(member, flight, results)
        if not problem and not verify(member.identity, statement, report.signature):
            problem = "they are not signed by it"
        if problem:
            told = f"results of {member.contact.name} in round {report.round_no} do not count: {problem}"
            self._core.log(told)
            return replace(report, merged=b"", merged_hashes=b"", lengths=b"")
        self._proven[member.peer], self._identities[member.peer] = statement, member.identity
        return report

    def _problem_of(self, member: Member, flight: InFlight, results: Results) -> str:
        mask = mask_from_bytes(results.chunks)
        if mask & ~flight.groups.shares.get(member.peer, 0):
            return "it does not own these chunks"
        if len(results.hashes) != HASH_BYTES * mask.bit_count():
            return "as many hashes as chunks are due"
        if flight.plan.roots:
            return ""  # what went in are sums of groups, and only their owners know their hashes
        lists = [flight.sent[peer].hashes for peer in results.included]
        due = (hashes[at : at + HASH_BYTES] for at in map(_place, bits(mask)) for hashes in lists)
        if inputs_of(due) != results.inputs:
            return "they are made of other bytes than the members signed"
        return ""

    def on_commit(self, commit: Commit, flight: InFlight, processes: Mapping[str, bytes]) -> CommittedSums:
        assert flight.decision is not None  # or there were nothing to commit
        made = self._sums(commit, flight, flight.decision, processes)
        for known in (self._said, self._proven, self._identities):
            known.clear()
        self._core.do(KeepEvidence(commit, tuple(made.said.values())))
        return made

    def before_commit(
        self, flight: InFlight, decision: Decision, processes: Mapping[str, bytes]
    ) -> CommittedSums:
        """As it would be committed: what is not merged yet has no hash."""
        plan = flight.plan
        hashes = b"".join(flight.merged.get(chunk, bytes(HASH_BYTES)) for chunk in range(plan.count))
        codec, weights = flight.rules.gather_codec, decision.weights
        commit = Commit(plan.version + 1, plan.round_no, plan.members, weights, hashes, codec, plan.fragment)
        return self._sums(commit, flight, decision, processes)

    def _sums(
        self, commit: Commit, flight: InFlight, decision: Decision, processes: Mapping[str, bytes]
    ) -> CommittedSums:
        said = {peer: each for peer, each in self._said.items() if each.sent.round_no == commit.round_no}
        known = dict(self._identities), dict(processes)
        return CommittedSums(flight.plan, decision, commit, said, dict(flight.makers), *known)


def _place(chunk: int) -> int:
    return chunk * HASH_BYTES


def record_of(
    core: Core, flight: InFlight, done: Done, merged: str, counted: Mapping[str, bytes]
) -> CommittedRound:
    """What the journal has of a round that is at its end."""
    commit, sent = done.commit, flight.sent
    included = commit.included
    tokens = {m: flight.believed.tokens.get(m, sent[m].tokens) for m in included}
    losses = [(sent[m].loss, tokens[m]) for m in included]
    known = [(loss, weight) for loss, weight in losses if loss is not None and loss == loss]
    weight = sum(w for _, w in known)
    amounts = [m.beat.tx_bytes for m in core.members.members.values() if m.beat is not None]
    tx_bytes = sum(min(amount, AMOUNT_MAX) for amount in amounts)
    record = CommittedRound(
        commit=commit,
        used={m: sent[m].used for m in included},
        excluded=dict(flight.excluded),
        tokens=sum(tokens.values()),
        tokens_by=tokens,
        rate=flight.believed.rate,
        steps=sum(min(sent[m].steps, AMOUNT_MAX) for m in included),
        loss=sum(loss * w for loss, w in known) / weight if weight else None,
        seconds=core.now - flight.opened_at,
        tx_bytes=max(0, tx_bytes - core.tx_at_commit),
        merged=merged,
        clipped=shortened(flight.screening, flight.believed, included),
        suspects=flight.suspects(FAR_TOO_LONG),
        norm=done.norm,
        groups=flight.plan.groups or (),
        cosine=likeness(flight.screening, included),
        counted=dict(counted),
    )
    core.tx_at_commit = tx_bytes
    return record
