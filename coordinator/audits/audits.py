"""Audits: some sums of each commit are computed again by another member, and whoever made a wrong one is convicted;
digests that members contradict each other about are judged.

Where the mode begins.  Pure.  The core gathers what members sign (coordinator/run/digest_agreement.py) and asks members
to show what they hold; this draws, assigns and judges.  Without this folder no sum is computed again, and of two
digests the one that most hold stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from farflung.coordinator.audits.dispute import DigestJudge
from farflung.coordinator.court.proofs import WrongSum, WrongSumOfSums
from farflung.coordinator.court.questions import MemberAnswer, WantedProof
from farflung.coordinator.ledger.records import Record
from farflung.coordinator.modes.registry import CoordinatorMode, Dice, DigestCase, ModeTools
from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.rounds.reported import CommittedSums
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.effects import KeepProof
from farflung.coordinator.run.membership import Member
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.digests import full_mask, hash_at, hash_bytes, mask_from_bytes
from farflung.protocol.errors import Verdict
from farflung.protocol.limits import AUDITED_AT_ONCE, BULK_SLACK_BYTES, PROOF_BYTES_MOST, ROUNDS_KEPT
from farflung.protocol.messages import FromMember, What
from farflung.protocol.mode_words import AuditChunks, Audited, DrawnChunk
from farflung.protocol.round_words import SUM_CODEC, THE_RESULT
from farflung.protocol.signed_words import Results, SumsOfGroups

# ---- record ------------------------------------------------------------------------------------------------


class FoundCheating(Record, frozen=True, kw_only=True, tag="found_cheating"):
    """A member's own signature convicts it: the file `evidence` shows that to anybody (court/proofs.py)."""

    peer: str
    fragment: int
    version: int
    chunk: int
    reason: str
    evidence: str


RECORDS = (FoundCheating,)

# ---- audit desk --------------------------------------------------------------------------------------------
# Audits of sums: some of each commit are drawn, and somebody else than their maker merges them again. Pure.
#
# Told of every commit after it was written: who made what was not to know which chunks would be looked at. An
# auditor is drawn among those who were in the round. Its word alone means little: "right" ends the matter
# (another one may be drawn next time), "wrong" opens a case that is decided by bytes, and so does a sum to
# which auditors do not get all that goes in. Authors keep their contributions until `ROUNDS_KEPT` later
# commits.

# ---- one sum -----------------------------------------------------------------------------------------------
# One sum of a commit, as somebody else than its maker computes it again, and the proof if it is wrong. Pure.


