"""Accusations of a wrong sum: what went in is asked for, the sum is done here, one of the two has lied.  Pure.

Part of the audits (audit_desk.py).  An accuser shows the contributions to the one chunk; their authors signed their
hashes, and the owner signed which contributions it had, their weights, and what it made of them.  In a mesh it shows
the sums of groups to a result, for which its root signed.  So nobody is
believed: either the accuser shows these very bytes and their sum is another one, which is proof against the owner for
anybody, or it gets a strike.  Where auditors do not get what goes in, its authors show it here, so that hiding it from
them gains nothing.  The only bytes of a model that a coordinator ever sees are such a chunk's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from farflung.coordinator.audits.one_sum import OneSum
from farflung.coordinator.court.questions import MemberAnswer, WantedProof
from farflung.coordinator.ledger.records import FoundCheating
from farflung.coordinator.rounds.committed_sums import CommittedSums
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import BULK_SLACK_BYTES, PROOF_BYTES_MOST, ROUNDS_KEPT
from farflung.protocol.messages import What

OPEN_MOST = 4  # cases at once: each may need much memory
WENT_IN = {What.CONTRIBUTION: "the contributions", What.SUM: "the sums of groups"}
OF_AUTHOR = {What.CONTRIBUTION: "what it contributed", What.SUM: "what it added up of its group"}


@dataclass
class SumCase:
    sum: OneSum
    accuser: str  # empty: nobody says that it is wrong, but no auditor could look
    asked: dict[int, str] = field(default_factory=dict)  # question -> of whom it asks to see what went in
    shown: dict[str, bytes] = field(default_factory=dict)
    process: bytes = b""  # of the accuser


class SumCases:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._cases: list[SumCase] = []
        self._refused: set[tuple[str, int]] = set()  # (author, round): it was struck for that once
        self.struck: list[str] = []

    # ---- what is asked -------------------------------------------------------------------------------

    def accuse(self, accused: OneSum, accuser: Member) -> bool:
        """False: not now; it will say so again."""
        maker, authors = accused.maker, accused.authors
        if self._is_out(maker):
            return True
        busy = any(case.accuser == accuser.peer for case in self._cases)
        if busy or len(self._cases) >= OPEN_MOST or len(authors) * self._most > PROOF_BYTES_MOST:
            return False
        name = self._core.name
        told = f"{name(accuser.peer)} says that {name(maker)} summed {accused.told} wrongly"
        self._core.note(f"{told}; {WENT_IN[accused.what]} are asked for")
        case = SumCase(accused, accuser.peer, process=accuser.process)
        self._open(case, dict.fromkeys(authors, accuser.peer))
        return True

    def look(self, audited: OneSum) -> bool:
        """Auditors say that they do not get what goes in: each author is to show its own.  False: not now."""
        authors, round_no = audited.authors, audited.of.plan.round_no
        lost = not all(self._is_here(audited, author) for author in authors)
        lost = lost or any((author, round_no) in self._refused for author in authors)
        if lost or self._is_out(audited.maker) or len(authors) * self._most > PROOF_BYTES_MOST:
            return True  # nobody can do that sum again, or need not
        if len(self._cases) >= OPEN_MOST or any(not case.accuser for case in self._cases):
            return False
        self._core.log(f"auditors do not get {WENT_IN[audited.what]} to {audited.told}: they are asked for")
        self._open(SumCase(audited, ""), {author: author for author in authors})
        return True

    def _open(self, case: SumCase, of: Mapping[str, str]) -> None:
        """`of`: who is to show what this author gave."""
        self._cases.append(case)
        for author, peer in of.items():
            case.asked[self._ask(case, peer, author)] = author

    def _is_here(self, audited: OneSum, author: str) -> bool:
        """Another process has not got what it sent any more, and who was moved to another stage gave it up."""
        return self._is_still(author, audited.of.processes.get(author), audited)

    def _is_still(self, peer: str, process: bytes | None, audited: OneSum) -> bool:
        member = self._core.members.alive.get(peer)
        if member is None or member.process != process:
            return False
        return audited.of.plan.fragment in member.standings

    def _strike(self, peer: str, why: str) -> None:
        self.struck.append(peer)
        self._core.strike(peer, why)

    def is_open(self, fragment: int) -> bool:
        return any(case.sum.of.plan.fragment == fragment for case in self._cases)

    def _refute(self, case: SumCase, why: str) -> None:
        if self._is_out(case.sum.maker) or not self._is_still(case.accuser, case.process, case.sum):
            return  # for another sum; or whoever accused it has nothing left to show
        self._strike(case.accuser, why)

    def _is_out(self, peer: str) -> bool:
        return self._core.keeps_out(peer)

    @property
    def _most(self) -> int:
        model = self._core.ledger.model
        return 4 * model.chunk_elements + BULK_SLACK_BYTES if model is not None else 0

    def _ask(self, case: SumCase, of: str, author: str) -> int:
        plan, model = case.sum.of.plan, self._core.ledger.model
        assert model is not None  # or there were no commit
        first = model.fragments(self._core.ledger.fragments)[plan.fragment].first
        wanted = WantedProof(
            case.sum.what,
            plan.fragment,
            plan.version,
            first + case.sum.chunk,
            self._most,
            plan.round_no,
            author,
        )
        return self._core.questions.ask(of, wanted, self._core.now)

    # ---- what is shown -------------------------------------------------------------------------------

    def on_timer(self) -> None:
        for case in list(self._cases):
            if not self._can_be_shown(case):
                self._close(case)

    def _can_be_shown(self, case: SumCase) -> bool:
        if case.accuser:
            return self._is_still(case.accuser, case.process, case.sum)
        version = case.sum.of.commit.version
        if self._core.ledger.books[case.sum.of.plan.fragment].version < version:
            return False  # the run went back
        return all(self._is_here(case.sum, author) for author in case.asked.values())

    def on_answer(self, answer: MemberAnswer) -> bool:
        """False: it is no question of mine."""
        case = next((each for each in self._cases if answer.number in each.asked), None)
        if case is not None:
            self._on_contribution(case, answer, case.asked.pop(answer.number))
        return case is not None

    def _on_contribution(self, case: SumCase, answer: MemberAnswer, author: str) -> None:
        if answer.raw is None or hash_bytes(answer.raw) != case.sum.hash_of(author):
            self._close(case)
            if not case.accuser:
                self._judge_author(case, answer)
                return
            what = (
                f"does not show {WENT_IN[case.sum.what]}: {answer.why_none}"
                if answer.raw is None
                else "shows other bytes"
            )
            self._refute(case, f"it said that a sum is wrong, and {what}")
            return
        case.shown[author] = answer.raw
        if not case.asked:
            self._close(case)
            self._judge(case)

    def _close(self, case: SumCase) -> None:
        self._cases.remove(case)
        for number in case.asked:
            self._core.questions.drop(number)

    def _judge_author(self, case: SumCase, answer: MemberAnswer) -> None:
        """It did not show its own.  Whoever has begun to show it keeps it until all of it is shown."""
        if self._is_here(case.sum, answer.of) and (answer.begun or is_kept(self._core, case.sum.of)):
            what, round_no = OF_AUTHOR[case.sum.what], case.sum.of.plan.round_no
            self._refused = {each for each in self._refused if each[1] >= round_no - 1000}
            self._refused.add((answer.of, round_no))
            self._strike(answer.of, f"it gives nobody {what}, for others to check the sum")

    # ---- who has lied --------------------------------------------------------------------------------

    def _judge(self, case: SumCase) -> None:
        core, judged = self._core, case.sum
        maker, of = judged.maker, judged.of
        if self._is_out(maker):
            return  # for another chunk, while this one was shown
        proof = judged.proof(core.run_id, case.shown)
        problem = proof.problem()
        if problem and not case.accuser:
            return  # it is right
        if problem:
            self._refute(case, f"it said that a sum is wrong which is right: {problem}"[:200])
            return
        name = core.name
        why = f"it summed {judged.told}{core.of(of.plan.fragment)} wrongly"
        core.write(
            FoundCheating(
                peer=maker,
                fragment=of.plan.fragment,
                version=of.commit.version,
                chunk=judged.chunk,
                reason=why,
                evidence=proof.name,
            )
        )
        core.do(KeepProof(proof))
        by = f" by {name(case.accuser)}" if case.accuser else ""
        core.note(f"{name(maker)} is found out{by}: {why}; proof: {proof.name}")
        core.convict(maker, why)


def is_kept(core: Core, sums: CommittedSums) -> bool:
    """Authors still keep what they sent."""
    commit = sums.commit
    book = core.ledger.books[commit.fragment]
    return commit.version <= book.version < commit.version + ROUNDS_KEPT
