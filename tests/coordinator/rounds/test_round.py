"""A round at the coordinator, as transcripts in virtual time: what is due, for whom, and why (P2, P3, P9).

The bytes are stand-ins: `h(member, chunk)` names a contribution, `h("result", chunk)` a merged chunk.
"""

from __future__ import annotations

import struct
from dataclasses import replace as replace_rules

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from farflung.coordinator.rounds.owners import LastHolders
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import (
    Done,
    Failed,
    Foreseen,
    OwnersMoved,
    RoundCommitted,
    RoundWaits,
    Step,
)
from farflung.coordinator.rounds.round_rules import RoundRules
from farflung.coordinator.rounds.weights import token_weights as weigh
from farflung.protocol.digests import (
    combined,
    hash_bytes,
    in_fewer,
    length_to_bytes,
    mask_from_bytes,
    mask_of,
    mask_to_bytes,
)
from farflung.protocol.errors import AbortCause, Excluded, ExclusionCause, Verdict
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Decision, DotProducts, Plan

ANN, BOB, CYD = "ann", "bob", "cyd"
ALL = (ANN, BOB, CYD)
FP32 = ("fp32",) * 3
SESSION = bytes(16)
RULES = RoundRules(min_peers=2, scatter_grace_s=10.0, round_timeout_s=60.0, gather_codec="fp32")


def h(who: str, chunk: int) -> bytes:
    return hash_bytes(f"{who} {chunk}".encode())


Hashes = dict[int, bytes]  # by chunk


def progress(
    number: int,
    held: dict[str, tuple[bytes, bytes]],
    merged: Hashes,
    got: Hashes,
    dots: DotProducts | None = None,
) -> ProgressReport:
    mask, got_hash = proof(got)
    return ProgressReport(
        lengths=b"",
        got_by={},
        session=SESSION,
        seq=1,
        round_no=1,
        decision_no=number,
        held=held,
        refused={},
        cut_off=(),
        merged=mask_to_bytes(mask_of(merged)),
        merged_hashes=b"".join(merged[chunk] for chunk in sorted(merged)),
        got=mask,
        got_hash=got_hash,
        dots=dots,
        inputs=b"",
        signature=b"",
    )


def proof(chunks: dict[int, bytes]) -> tuple[bytes, bytes]:
    return mask_to_bytes(mask_of(chunks)), combined(chunks.items())


class Room:
    """A round of three over three chunks, one each, and who is alive."""

    def __init__(self, rules: RoundRules = RULES) -> None:
        self.flight = Round(Plan(1, 1, 0, ALL, (0, 1, 2), FP32), rules, opened_at=100.0)
        self.alive = set(ALL)
        self.got: dict[str, dict[int, bytes]] = {member: {} for member in ALL}

    def step(self, after_s: float = 0.0, dialable: set[str] | None = None) -> Step:
        return self.flight.next_step(100.0 + after_s, self.alive, set(ALL) if dialable is None else dialable)

    def sent(self, member: str, tokens: int = 100, steps: int = 1, chunks: int = 3) -> str | None:
        hashes = b"".join(h(member, chunk) for chunk in range(chunks))
        sent = Sent(
            seat=0,
            counted=b"",
            session=SESSION,
            seq=1,
            round_no=1,
            hashes=hashes,
            tokens=tokens,
            steps=steps,
            loss=None,
            used=(),
            signature=b"",
        )
        return self.flight.on_sent(member, sent)

    def holds(self, owner: str, *members: str, wrong: bool = False) -> None:
        """The owner shows the contributions that it holds for its chunks."""
        self._report(owner, {m: {c: h(m, c + wrong) for c in self.chunks_of(owner)} for m in members})

    def has_results(self, member: str, *chunks: int, who: str = "result") -> None:
        """The member has results, and answers for those that it owns."""
        self.got[member] |= {chunk: h(who, chunk) for chunk in chunks}
        self._report(member, {})

    def _report(self, member: str, held: dict[str, dict[int, bytes]]) -> None:
        got = self.got[member]
        merged = {chunk: got[chunk] for chunk in self.chunks_of(member) if chunk in got}
        number = self.flight.merged_by.decision_no if self.flight.merged_by else 0
        shown = {m: proof(chunks) for m, chunks in held.items()}
        self.flight.on_progress(member, progress(number, shown, merged, got))

    def chunks_of(self, member: str) -> list[int]:
        return self.flight.plan.chunks_of(member)

    def scatter(self, tokens: tuple[int, int, int] = (100, 100, 100)) -> None:
        for member, count in zip(ALL, tokens, strict=True):
            self.sent(member, count)
        for member in ALL:
            self.holds(member, *ALL)

    def decided(self) -> Room:
        self.scatter()
        assert isinstance(self.step(), RoundCommitted)
        return self


def test_P9_owners_that_lack_what_most_sent_are_to_blame_for_a_round_in_vain() -> None:
    """There is nobody whose word could be held against the only owner's; but others can own the next round."""
    room = Room()
    room.flight = Round(Plan(1, 1, 0, ALL, (0, 0, 0), FP32), RULES, opened_at=100.0)
    room.sent(ANN)
    room.holds(ANN, ANN)
    nobody = room.step(RULES.round_timeout_s)
    assert isinstance(nobody, Failed) and not nobody.unfit, "nobody has sent anything"
    for member in ALL:
        room.sent(member)
    alone = room.step(RULES.round_timeout_s, {ANN})
    assert isinstance(alone, Failed) and not alone.unfit, "nobody else can own"
    failed = room.step(RULES.round_timeout_s)
    assert isinstance(failed, Failed) and failed.cause is AbortCause.TIMED_OUT and failed.unfit == {ANN}
    room.holds(ANN, ANN, BOB)
    one = room.step(RULES.round_timeout_s - 1)
    assert isinstance(one, RoundCommitted), "one line of two may be slow"


