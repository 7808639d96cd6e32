"""Audits: some sums of each commit are computed again by another member, and whoever made a wrong one is convicted;
digests that members contradict each other about are judged.

Where the mode begins.  Pure.  The core gathers what members sign (coordinator/run/digest_agreement.py) and asks members
to show what they hold; this draws, assigns and judges.  Without this folder no sum is computed again, and of two
digests the one that most hold stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from farflung.coordinator.audits.audit_desk import AuditDesk
from farflung.coordinator.audits.dispute import DigestJudge
from farflung.coordinator.court.questions import MemberAnswer
from farflung.coordinator.modes.registry import CoordinatorMode, DigestCase, ModeTools
from farflung.coordinator.rounds.reported import CommittedSums
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol.errors import Verdict
from farflung.protocol.messages import Audited, FromMember


class Audits(CoordinatorMode):
    def __init__(self, core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> None:
        self._core = core
        self.desk = AuditDesk(core, tools.random)

    def on_committed(self, sums: CommittedSums) -> None:
        self.desk.on_commit(sums)

    def judge(self, fragment: int, undefended: bool) -> DigestCase:
        return DigestJudge(self._core, fragment, undefended)

    def is_busy_with(self, fragment: int) -> bool:
        return self.desk.is_busy_with(fragment)

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
