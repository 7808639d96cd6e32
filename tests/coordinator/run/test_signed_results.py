"""P19: a commit rests on results that their makers signed to have made of what the others signed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.run.digest_agreement import SignedResults
from farflung.coordinator.run.membership import Member
from farflung.protocol.digests import hash_bytes, mask_to_bytes
from farflung.protocol.messages import ProgressReport
from farflung.protocol.round_words import Contact
from farflung.protocol.signed_words import Results, results_part
from rig.made_run import MadeRun
from rig.made_sums import RUN_ID, MadeSums, process_of

RULES = RoundRules(min_peers=2, scatter_grace_s=10.0, round_timeout_s=60.0, gather_codec="fp32")


class Stand:
    """Three owners that made what `MadeSums` made, and a witness of their round."""

    def __init__(self) -> None:
        self.made = MadeSums()
        run = MadeRun()
        run.core.run_id = RUN_ID
        self.witness = SignedResults(run.core)
        self.flight = Round(self.made.plan, RULES, 0.0)
        self.flight.decision = self.made.decision
        self.members: dict[str, Member] = {}
        for key in self.made.keys:
            peer, process = key.peer_id, process_of(key.peer_id)
            contact = Contact(peer, peer, bytes(32), f"{peer}:1")
            self.members[peer] = member = run.core.members.admit(contact, process, process, 0.0)
            member.identity = key.public
            sent = self.made.said(key).sent
            assert not self.witness.problem(member, sent)
            self.flight.on_sent(peer, sent)

    def hears(self, chunk: int, report: ProgressReport) -> bytes:
        """What of its results counts."""
        return self.witness.proven(self.members[self.made.members[chunk]], self.flight, report).merged

    def signed(self, chunk: int, report: ProgressReport) -> ProgressReport:
        results = Results.of(self.made.plan, self.made.decision, "fp32", report)
        return replace(report, signature=self.made.keys[chunk].sign(results_part(RUN_ID, results)))


@pytest.mark.parametrize("chunk", range(3))
def test_what_an_owner_signed_counts(chunk: int) -> None:
    stand = Stand()
    assert stand.hears(chunk, stand.made.report(chunk)) == mask_to_bytes(1 << chunk)


def test_results_that_are_signed_by_somebody_else_or_by_nobody_do_not_count() -> None:
    stand = Stand()
    report = stand.made.report(1)
    assert not stand.hears(1, replace(report, signature=b""))
    assert not stand.hears(1, stand.signed(0, report))
    assert not stand.hears(1, replace(report, merged_hashes=hash_bytes(b"other bytes")))


def test_results_that_are_made_of_other_bytes_than_the_members_signed_do_not_count() -> None:
    stand = Stand()
    assert not stand.hears(1, stand.signed(1, replace(stand.made.report(1), inputs=hash_bytes(b"others"))))


def test_nobody_signs_for_a_chunk_that_is_not_its_own() -> None:
    """It might be made to commit what another one would have to answer for."""
    stand = Stand()
    report = stand.made.report(0)
    assert stand.hears(0, report)
    assert not stand.hears(1, stand.signed(1, report))


def test_results_made_by_what_is_foreseen_are_heard_and_checked_like_others() -> None:
    stand = Stand()
    stand.flight.decision, stand.flight.foreseen = None, replace(stand.made.decision, foreseen=True)
    report = stand.made.report(1)
    assert stand.hears(1, report) == mask_to_bytes(0b10)
    assert not stand.hears(1, stand.signed(1, replace(report, inputs=hash_bytes(b"others"))))
    assert not stand.hears(0, replace(stand.made.report(0), signature=b""))
    stand.flight.decision = stand.made.decision
    assert stand.hears(1, report) == mask_to_bytes(0b10), "the same word convicts, if it is wrong"
