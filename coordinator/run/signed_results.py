"""The witness of a fragment's rounds: checks what members sign, and keeps it until the round is over.  Pure.

One of the parts of a driver.  Members sign the list of what they send (`Sent`), and owners what they made of it
(`Results`), in a mesh also roots (`SumsOfGroups`); a commit rests on nothing that is not signed.  Whether a sum is
right is not judged here: that is the audit's (audit_desk.py), which is handed all that was signed with the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import UNSET
from msgspec.structs import replace

from farflung.coordinator.ledger.proofs import WrongSum, WrongSumOfSums
from farflung.coordinator.ledger.records import CommittedRound
from farflung.coordinator.rounds.groups import Groups
from farflung.coordinator.rounds.reported import MadeResult
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.signed_sums import MadeSum, Place
from farflung.coordinator.rounds.steps import Done
from farflung.coordinator.rounds.weights import likeness, shortened
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepEvidence
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import HASH_BYTES, bits, full_mask, hash_at, mask_from_bytes
from farflung.protocol.limits import AMOUNT_MAX
from farflung.protocol.messages import ProgressReport, Sent, What
from farflung.protocol.round_words import SUM_CODEC, THE_RESULT, Commit, Decision, DrawnChunk, GroupSums, Plan
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


@dataclass(frozen=True)
class CommittedSums:
    """A commit, and who signed for what it is made of."""

    plan: Plan
    decision: Decision
    commit: Commit
    said: Mapping[str, SignedList]
    makers: Mapping[int, MadeResult]  # by chunk of the fragment
    identities: Mapping[str, bytes]  # of the makers
    processes: Mapping[str, bytes]  # of all members: another one has not got what it sent any more
    # Of a mesh: by (chunk, group), who made the sums that the results are made of.
    sums: Mapping[Place, MadeSum] = field(default_factory=dict)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.plan)

    @cached_property
    def weights(self) -> Mapping[str, float]:
        return dict(zip(self.commit.members, self.commit.weights, strict=True))


@dataclass(frozen=True)
class OneSum:
    """One of these, as somebody else may do it again: what goes in, who has that, who signed for it.

    A flat round has one kind of sum: its results, of contributions.  In a mesh there are two: what each group adds up
    of its members' contributions, and the results, of these sums.  No audit has to know more of a mesh than this tells.
    """

    of: CommittedSums
    chunk: int  # of the fragment
    group: int = THE_RESULT  # what it adds up; or the result

    @property
    def is_known(self) -> bool:
        """Somebody made it, and signed for it."""
        by_group = self.group != THE_RESULT
        return (self.chunk, self.group) in self.of.sums if by_group else self.chunk in self.of.makers

    @property
    def of_groups(self) -> bool:
        """What goes in are sums themselves."""
        return self.group == THE_RESULT and bool(self.of.sums)

    @property
    def what(self) -> What:
        """That goes in."""
        return What.SUM if self.of_groups else What.CONTRIBUTION

    @property
    def maker(self) -> str:
        if self.group != THE_RESULT:
            return self.of.sums[self.chunk, self.group].peer
        return self.of.makers[self.chunk].peer

    @property
    def result(self) -> bytes:
        """Its hash, as its maker signed it."""
        if self.group == THE_RESULT:
            return hash_at(self.of.commit.hashes, self.chunk)
        word = self.of.sums[self.chunk, self.group].word
        return hash_at(word.hashes, (mask_from_bytes(word.chunks) & full_mask(self.chunk)).bit_count())

    @cached_property
    def counted(self) -> list[tuple[str, float]]:
        """(author, weight) of all that goes in, in the order of the sum."""
        groups, weights = self.of.groups, self.of.weights
        if self.of_groups:
            places = ((self.chunk, group) for group in range(len(groups.members)))
            return [(self.of.sums[place].peer, 1.0) for place in places if place in self.of.sums]
        members = self.of.plan.members if self.group == THE_RESULT else groups.members[self.group]
        return [(peer, weights[peer]) for peer in members if weights[peer] > 0.0]

    @property
    def authors(self) -> tuple[str, ...]:
        return tuple(peer for peer, _ in self.counted)

    @property
    def near(self) -> set[str]:
        """Who has a connection to the authors, or some of what goes in: auditors are drawn among these first."""
        return {peer for peer in self.authors if self.of.weights[peer] > 0.0}

    def hash_of(self, author: str) -> bytes:
        """As it signed it."""
        if not self.of_groups:
            return hash_at(self.of.said[author].sent.hashes, self.chunk)
        return OneSum(self.of, self.chunk, self.of.groups.of[author]).result

    def codec_of(self, author: str) -> str:
        return SUM_CODEC if self.of_groups else self.of.plan.codec_of(author)

    @property
    def drawn(self) -> DrawnChunk:
        return DrawnChunk(self.chunk, self.result, b"".join(map(self.hash_of, self.authors)))

    @property
    def told(self) -> str:
        """For people."""
        version = f"of version {self.of.commit.version}"
        if self.group == THE_RESULT:
            return f"chunk {self.chunk} {version}"
        return f"what group {self.group} adds to chunk {self.chunk} {version}"

    def proof(self, run_id: bytes, shown: Mapping[str, bytes]) -> WrongSum | WrongSumOfSums:
        """What convicts its maker, if it is wrong.  `shown`: of each author what went in."""
        of, commit, maker = self.of, self.of.commit, self.maker
        numbers = run_id, commit.fragment, commit.version, self.chunk, of.identities[maker]
        went_in = tuple(shown[author] for author in self.authors)
        if self.of_groups:
            made = of.makers[self.chunk]
            added = SumsOfGroups.of(of.decision, commit.codec, made.report)
            inputs = b"".join(each for chunk in sorted(made.named) for each in made.named[chunk])
            return WrongSumOfSums(*numbers, added, made.report.signature, inputs, went_in)
        said = tuple(of.said[author] for author in self.authors)
        if self.group == THE_RESULT:
            report = of.makers[self.chunk].report
            results = Results.of(of.plan, of.decision, commit.codec, report)
            return WrongSum(*numbers, results, report.signature, said, went_in)
        word = of.sums[self.chunk, self.group].word
        group = of.groups.members[self.group]
        results = Results.of_group(of.decision, group, tuple(of.weights[peer] for peer in group), word)
        return WrongSum(*numbers, results, word.signature, said, went_in)


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
        sums = flight.sums_used() if flight.plan.roots else {}
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