# ---- where the gradient of a batch is clipped -------------------------------------------------------------------


class MeasuringRoom(Room):
    """Each says of chunk c that its result is c + 1 long; `says`: who says otherwise."""

    def __init__(self) -> None:
        super().__init__(replace_rules(RULES, measures=True))
        self.says: dict[str, float] = {}

    def _report(self, member: str, held: dict[str, dict[int, bytes]]) -> None:
        got = self.got[member]
        merged = {chunk: got[chunk] for chunk in self.chunks_of(member) if chunk in got}
        number = self.flight.decision.decision_no if self.flight.decision else 0
        lengths = {chunk: length_to_bytes(self.says.get(member, chunk + 1.0)) for chunk in got}
        report = progress(number, {m: proof(chunks) for m, chunks in held.items()}, merged, got)
        named = combined((chunk, hashed + lengths[chunk]) for chunk, hashed in got.items())
        told = b"".join(lengths[chunk] for chunk in sorted(merged))
        by = {owner: [c for c in got if self.flight.plan.owner_of(c) == owner] for owner in ALL}
        got_by = {owner: combined((c, got[c] + lengths[c]) for c in share) for owner, share in by.items()}
        self.flight.on_progress(member, replace(report, got_hash=named, lengths=told, got_by=got_by))


def test_lengths_that_all_prove_are_those_of_the_round() -> None:
    room = MeasuringRoom()
    room.decided()
    for member in ALL:
        room.has_results(member, 0, 1, 2)
    step = room.step()
    assert isinstance(step, Done) and step.lengths == (1.0, 2.0, 3.0)


def test_P9_an_owner_that_lies_about_a_length_is_one_whose_result_nobody_holds_and_another_merges() -> None:
    room = MeasuringRoom()
    room.says[ANN] = 0.5
    room.decided()
    for member in ALL:
        room.has_results(member, 0, 1, 2)
    step = room.step()
    assert isinstance(step, RoundWaits) and "1 of 3 results not yet held by 2 peers" in step.reason
    moved = room.step(after_s=RULES.round_timeout_s / 2)
    assert isinstance(moved, OwnersMoved) and moved.unfit == {ANN}
    assert ANN not in {moved.plan.owner_of(chunk) for chunk in range(3)}
    for member in (BOB, CYD):
        room.has_results(member, 0, 1, 2)
    step = room.step(after_s=RULES.round_timeout_s / 2)
    assert isinstance(step, Done) and step.lengths == (1.0, 2.0, 3.0)


def test_P9_results_without_lengths_are_not_heard_where_they_are_needed() -> None:
    room = MeasuringRoom()
    room.decided()
    room.got[ANN] = {0: h("result", 0)}
    Room._report(room, ANN, {})
    assert not room.flight.gather.merged
    room.has_results(ANN, 0)
    assert room.flight.gather.merged and room.flight.gather.lengths == {0: 1.0}


# ---- the plain path ----------------------------------------------------------------------------------------


def test_everybody_in_then_decided_then_merged_then_committed() -> None:
    room = Room()
    step = room.step()
    assert step == RoundWaits("scatter: waiting for ann, bob, cyd")

    room.scatter((100, 300, 400))
    step = room.step()
    assert isinstance(step, RoundCommitted)
    assert step.decision.weights == (0.125, 0.375, 0.5)
    assert step.decision.reasons == {}
    assert "every living member" in step.reason

    assert room.step() == RoundWaits("gather: 3 of 3 chunks not merged yet")
    for chunk, owner in enumerate(ALL):
        room.has_results(owner, chunk)
    assert room.step() == RoundWaits("gather: 3 of 3 results not yet held by 2 peers")
    room.has_results(ANN, 0, 1, 2)
    assert room.step() == RoundWaits("gather: 1 of 3 results not yet held by 2 peers")
    room.has_results(BOB, 0)

    step = room.step()
    assert isinstance(step, Done)
    assert (step.commit.version, step.commit.round_no, step.commit.members) == (1, 1, ALL)
    assert step.commit.weights == (0.125, 0.375, 0.5)
    assert step.commit.hashes == b"".join(h("result", chunk) for chunk in range(3))


def test_an_owners_report_that_overtakes_the_hash_list_still_counts() -> None:
    room = Room()
    for owner in ALL:
        room.holds(owner, *ALL)
    for member in ALL:
        assert isinstance(room.step(), RoundWaits)
        room.sent(member)
    assert isinstance(room.step(), RoundCommitted)


def test_what_an_owner_has_no_more_is_waited_for_again() -> None:
    """Of whom all is here is known without looking again, until an owner shows less, or it is another owner."""
    room = Room()
    for member in ALL:
        room.sent(member)
    room.holds(ANN, *ALL), room.holds(BOB, *ALL)
    room.holds(CYD, ANN, BOB)
    assert room.flight.fractions()[0] == 2 and room.step() == RoundWaits("scatter: waiting for cyd")
    room._report(BOB, {ANN: {}})
    assert room.flight.fractions()[0] == 1 and room.step() == RoundWaits("scatter: waiting for ann, cyd")
    room.holds(BOB, *ALL, wrong=True)
    assert room.flight.fractions()[0] == 0, "other bytes are not what was sent"
    room.holds(BOB, *ALL)
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved) and room.flight.fractions()[0] == 0, (
        "its heir has to get them"
    )


def test_a_second_hash_list_changes_nothing() -> None:
    room = Room()
    room.scatter((100, 100, 200))
    room.sent(ANN, tokens=10**9)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.decision.weights == (0.25, 0.25, 0.5)


# ---- who is out, and why -------------------------------------------------------------------------------------


