"""Accusations of a wrong sum: what went in is asked for, the sum is done here, one of the two has lied.  Pure.

Part of the audits (audit_desk.py).  An accuser shows the contributions to the one chunk; their authors signed their
hashes, and the owner signed which contributions it had, their weights, and what it made of them.  In a mesh it shows
the sums of groups to a result, for which its root signed.  So nobody is
believed: either the accuser shows these very bytes and their sum is another one, which is proof against the owner for
anybody, or it gets a strike.  The only bytes of a model that a coordinator ever sees are such a chunk's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.coordinator.audits.one_sum import OneSum
from farflung.coordinator.court.questions import MemberAnswer, WantedProof
from farflung.coordinator.ledger.records import FoundCheating
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
    accuser: str
    asked: dict[int, str] = field(default_factory=dict)  # question -> of whom it asks to see what went in
    shown: dict[str, bytes] = field(default_factory=dict)


class SumCases:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._cases: list[SumCase] = []
        self._authors: dict[int, SumCase] = {}  # question to an author itself -> what it is about
        self._asked_authors: set[tuple[str, int, What]] = set()  # (author, round, what of it)
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
        case = SumCase(accused, accuser.peer)
        self._cases.append(case)
        for author in authors:
            case.asked[self._ask(case, accuser.peer, author)] = author
        return True

    def ask_author(self, audited: OneSum, author: Member) -> None:
        """Auditors say that it does not give what went in of it.  Once a round it has to show that it would."""
        key = (author.peer, audited.of.plan.round_no, audited.what)
        if key in self._asked_authors:
            return
        self._asked_authors = {each for each in self._asked_authors if each[1] >= key[1] - 1000} | {key}
        case = SumCase(audited, "")
        self._authors[self._ask(case, author.peer, author.peer)] = case

    def _strike(self, peer: str, why: str) -> None:
        self.struck.append(peer)
        self._core.strike(peer, why)

    def is_open(self, fragment: int) -> bool:
        return any(case.sum.of.plan.fragment == fragment for case in self._cases)

    def _refute(self, case: SumCase, why: str) -> None:
        if self._is_out(case.sum.maker):
            return  # for another sum, and whoever accused it has nothing left to show
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
            if case.accuser not in self._core.members.alive:
                self._close(case)  # nobody is left to show anything

    def on_answer(self, answer: MemberAnswer) -> bool:
        """False: it is no question of mine."""
        if answer.number in self._authors:
            self._judge_author(self._authors.pop(answer.number), answer)
            return True
        case = next((each for each in self._cases if answer.number in each.asked), None)
        if case is not None:
            self._on_contribution(case, answer, case.asked.pop(answer.number))
        return case is not None

    def _on_contribution(self, case: SumCase, answer: MemberAnswer, author: str) -> None:
        if answer.raw is None or hash_bytes(answer.raw) != case.sum.hash_of(author):
            self._close(case)
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
        commit = case.sum.of.commit
        kept = self._core.ledger.books[commit.fragment].version < commit.version + ROUNDS_KEPT
        member = self._core.members.alive.get(answer.of)
        same = member is not None and case.sum.of.processes.get(answer.of) == member.process
        good = answer.raw is not None and hash_bytes(answer.raw) == case.sum.hash_of(answer.of)
        if same and kept and not good:
            self._strike(
                answer.of, f"it gives nobody {OF_AUTHOR[case.sum.what]}, for others to check the sum"
            )

    # ---- who has lied --------------------------------------------------------------------------------

    def _judge(self, case: SumCase) -> None:
        core, judged = self._core, case.sum
        maker, of = judged.maker, judged.of
        if self._is_out(maker):
            return  # for another chunk, while this one was shown
        proof = judged.proof(core.run_id, case.shown)
        problem = proof.problem()
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
        core.note(f"{name(maker)} is found out by {name(case.accuser)}: {why}; proof: {proof.name}")
        core.convict(maker, why)
