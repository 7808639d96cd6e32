"""Audits of sums: some of each commit are drawn, and somebody else than their maker merges them again.  Pure.

Told of every commit after it was written: who made what was not to know which chunks would be
looked at.  An auditor is drawn among those who were in the round.  Its word alone means little: "right" ends the matter
(another one may be drawn next time), "wrong" opens a case that is decided by bytes (sum_cases.py), and so does a sum
to which auditors do not get all that goes in.  Authors keep their contributions until `ROUNDS_KEPT` later commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from farflung.coordinator.audits.one_sum import OneSum
from farflung.coordinator.audits.sum_cases import SumCases, is_kept
from farflung.coordinator.roster.partial_view import WHOLE_ROSTER
from farflung.coordinator.rounds.committed_sums import CommittedSums
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.membership import Member
from farflung.protocol.limits import AUDITED_AT_ONCE
from farflung.protocol.messages import AuditChunks, Audited
from farflung.protocol.round_words import THE_RESULT
from farflung.protocol.verdicts import Verdict

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
        return member.dialable and member.doubted_until <= self._core.now

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


class Dice:
    """What nobody can foresee, out of random bytes."""

    def __init__(self, random: Callable[[int], bytes]) -> None:
        self._random = random

    def below(self, count: int) -> int:
        return int.from_bytes(self._random(8), "little") * count >> 64

    def draw(self, count: int, share: float) -> list[int]:
        """Some of so many places, each one as likely as any other; how many is the share on average."""
        due = share * count
        many = int(due) + (self.below(1 << 32) < (due - int(due)) * (1 << 32))
        places = list(range(count))
        for at in range(many):
            other = at + self.below(count - at)
            places[at], places[other] = places[other], places[at]
        return sorted(places[:many])