def test_a_straggler_is_out_when_the_grace_window_is_over() -> None:
    room = Room()
    room.sent(ANN), room.sent(BOB)
    for owner in ALL:
        room.holds(owner, ANN, BOB)
    assert room.step(9.9) == RoundWaits("scatter: waiting for cyd")
    step = room.step(10.0)
    assert isinstance(step, RoundCommitted) and "grace" in step.reason
    assert step.decision.weights == (0.5, 0.5, 0.0)
    assert step.decision.reasons == {CYD: "it sent no hash list in time"}


def test_a_contribution_that_is_not_whole_is_out_when_the_grace_window_is_over() -> None:
    room = Room()
    room.scatter()
    room.flight.scatter.held[ANN].pop(CYD)
    step = room.step(10.0)
    assert isinstance(step, RoundCommitted)
    assert step.decision.reasons == {CYD: "its contribution was not whole in time"}


def test_a_member_that_dies_before_its_contribution_is_safe_is_out_at_once() -> None:
    room = Room()
    room.sent(ANN), room.sent(BOB)
    for owner in ALL:
        room.holds(owner, ANN, BOB)
    room.alive.remove(CYD)
    assert isinstance(room.step(), OwnersMoved)
    for owner in (ANN, BOB):
        room.holds(owner, ANN, BOB)
    step = room.step()
    assert isinstance(step, RoundCommitted)
    assert step.decision.reasons == {CYD: "it was lost before its contribution was safe"}


def test_a_wrong_held_hash_bars_the_sender() -> None:
    room = Room()
    room.scatter()
    for owner in (ANN, BOB):
        room.holds(owner, CYD, wrong=True)
    step = room.step()
    assert isinstance(step, RoundCommitted)
    assert step.decision.weights == (0.5, 0.5, 0.0)
    assert "not the bytes it says it sent" in step.decision.reasons[CYD]


def test_P9_one_owner_that_says_it_holds_other_bytes_bars_nobody() -> None:
    room = Room()
    room.scatter()
    room.holds(BOB, CYD, wrong=True)
    assert room.flight.scatter.barred == {} and room.step() == RoundWaits("scatter: waiting for cyd")
    room.holds(BOB, CYD)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.reason == "every living member's contribution is in"


def test_whose_contribution_is_barred_does_not_count_though_every_owner_holds_it() -> None:
    room = Room()
    room.scatter()
    room.flight.scatter.barred[CYD] = Excluded(ExclusionCause.LEASES, "it used samples of others")
    step = room.step()
    assert isinstance(step, RoundCommitted)
    assert (
        step.decision.weights == (0.5, 0.5, 0.0) and step.decision.reasons[CYD] == "it used samples of others"
    )


def test_of_two_members_the_only_one_that_can_tell_is_believed() -> None:
    room = Room()
    room.flight.go_by(Plan(1, 1, 0, (ANN, BOB), (0, 1, 1), FP32[:2]))
    room.sent(ANN), room.sent(BOB)
    room.holds(BOB, ANN, wrong=True)
    assert room.flight.scatter.barred.keys() == {ANN}


# ---- owners that keep the work of others out -----------------------------------------------------------------


def censored(by: str, *members: str) -> Room:
    """An owner says of these members that it has nothing of them; all others have everything."""
    room = Room()
    for member in ALL:
        room.sent(member)
        room.holds(member, *([] if member == by else ALL))
    room.holds(by, *(set(ALL) - set(members)))
    return room


def test_P9_an_owner_that_lacks_what_all_others_have_of_most_loses_its_chunks_and_senders_get_time() -> None:
    room = censored(BOB, ANN, CYD)
    assert room.step(after_s=RULES.scatter_grace_s - 0.1) == RoundWaits("scatter: waiting for ann, cyd")
    step = room.step(after_s=RULES.scatter_grace_s)
    assert isinstance(step, OwnersMoved) and step.unfit == {BOB}
    assert BOB not in {step.plan.members[owner] for owner in step.plan.owners}
    later = RULES.scatter_grace_s + 5.0
    assert isinstance(room.step(after_s=later), RoundWaits), "they send to the new owners first"
    for owner in (ANN, CYD):
        room.holds(owner, *ALL)
    step = room.step(after_s=later)
    assert isinstance(step, RoundCommitted) and min(step.decision.weights) > 0.3


def test_P9_one_contribution_that_one_owner_lacks_is_a_slow_line() -> None:
    step = censored(BOB, CYD).step(after_s=RULES.scatter_grace_s)
    assert isinstance(step, RoundCommitted) and step.decision.weights == (0.5, 0.5, 0.0)


def test_P9_who_has_sent_to_nobody_costs_no_owner_its_chunks() -> None:
    room = Room(RoundRules(1, 10.0, 60.0, "fp32"))
    for member in ALL:
        room.sent(member)
        room.holds(member, member)
    step = room.step(after_s=RULES.scatter_grace_s)
    assert not isinstance(step, OwnersMoved)
    assert room.flight.censors == set(), "everybody lacks everything: no owner is to blame"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunks": 2}, "its hash list names 2 of 3 chunks"),
        ({"tokens": 0, "steps": 0}, "nothing to contribute"),
        ({"tokens": 0, "steps": 0, "chunks": 0}, "its work was not finite, or is lost"),
    ],
)
def test_a_contribution_that_cannot_count_is_out_with_a_reason(options: dict[str, int], reason: str) -> None:
    room = Room()
    told = room.sent(CYD, **options)
    assert told is not None and reason in told
    room.sent(ANN), room.sent(BOB)
    for owner in ALL:
        room.holds(owner, *ALL)
    step = room.step()
    assert isinstance(step, RoundCommitted) and reason in step.decision.reasons[CYD]


