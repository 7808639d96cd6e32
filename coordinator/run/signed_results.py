"""The witness of a fragment's rounds: checks what members sign, and keeps it until the round is over.  Pure.

One of the parts of a driver.  Members sign the list of what they send (`Sent`), and owners what they made of it
(`Results`), in a mesh also roots (`SumsOfGroups`); a commit rests on nothing that is not signed.  Whether a sum is
right is not judged here: that is a mode's (coordinator/audits/), which is handed all that was signed with the commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.ledger.records import CommittedRound
from farflung.coordinator.rounds.committed_sums import CommittedSums
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.steps import Done
from farflung.coordinator.rounds.weights import likeness, shortened
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import HASH_BYTES, bits, mask_from_bytes
from farflung.protocol.limits import AMOUNT_MAX
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Decision, GroupSums
from farflung.protocol.signed_words import (
    Results,
    SignedList,
    SumsOfGroups,
    inputs_of,
    is_signed,
    results_part,
)
from farflung.protocol.signed_words import sums_of_groups_part as sums_part
from farflung.protocol.signing import verify

# Shortened to this or less: no honest work is, and the peer's trust begins anew.
FAR_TOO_LONG = 0.1


class SignedResults:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, SignedList] = {}
        # (owner, kind) -> the statement that it was found to have signed last.
        self._proven: dict[tuple[str, type[Results] | type[SumsOfGroups]], bytes] = {}
        self._identities: dict[str, bytes] = {}
        self._weighed: tuple[Decision | None, Mapping[str, float]] = None, {}  # of the decision that stands

    def problem(self, member: Member, sent: Sent) -> str:
        """Why this hash list is none, or empty."""
        before = self._said.get(member.peer)
        if before is not None and before.sent.round_no == sent.round_no:
            return ""  # the first one counts
        if not is_signed(member.identity, self._core.run_id, sent):
            return "its hash list is not signed by it"
        self._said[member.peer] = SignedList(member.identity, sent)
        return ""

    def proven(self, member: Member, flight: Round, report: ProgressReport) -> ProgressReport:
        """The report, without sums that its sender has not signed to be made of what the others sent."""
        decision = flight.merged_by
        if decision is None or report.decision_no != decision.decision_no:
            return report
        if report.sums:
            of_group = self._of_group(member, flight, decision, report.sums)
            if of_group is None or not self._is_proven(member, flight, of_group, report.sums.signature):
                report = replace(report, sums=UNSET)
        if not report.merged:
            return report
        codec = flight.rules.gather_codec
        results: Results | SumsOfGroups = (
            SumsOfGroups.of(decision, codec, report)
            if flight.plan.roots
            else Results.of(flight.plan, decision, codec, report)
        )
        if self._is_proven(member, flight, results, report.signature):
            return report
        return replace(report, merged=b"", merged_hashes=b"", lengths=b"")

    def _of_group(self, member: Member, flight: Round, decision: Decision, sums: GroupSums) -> Results | None:
        """What it signs for, if it is in a group."""
        if not flight.plan.roots or member.peer not in flight.groups.of:
            return None
        if self._weighed[0] is not decision:  # asked of all owners, with every report
            self._weighed = decision, dict(zip(flight.plan.members, decision.weights, strict=True))
        group, weights = flight.groups.members[flight.groups.of[member.peer]], self._weighed[1]
        return Results.of_group(decision, group, tuple(weights[peer] for peer in group), sums)

    def _is_proven(
        self, member: Member, flight: Round, said: Results | SumsOfGroups, signature: bytes
    ) -> bool:
        run_id, kind = self._core.run_id, type(said)
        statement = results_part(run_id, said) if isinstance(said, Results) else sums_part(run_id, said)
        if self._proven.get((member.peer, kind)) == statement:
            return True
        problem = self._problem_of(member, flight, said)
        if not problem and not verify(member.identity, statement, signature):
            problem = "they are not signed by it"
        if problem:
            told = f"results of {member.contact.name} in round {said.round_no} do not count: {problem}"
            self._core.log(told)
            return False
        self._proven[member.peer, kind], self._identities[member.peer] = statement, member.identity
        return True

    def _problem_of(self, member: Member, flight: Round, said: Results | SumsOfGroups) -> str:
        mask = mask_from_bytes(said.chunks)
        if mask & ~flight.groups.shares.get(member.peer, 0):
            return "it does not own these chunks"
        if len(said.hashes) != HASH_BYTES * mask.bit_count():
            return "as many hashes as chunks are due"
        # Whether sums of groups are those that their owners signed is looked at when all words of them are here.
        return self._inputs_problem(flight, said) if isinstance(said, Results) else ""

    @staticmethod
    def _inputs_problem(flight: Round, results: Results) -> str:
        lists = [flight.sent[peer].hashes for peer in results.included]
        chunks = map(_place, bits(mask_from_bytes(results.chunks)))
        due = (hashes[at : at + HASH_BYTES] for at in chunks for hashes in lists)
        if inputs_of(due) != results.inputs:
            return "they are made of other bytes than the members signed"
        return ""

    def on_commit(self, commit: Commit, flight: Round, processes: Mapping[str, bytes]) -> CommittedSums:
        assert flight.decision is not None  # or there were nothing to commit
        said = {peer: each for peer, each in self._said.items() if each.sent.round_no == commit.round_no}
        known = dict(self._identities), dict(processes)
        sums = flight.sums.used(flight.makers, flight.decision)
        made = CommittedSums(flight.plan, flight.decision, commit, said, dict(flight.makers), *known, sums)
        for each in (self._said, self._proven, self._identities):
            each.clear()
        self._core.do(KeepEvidence(commit, tuple(said.values())))
        return made


def _place(chunk: int) -> int:
    return chunk * HASH_BYTES


def record_of(
    core: Core, flight: Round, done: Done, merged: str, counted: Mapping[str, bytes]
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
        at_s=core.clock_s,
    )
    core.tx_at_commit = tx_bytes
    return record