@dataclass(frozen=True)
class OneSum:
    """What goes in, who has that, who signed for it.

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


# ---- sum cases ---------------------------------------------------------------------------------------------
# Accusations of a wrong sum: what went in is asked for, the sum is done here, one of the two has lied. Pure.
#
# Part of the audits. An accuser shows the contributions to the one chunk; their authors
# signed their hashes, and the owner signed which contributions it had, their weights, and what it made of
# them. In a mesh it shows the sums of groups to a result, for which its root signed. So nobody is believed:
# either the accuser shows these very bytes and their sum is another one, which is proof against the owner for
# anybody, or it gets a strike. Where auditors do not get what goes in, its authors show it here, so that
# hiding it from them gains nothing. The only bytes of a model that a coordinator ever sees are such a
# chunk's.

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
        first = model.fragments(self._core.ledger.rules.fragments)[plan.fragment].first
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


# ---- audit desk --------------------------------------------------------------------------------------------

TELL_AGAIN_S = 5.0
AUDITORS_MOST = 3  # of one chunk, one after the other: they are lost, or can't get what they need
IN_VAIN_MOST = 2  # auditors that do not get what goes in, before its authors are asked here


Key = tuple[int, int, int]  # round, group or the result, chunk


@dataclass
class DrawnAudit:
    """One that was drawn."""

    sum: OneSum
    auditor: str = ""
    process: bytes = b""
    told_at: float = 0.0
    tried: set[str] = field(default_factory=set)
    in_vain: int = 0  # auditors that did not get what goes in

    @property
    def key(self) -> Key:
        return self.sum.of.plan.round_no, self.sum.group, self.sum.chunk


class AuditDesk:
    def __init__(self, core: Core, random: Callable[[int], bytes]) -> None:
        self._core = core
        self._dice = Dice(random)
        self._tasks: dict[Key, DrawnAudit] = {}
        self.cases = SumCases(core)

    @property
    def open(self) -> Iterable[DrawnAudit]:
        return self._tasks.values()

    def is_busy_with(self, fragment: int) -> bool:
        """An auditor of it has not answered yet, or somebody called a sum of it wrong."""
        audited = any(task.sum.of.plan.fragment == fragment for task in self._tasks.values())
        return audited or self.cases.is_open(fragment)

    # ---- drawing -------------------------------------------------------------------------------------

    def on_commit(self, sums: CommittedSums) -> None:
        self._forget_the_old()
        share, count = self._core.manifest.merge.audit, sums.plan.count
        groups = len(sums.groups.members) if sums.sums else 0  # each adds up what its members sent, first
        for place in self._dice.draw(count * (1 + groups), share) if share else ():
            group, chunk = divmod(place, count)
            drawn = OneSum(sums, chunk, group - 1 if group else THE_RESULT)
            task = DrawnAudit(drawn)
            if drawn.is_known and self._assign(task):
                self._tasks[task.key] = task
        self._tell(task for task in self._tasks.values() if task.sum.of is sums)

    def _assign(self, task: DrawnAudit) -> bool:
        """Give it to another one, if there is somebody left."""
        if len(task.tried) >= AUDITORS_MOST:
            return False
        fit = self._candidates(task)
        if not fit:
            return False
        member = fit[self._dice.below(len(fit))]
        task.auditor, task.process, task.told_at = member.peer, member.process, self._core.now
        task.tried.add(member.peer)
        return True

    def _candidates(self, task: DrawnAudit) -> list[Member]:
        """Those who were in the round, first whoever is near to what goes in, and of these whoever others can dial;
        strangers only where there is nobody."""
        core, sums = self._core, task.sum.of
        alive = core.members.alive
        for among in (task.sum.near, set(sums.commit.included)):
            here = [alive[peer] for peer in sorted(among) if peer in alive]
            in_it = [m for m in self._fit(task, here) if self._is_the_same(sums, m)]
            dialable = [member for member in in_it if self._can_be_dialled(member)]
            if dialable or in_it:
                return dialable or in_it
        fit = self._fit(task, [alive[peer] for peer in core.members.in_order])
        return [member for member in fit if self._can_be_dialled(member)] or fit

    def _can_be_dialled(self, member: Member) -> bool:
        return member.dialable and member.place.doubted_until <= self._core.now

    @staticmethod
    def _fit(task: DrawnAudit, here: Iterable[Member]) -> list[Member]:
        maker, fragment = task.sum.maker, task.sum.of.plan.fragment
        return [
            member
            for member in here
            if member.peer != maker
            and member.peer not in task.tried
            and not member.leaving
            and (standing := member.standings.get(fragment)) is not None
            and standing.vouched
        ]

    @staticmethod
    def _is_the_same(sums: CommittedSums, member: Member) -> bool:
        """The process that was in the round: another one has not got what it sent any more."""
        return sums.processes.get(member.peer) == member.process

    def _tell(self, tasks: Iterable[DrawnAudit]) -> None:
        """Each auditor hears together of all chunks of which the same goes in."""
        of: dict[tuple[str, int, int, tuple[str, ...]], list[DrawnAudit]] = {}
        for task in tasks:
            task.told_at = self._core.now
            round_no, group, _ = task.key
            of.setdefault((task.auditor, round_no, group, task.sum.authors), []).append(task)
        members = self._core.members
        for (auditor, *_), mine in of.items():
            for task in mine if len(members.alive) > WHOLE_ROSTER else ():
                members.acquaintances.introduce(auditor, task.sum.authors, self._core.now)
            member = members.alive.get(auditor)
            for at in range(0, len(mine), AUDITED_AT_ONCE):
                if member is not None:
                    self._core.tell(member, AuditChunks, **_fields(mine[at : at + AUDITED_AT_ONCE]))

    # ---- what came of it -------------------------------------------------------------------------------

    def on_audited(self, member: Member, said: Audited) -> Verdict:
        known = False
        for verdict in said.chunks:
            task = self._tasks.get((said.round_no, said.group, verdict.chunk))
            if task is None or task.auditor != member.peer:
                continue  # it was not asked, or not any more
            known = True
            if verdict.wrong:
                if self.cases.accuse(task.sum, member):
                    del self._tasks[task.key]  # what comes of it is the judge's business
            elif verdict.missing:
                self._on_missing(task)
            else:
                del self._tasks[task.key]
        return Verdict.ACCEPTED if known else Verdict.STALE

    def _on_missing(self, task: DrawnAudit) -> None:
        task.in_vain += 1
        commit = task.sum.of.commit
        late = self._core.ledger.books[commit.fragment].version > commit.version  # for another auditor
        if task.in_vain < IN_VAIN_MOST and not late and self._assign(task):
            self._tell([task])
        else:
            self._look(task)

    def _look(self, task: DrawnAudit) -> None:
        """No auditor is left.  Who hides something from them is not to be told from who is hard to reach."""
        task.auditor = ""
        if not task.in_vain or self.cases.look(task.sum):
            del self._tasks[task.key]

    def on_timer(self) -> None:
        self._forget_the_old()
        self.cases.on_timer()
        again: list[DrawnAudit] = []
        for task in list(self._tasks.values()):
            member = self._core.members.alive.get(task.auditor)
            if not task.auditor:
                self._look(task)
            elif member is None or member.process != task.process:
                if self._assign(task):
                    again.append(task)
                else:
                    self._look(task)
            elif self._core.now - task.told_at >= TELL_AGAIN_S:
                again.append(task)
        self._tell(again)

    def _forget_the_old(self) -> None:
        """Their contributions are not kept any more; or the run went back, and the commit is void."""
        for key, task in list(self._tasks.items()):
            if not is_kept(self._core, task.sum.of):
                del self._tasks[key]


def _fields(tasks: list[DrawnAudit]) -> dict[str, object]:
    """Of an `AuditChunks`: of all the same goes in."""
    first = tasks[0].sum
    plan = first.of.plan
    return {
        "round_no": plan.round_no,
        "version": plan.version,
        "fragment": plan.fragment,
        "members": first.authors,
        "weights": tuple(weight for _, weight in first.counted),
        "codecs": tuple(map(first.codec_of, first.authors)),
        "chunks": tuple(task.sum.drawn for task in tasks),
        "group": first.group,
        "of_sums": first.of_groups,
    }


# ---- audits ------------------------------------------------------------------------------------------------


class Audits(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core = core
        self.desk = AuditDesk(core, tools.random)

    def on_committed(self, sums: CommittedSums) -> None:
        self.desk.on_commit(sums)

    def judge(self, fragment: int, undefended: bool) -> DigestCase:
        return DigestJudge(self._core, fragment, undefended)

    def busy_with(self, fragment: int) -> str:
        return (
            "chunks of its last versions are merged again by others"
            if self.desk.is_busy_with(fragment)
            else ""
        )

    def on_message(self, peer: str, message: FromMember) -> Verdict | None:
        if not isinstance(message, Audited):
            return None
        return self.desk.on_audited(self._core.members.members[peer], message)

    def on_answer(self, answer: MemberAnswer) -> bool:
        return self.desk.cases.on_answer(answer)

    def on_timer(self) -> bool:
        self.desk.on_timer()
        return False


made = Audits