def test_a_member_of_no_weight_is_out_with_a_reason_and_does_not_make_up_the_numbers() -> None:
    """Steps without tokens weigh nothing: the record must say so, and two peers must not become one (P2, P9)."""
    room = Room()
    room.alive.remove(CYD)
    room.sent(ANN, tokens=0, steps=3), room.sent(BOB, tokens=100)
    assert isinstance(room.step(), OwnersMoved)
    for owner in (ANN, BOB):
        room.holds(owner, ANN, BOB)
    step = room.step()
    if isinstance(step, RoundCommitted):
        included = step.decision.included(ALL)
        assert len(included) >= RULES.min_peers
        assert set(step.decision.reasons) == set(ALL) - set(included)
    else:
        assert isinstance(step, Failed)


def test_the_others_go_on_at_once_without_members_that_have_nothing() -> None:
    """A NaN in one peer of two must not abort rounds of a run that needs two: both are here."""
    room = Room()
    room.sent(CYD, tokens=0, steps=0, chunks=0)
    room.sent(BOB, tokens=0, steps=0, chunks=0)
    room.sent(ANN)
    for owner in ALL:
        room.holds(owner, ANN)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.decision.included(ALL) == (ANN,)


def test_where_nobody_has_anything_there_is_nothing_to_commit() -> None:
    room = Room()
    for member in ALL:
        room.sent(member, tokens=0, steps=0, chunks=0)
    assert isinstance(room.step(), Failed)


def test_half_a_list_is_no_word_of_having_nothing() -> None:
    """Nor is silence: a run that needs two is not to be one peer's."""
    room = Room()
    room.sent(CYD, chunks=2), room.sent(BOB, tokens=0, steps=0), room.sent(ANN)
    for owner in ALL:
        room.holds(owner, *ALL)
    assert isinstance(room.step(), Failed)


@pytest.mark.parametrize("after_s", [10.0, 60.0])
def test_too_few_contributions_fail_the_round_and_nobody_goes_on_alone(after_s: float) -> None:
    room = Room()
    room.alive = {ANN}
    room.sent(ANN)
    assert isinstance(room.step(), OwnersMoved)
    room.holds(ANN, ANN)
    step = room.step(after_s)
    assert isinstance(step, Failed)


def test_a_round_that_takes_too_long_fails_and_says_who_was_late() -> None:
    room = Room()
    room.sent(ANN)
    assert room.step(59.9) == RoundWaits("scatter: waiting for ann, bob, cyd")
    step = room.step(60.0)
    assert isinstance(step, Failed) and "late: ann, bob, cyd; lost: nobody" in step.reason


# ---- owners die ------------------------------------------------------------------------------------------------


def test_an_owner_that_dies_in_scatter_loses_its_chunks_and_only_those() -> None:
    room = Room()
    room.scatter()
    room.alive.remove(BOB)
    step = room.step()
    assert isinstance(step, OwnersMoved)
    assert (step.plan.epoch, step.plan.round_no, step.plan.members) == (2, 1, ALL)
    assert step.plan.owners in ((0, 0, 2), (0, 2, 2))
    assert "bob" in step.reason
    assert room.step() != step, "ownership moves once"


def test_chunks_go_only_to_those_who_can_be_dialled() -> None:
    room = Room()
    room.alive.remove(BOB)
    step = room.step(dialable={BOB, CYD})
    assert isinstance(step, OwnersMoved) and step.plan.owners == (0, 2, 2)
    room.alive.remove(CYD)
    step = room.step(dialable={BOB, CYD})
    assert isinstance(step, Failed) and "dialled" in step.reason


def test_an_owner_that_dies_in_gather_is_followed_by_one_that_holds_its_result() -> None:
    room = Room().decided()
    room.has_results(BOB, 1)
    room.has_results(CYD, 1)
    room.alive.remove(BOB)
    step = room.step()
    assert isinstance(step, OwnersMoved) and step.plan.owners == (0, 2, 2)
    assert room.flight.gather.merged == {1: h("result", 1)}, "what exists is not made again"


@given(st.lists(st.integers(0, 2**9 - 1), max_size=40), st.integers(0, 41))
def test_in_how_many_masks_a_bit_is_set_is_counted_in_all_places_at_once(
    masks: list[int], count: int
) -> None:
    fewer = [place for place in range(8) if sum(mask >> place & 1 for mask in masks) < count]
    assert in_fewer(masks, count, 0b11111111) == mask_of(fewer), "of what is asked for, and of nothing else"


def test_what_a_report_proves_follows_the_results_that_are_answered_for() -> None:
    """It is not looked at again for nothing: after more results, and after some are taken back, it is."""
    room = Room().decided()
    room.has_results(BOB, 1, 2)
    assert room.flight.fractions()[3] == 0.0, "of chunk 2 nobody has told what it is"
    room.has_results(CYD, 2)
    assert room.flight.fractions()[3] == pytest.approx(3 / 9)
    room.has_results(ANN, 0)
    assert room.flight.fractions()[3] == pytest.approx(4 / 9)
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved), "nobody else shows chunk 1"
    assert room.flight.fractions()[3] == pytest.approx(2 / 9), (
        "what Bob said of chunk 1 proves nothing any more"
    )


def test_an_owner_that_dies_in_gather_with_its_result_is_followed_by_one_that_makes_it_again() -> None:
    room = Room().decided()
    room.has_results(BOB, 1)
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved)
    assert room.flight.gather.merged == {}
    assert isinstance(room.step(), RoundCommitted), "bob's own contribution to chunk 1 died with it"
    for owner in (ANN, CYD):
        room.holds(owner, *ALL)
        room.has_results(owner, *room.chunks_of(owner), who="second")
    room.has_results(ANN, 0, 1, 2, who="second"), room.has_results(CYD, 0, 1, 2, who="second")
    step = room.step()
    assert isinstance(step, Done) and step.commit.included == (ANN, CYD)


