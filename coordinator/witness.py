"""The witness of one fragment's rounds: it checks the signed hash lists as they come.  Pure.

Part of the conductor.  It hands the lists over with the commit that they led to; what they prove is told in
evidence.py.  Must not know files, or who is right.
"""

from __future__ import annotations

from farflung.collectives.plan import Commit
from farflung.coordinator.core import Core
from farflung.coordinator.effects import KeepEvidence
from farflung.coordinator.evidence import Said, is_signed
from farflung.coordinator.membership import Member
from farflung.coordinator.messages import Sent


class Witness:
    """Checks each hash list once, and keeps it until its round is over."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._said: dict[str, Said] = {}

    def problem(self, member: Member, sent: Sent) -> str:
        """Why this hash list is none, or empty."""
        before = self._said.get(member.peer)
        if before is not None and before.sent.round_no == sent.round_no:
            return ""  # the first one counts
        if not is_signed(member.identity, self._core.run_id, sent):
            return "its hash list is not signed by it"
        self._said[member.peer] = Said(member.identity, sent)
        return ""

    def on_commit(self, commit: Commit) -> None:
        said = [each for each in self._said.values() if each.sent.round_no == commit.round_no]
        self._said.clear()
        self._core.do(KeepEvidence(commit, tuple(said)))