def test_an_included_contribution_that_died_with_its_holder_forces_a_new_decision_without_it() -> None:
    room = Room().decided()
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved)
    step = room.step()
    assert isinstance(step, RoundCommitted)
    assert step.decision.decision_no == 2
    assert step.decision.weights == (0.5, 0.0, 0.5)
    assert "died with their holders" in step.reason
    assert step.decision.reasons == {BOB: "it was lost before its contribution was safe"}


def test_what_was_merged_under_an_earlier_decision_is_made_again() -> None:
    """Other weights, other bytes: of both decisions together nothing could be committed."""
    room = Room().decided()
    room.has_results(ANN, 0, who="with bob")
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved) and isinstance(room.step(), RoundCommitted)
    assert room.flight.gather.merged == {}
    for owner in (ANN, CYD):
        room.got[owner] = {}
        room.has_results(owner, *room.chunks_of(owner), who="without bob")
    for owner in (ANN, CYD):
        room.has_results(owner, 0, 1, 2, who="without bob")
    step = room.step()
    assert isinstance(step, Done)
    assert step.commit.hashes == b"".join(h("without bob", chunk) for chunk in range(3))


def test_a_dead_members_contribution_counts_while_living_owners_hold_it() -> None:
    """CYD owns nothing: all of its work is safe with the others when it dies."""
    room = Room()
    room.flight.go_by(Plan(1, 1, 0, ALL, (0, 1, 1), FP32))
    room.decided()
    room.alive.remove(CYD)
    room.has_results(ANN, 0, 1, 2), room.has_results(BOB, 0, 1, 2)
    step = room.step()
    assert isinstance(step, Done) and step.commit.included == ALL


def test_a_death_after_the_decision_that_leaves_too_few_fails_the_round() -> None:
    room = Room(RoundRules(3, 10.0, 60.0, "fp32")).decided()
    room.alive.remove(BOB)
    assert isinstance(room.step(), OwnersMoved)
    step = room.step()
    assert isinstance(step, Failed) and "2 whole contributions, at least 3" in step.reason


# ---- what counts as held -----------------------------------------------------------------------------------------


def test_a_got_hash_over_other_bytes_does_not_count() -> None:
    room = Room().decided()
    for chunk, owner in enumerate(ALL):
        room.has_results(owner, chunk)
    room.has_results(BOB, 0)
    room.got[ANN] = {0: h("result", 0), 1: h("wrong", 1), 2: h("result", 2)}
    room._report(ANN, {})
    assert isinstance(room.step(), RoundWaits)
    room.has_results(ANN, 1)
    assert isinstance(room.step(), Done), "that was all that was missing"


def test_an_answer_for_a_chunk_that_somebody_else_owns_is_ignored() -> None:
    room = Room().decided()
    room.flight.on_progress(ANN, progress(1, {}, {chunk: h("x", chunk) for chunk in range(3)}, {}))
    assert room.flight.gather.merged == {0: h("x", 0)}


def test_P9_who_refuses_most_of_the_others_is_not_believed() -> None:
    for refused, barred in (({BOB, CYD}, set()), ({CYD}, {CYD})):
        room = Room()
        report = replace(progress(0, {}, {}, {}), refused=dict.fromkeys(refused, Verdict.BAD_HASH))
        room.flight.on_progress(ANN, report)
        assert [peer for peer in ALL if room.flight.accusers_of(peer)] == sorted(barred)
        assert room.flight.scatter.barred == {}, "one of two that can tell"
        room.flight.on_progress(BOB, replace(report, refused={CYD: Verdict.BAD_HASH}))
        assert room.flight.scatter.barred.keys() == barred


def test_results_of_an_earlier_decision_do_not_count() -> None:
    room = Room().decided()
    old = progress(0, {}, {0: h("old", 0)}, {0: h("old", 0)})
    room.flight.on_progress(ANN, old)
    assert room.flight.gather.merged == {}


def test_of_three_two_must_hold_each_result_or_all_if_fewer_live() -> None:
    room = Room().decided()
    for chunk, owner in enumerate(ALL):
        room.has_results(owner, chunk)
    room.has_results(ANN, 0, 1, 2)
    assert isinstance(room.step(), RoundWaits)
    room.alive = {ANN}
    assert isinstance(room.step(), OwnersMoved)
    assert isinstance(room.step(), Done), "the only one alive holds everything, of all three"


def test_P18_of_five_three_must_hold_each_result_or_two_could_go_on_without_the_others() -> None:
    members = ("ann", "bob", "cyd", "dan", "eve")
    for least, needed in ((2, 3), (4, 4)):
        rules = RoundRules(least, 10.0, 60.0, "fp32")
        flight = Round(Plan(1, 1, 0, members, (0,), ("fp32",) * 5), rules, 0.0)
        flight.decision = Decision(1, 1, (0.2,) * 5, {})
        made = {0: h("result", 0)}
        flight.on_progress("ann", progress(1, {}, made, made))
        for holder in members[1 : needed - 1]:
            flight.on_progress(holder, progress(1, {}, {}, made))
        told = f"gather: 1 of 1 results not yet held by {needed} peers"
        assert flight.next_step(1.0, set(members), set(members)) == RoundWaits(told)
        flight.on_progress(members[needed - 1], progress(1, {}, {}, made))
        assert isinstance(flight.next_step(1.0, set(members), set(members)), Done)


def test_P18_an_owner_that_gives_nobody_what_it_merged_loses_its_chunks() -> None:
    room = Room().decided()
    for owner in (ANN, CYD):
        room.has_results(owner, 0, 2)
    room.has_results(BOB, 1)
    assert isinstance(room.step(after_s=1.0), RoundWaits)
    patience_s = RULES.round_timeout_s / 4
    assert isinstance(room.step(after_s=patience_s), RoundWaits), "it has only just been seen"
    step = room.step(after_s=1.0 + patience_s)
    assert isinstance(step, OwnersMoved) and step.unfit == {BOB}
    assert room.flight.gather.merged.keys() == {0, 2}, "somebody else merges it again"


FOUR = ("ann", "bob", "cyd", "dan")


def one_round_of_four(last: LastHolders, opened_at: float, most_of_run: int = 3) -> Round:
    """It needs everybody; ann, bob and cyd hold all results, and dan says that it has none."""
    rules = RoundRules(4, 10.0, 60.0, "fp32", most_of_run=most_of_run)
    flight = Round(Plan(1, 1, 0, FOUR, (0, 1), ("fp32",) * 4), rules, opened_at, last_holders=last)
    last.begin()
    flight.decision = Decision(1, 1, (0.25,) * 4, {})
    results = {chunk: h("result", chunk) for chunk in (0, 1)}
    flight.on_progress("ann", progress(1, {}, {0: results[0]}, results))
    flight.on_progress("bob", progress(1, {}, {1: results[1]}, results))
    flight.on_progress("cyd", progress(1, {}, {}, results))
    flight.on_progress("dan", progress(1, {}, {}, {}))
    return flight


def test_P3_one_that_says_it_has_no_result_holds_up_one_commit_for_so_long_and_costs_no_owner_its_chunks() -> (
    None
):
    last, patience_s = LastHolders(), RULES.round_timeout_s / 4
    flight = one_round_of_four(last, 0.0)
    told = RoundWaits("gather: 2 of 2 results not yet held by 4 peers")
    assert flight.next_step(1.0, set(FOUR), set(FOUR)) == told
    assert flight.next_step(0.9 + patience_s, set(FOUR), set(FOUR)) == told
    step = flight.next_step(1.0 + patience_s, set(FOUR), set(FOUR))
    assert isinstance(step, Done) and step.late == {"dan"} and step.commit.included == FOUR
    assert last.on_commit(step.late) == {"dan"}
    step = one_round_of_four(last, 100.0).next_step(100.0, set(FOUR), set(FOUR))
    assert isinstance(step, Done), "the next commit does not wait for it"


def test_P18_who_is_not_most_of_the_run_waits_for_as_many_as_the_round_needs() -> None:
    """Seven are here, and four of them are in this round: three of these may be a league."""
    flight = one_round_of_four(LastHolders(), 0.0, most_of_run=4)
    assert isinstance(flight.next_step(1.0, set(FOUR), set(FOUR)), RoundWaits)
    assert not isinstance(flight.next_step(59.0, set(FOUR), set(FOUR)), Done)


def test_an_owner_whose_results_arrive_one_by_one_keeps_its_chunks() -> None:
    members = ("ann", "bob", "cyd", "dan", "eve")
    flight = Round(Plan(1, 1, 0, members, (0,), ("fp32",) * 5), RULES, 0.0)
    flight.decision = Decision(1, 1, (0.2,) * 5, {})
    made = {0: h("result", 0)}
    flight.on_progress("ann", progress(1, {}, made, made))
    patience_s = RULES.round_timeout_s / 4
    assert isinstance(flight.next_step(1.0, set(members), set(members)), RoundWaits)
    assert isinstance(flight.next_step(patience_s, set(members), set(members)), RoundWaits)
    flight.on_progress("bob", progress(1, {}, {}, made))
    assert isinstance(flight.next_step(patience_s + 1.0, set(members), set(members)), RoundWaits)
    assert isinstance(flight.next_step(2 * patience_s, set(members), set(members)), RoundWaits)
    assert isinstance(flight.next_step(2 * patience_s + 1.0, set(members), set(members)), OwnersMoved)


# ---- weights -------------------------------------------------------------------------------------------------------

fixed = settings(max_examples=200)
token_counts = st.lists(st.integers(0, 1 << 50), min_size=1, max_size=64)


@fixed
@given(token_counts, st.floats(1, 1000))
def test_weights_sum_to_one_and_are_exact_in_fp32(tokens: list[int], cap: float) -> None:
    weights = weigh(tokens, cap)
    assert abs(sum(weights) - 1) < 1e-5
    assert all(weight == struct.unpack("<f", struct.pack("<f", weight))[0] >= 0 for weight in weights)


@fixed
@given(token_counts, st.floats(1, 1000))
def test_more_tokens_never_weigh_less(tokens: list[int], cap: float) -> None:
    weights = [weight for _, weight in sorted(zip(tokens, weigh(tokens, cap), strict=True))]
    assert weights == sorted(weights)


def test_weights_are_proportional_to_tokens_and_capped_at_a_multiple_of_the_median() -> None:
    assert weigh([100, 300], 4.0) == [0.25, 0.75]
    assert weigh([100, 100, 100_000], 2.0) == [0.25, 0.25, 0.5]


def test_without_any_tokens_all_weigh_the_same() -> None:
    assert weigh([0, 0, 0, 0], 4.0) == [0.25] * 4


def test_people_hear_of_members_by_their_names() -> None:
    """Rules know ids; each sentence is built with names by the rule that tells it."""
    room = Room()
    room.flight.name = room.flight.scatter.name = str.upper
    room.sent(ANN), room.sent(BOB)
    assert room.step() == RoundWaits("scatter: waiting for ANN, BOB, CYD")
    room.holds(ANN, BOB, wrong=True)
    room.holds(CYD, BOB, wrong=True)
    assert (
        room.flight.scatter.barred[BOB].text == "the bytes that CYD holds are not the bytes it says it sent"
    )
    room.alive.remove(CYD)
    moved = room.step()
    assert isinstance(moved, OwnersMoved) and moved.reason == "owner CYD is lost; its chunks moved"
    failed = room.step(after_s=RULES.round_timeout_s)
    assert isinstance(failed, Failed) and "late: ANN, BOB; lost: CYD" in failed.reason
    room.holds(ANN, ANN)
    room.alive = {ANN}
    few = room.step()
    while isinstance(few, OwnersMoved):
        room.holds(ANN, ANN)
        few = room.step()
    assert isinstance(few, Failed) and few.cause is AbortCause.TOO_FEW
    assert few.reason.endswith("; BOB is out: the bytes that CYD holds are not the bytes it says it sent")


# ---- a synchronous batch: nobody may be left out -------------------------------------------------------------

WHOLE = RoundRules(1, 10.0, 60.0, "fp32", whole=frozenset(ALL))


def test_P11_shares_of_a_batch_weigh_exactly_by_their_tokens() -> None:
    room = Room(WHOLE)
    room.scatter((1, 1000, 3))
    settled = room.step()
    assert isinstance(settled, RoundCommitted)
    assert settled.decision.weights == tuple(
        struct.unpack("<f", struct.pack("<f", tokens / 1004))[0] for tokens in (1, 1000, 3)
    ), "no cap, no ramp"


def test_P11_a_batch_waits_for_every_share_whatever_the_grace_is() -> None:
    room = Room(WHOLE)
    for member in ALL:
        room.sent(member)
    for owner in ALL:
        room.holds(owner, ANN, BOB)
    assert room.step(50.0) == RoundWaits("scatter: waiting for cyd")


def test_P11_a_share_that_is_lost_before_it_is_safe_fails_the_round_and_names_it() -> None:
    room = Room(WHOLE)
    room.scatter()
    room.holds(BOB, ANN, BOB)  # chunk 1 of what cyd sent has not arrived
    room.alive.discard(CYD)
    moved = room.step()
    assert isinstance(moved, OwnersMoved)
    failed = room.step()
    assert isinstance(failed, Failed) and failed.cause is AbortCause.SHARE_LOST
    assert failed.lost == {CYD} and not failed.unfit


def test_P11_a_share_that_is_of_no_use_is_computed_again() -> None:
    room = Room(WHOLE)
    room.sent(ANN, chunks=2)
    failed = room.step()
    assert isinstance(failed, Failed) and failed.lost == {ANN}
    assert "names 2 of 3 chunks" in failed.reason


def test_P3_who_dies_when_its_share_is_safe_costs_nothing() -> None:
    room = Room(WHOLE)
    room.flight.go_by(replace(room.flight.plan, owners=(0, 0, 1)))
    for member in ALL:
        room.sent(member)
    for owner in (ANN, BOB):
        room.holds(owner, *ALL)
    room.alive.discard(CYD)
    settled = room.step()
    assert isinstance(settled, RoundCommitted) and settled.decision.weights[2] > 0.0


def test_P15_a_round_that_waited_for_other_stages_has_all_its_time_again_when_results_are_lost() -> None:
    """And no more than that."""
    room = Room(replace_rules(WHOLE, scatter_grace_s=1000.0)).decided()  # no owner is to blame meanwhile
    for member, chunks in ((BOB, (0, 1, 2)), (CYD, (0, 1, 2)), (ANN, (0,))):
        room.has_results(member, *chunks)
    assert isinstance(room.step(50.0), Done)
    room.flight.prepared = True
    assert isinstance(room.step(500.0), Done)
    room.alive.discard(BOB)
    assert isinstance(room.step(500.0), OwnersMoved)
    assert isinstance(room.step(500.0), RoundWaits)
    assert isinstance(room.step(559.0), RoundWaits)
    failed = room.step(561.0)
    assert isinstance(failed, Failed) and failed.cause is AbortCause.TIMED_OUT


def test_an_owner_that_lacks_a_single_share_is_not_to_blame_for_it() -> None:
    room = Room(WHOLE)
    for member in ALL:
        room.sent(member)
    for owner in (ANN, BOB):
        room.holds(owner, *ALL)
    room.holds(CYD, BOB, CYD)
    failed = room.step(60.0)
    assert isinstance(failed, Failed) and (failed.lost, failed.unfit) == ({ANN}, frozenset())


def test_a_few_shares_that_do_not_come_across_in_time_are_for_others_and_owners_that_hear_nobody_own_nothing() -> (
    None
):
    late = Room(WHOLE)
    for member in ALL:
        late.sent(member)
    for owner in ALL:
        late.holds(owner, ANN, BOB)
    few = late.step(60.0)
    assert isinstance(few, Failed) and (few.cause, few.lost) == (AbortCause.TIMED_OUT, {CYD})
    deaf = Room(WHOLE)
    for member in ALL:
        deaf.sent(member)
    for owner in (ANN, BOB):
        deaf.holds(owner, *ALL)
    moved = deaf.step(60.0)
    assert isinstance(moved, OwnersMoved) and moved.unfit == {CYD}, (
        "nobody's share is lost for one that hears nobody"
    )


# ---- what a round will most likely come to -----------------------------------------------------------------------


def foreseeing(tokens: tuple[int, int, int] = (100, 300, 200)) -> Room:
    """Everybody has said what it sends, and owners have shown nothing yet."""
    room = Room()
    room.flight.foresees = True
    for member, count in zip(ALL, tokens, strict=True):
        room.sent(member, count)
    step = room.step()
    assert isinstance(step, Foreseen) and step.decision.foreseen is True and step.decision.decision_no == 1
    return room


def merged_early() -> Room:
    room = foreseeing()
    for member in ALL:
        room.has_results(member, 0, 1, 2)
    for member in ALL:
        room.has_results(member)
    assert room.flight.fractions()[2:] == (1.0, 1.0)
    return room


def test_a_round_tells_what_it_will_come_to_as_soon_as_everybody_has_said_what_it_sends() -> None:
    room = Room()
    room.flight.foresees = True
    for member in ALL:
        assert isinstance(room.step(), RoundWaits)
        room.sent(member, {ANN: 100, BOB: 300, CYD: 200}[member])
    step = room.step()
    assert isinstance(step, Foreseen)
    assert step.decision.weights == tuple(weigh([100, 300, 200], 4.0)) and not step.decision.reasons
    assert isinstance(room.step(), RoundWaits), "once in a round"


def test_a_large_round_that_can_be_foreseen_is_looked_at_when_the_last_one_has_said_what_it_sends() -> None:
    room = Room()
    room.flight.foresees = True
    before = room.flight.phase
    room.sent(ANN, 100)
    assert [room.flight.awaits(member) for member in ALL] == [False, True, True]
    room.sent(BOB, 300)
    room.sent(CYD, 200)
    assert not any(map(room.flight.awaits, ALL)) and room.flight.phase == before
    assert isinstance(room.step(), Foreseen)
    assert room.flight.phase != before, "from now on it waits for contributions"
    assert all(map(room.flight.awaits, ALL))


def test_P2_nothing_commits_by_what_is_only_foreseen() -> None:
    room = merged_early()
    for after_s in (0.0, 5.0, 9.0):
        assert isinstance(room.step(after_s), RoundWaits)


def test_what_was_made_by_what_was_foreseen_stands_when_it_comes() -> None:
    room = merged_early()
    for member in ALL:
        room.holds(member, *ALL)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.decision.decision_no == 1 and not step.decision.foreseen
    assert room.flight.as_foreseen
    done = room.step()
    assert isinstance(done, Done) and done.commit.weights == step.decision.weights


def test_what_was_made_by_what_did_not_come_is_made_again() -> None:
    room = merged_early()
    room.holds(ANN, ANN, BOB)
    room.holds(BOB, ANN, BOB)
    room.holds(CYD, ANN, BOB)
    step = room.step(10.5)
    assert isinstance(step, RoundCommitted) and step.decision.decision_no == 2 and not step.decision.foreseen
    assert step.decision.weights[2] == 0.0 and not room.flight.as_foreseen
    assert not room.flight.gather.merged and room.flight.fractions()[3] == 0.0
    waits = room.step(10.6)
    assert isinstance(waits, RoundWaits) and "3 of 3 chunks not merged yet" in waits.reason
    assert room.flight._got(ANN) == 0, "reports under the first number prove nothing any more"


def test_who_is_barred_after_it_was_foreseen_is_out_and_nothing_made_with_it_stands() -> None:
    room = merged_early()
    room.holds(ANN, *ALL)
    room.holds(BOB, *ALL)
    room.holds(CYD, *ALL)
    room.flight.scatter.barred[BOB] = Excluded(ExclusionCause.RESTARTED, "it restarted during the round")
    step = room.step()
    assert (
        isinstance(step, RoundCommitted)
        and step.decision.decision_no == 2
        and step.decision.weights[1] == 0.0
    )
    assert not room.flight.gather.merged


def test_P3_an_owner_that_dies_meanwhile_is_followed_by_one_that_holds_its_result() -> None:
    room = merged_early()
    room.alive = {ANN, BOB}
    moved = room.step()
    assert isinstance(moved, OwnersMoved) and mask_from_bytes(moved.plan.kept) == 0b100
    assert room.flight.gather.merged.keys() == {0, 1, 2}
    for member in (ANN, BOB):
        room.holds(member, *ALL)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.decision.decision_no == 1, "its contribution was whole"


def test_P3_who_dies_with_a_contribution_that_is_not_whole_takes_back_what_was_foreseen() -> None:
    room = merged_early()
    room.alive = {ANN, BOB}
    assert isinstance(room.step(), OwnersMoved)
    for member in (ANN, BOB):
        room.holds(member, ANN, BOB)
    step = room.step()
    assert (
        isinstance(step, RoundCommitted) and step.decision.decision_no == 2 and not room.flight.gather.merged
    )


def test_P18_nobody_is_blamed_for_results_that_do_not_come_before_the_decision() -> None:
    room = foreseeing()
    room.has_results(ANN, 0)
    rules = replace_rules(RULES, scatter_grace_s=50.0, round_timeout_s=200.0)
    room.flight.rules = room.flight.scatter.rules = rules
    for after_s in range(1, 50):
        assert isinstance(room.step(float(after_s)), RoundWaits)
    assert not room.flight.censors


def test_a_second_decision_has_another_number_than_all_before() -> None:
    """The one that was foreseen came, and then a contribution died with its holder."""
    room = foreseeing()
    for member in ALL:
        room.holds(member, *ALL)
    assert isinstance(room.step(), RoundCommitted)
    room.alive = {ANN, BOB}
    assert isinstance(room.step(), OwnersMoved)
    room.holds(ANN, ANN, BOB)
    room.holds(BOB, ANN, BOB)
    step = room.step()
    assert isinstance(step, RoundCommitted) and step.decision.decision_no == 2


def test_a_round_that_tells_nothing_ahead_knows_whether_it_would_have_been_right() -> None:
    assert Room().decided().flight.as_foreseen
    late = Room()
    for member in ALL:
        late.sent(member)
    for member in ALL:
        late.holds(member, ANN, BOB)
    assert isinstance(late.step(10.5), RoundCommitted) and not late.flight.as_foreseen
