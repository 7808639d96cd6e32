"""Disputes about a version: one chunk is calculated, whoever named another state is out, and nobody honest is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.audits.dispute import ASKED_AT_ONCE, Refuted
from farflung.coordinator.court.questions import PATIENCE_S
from farflung.protocol.digests import hash_bytes, root_of
from farflung.protocol.messages import What
from rig.court_scene import FRAGMENT, RULES, TRUTH, Holder, liar, signature_of
from rig.dispute_scene import Court

TRUE = TRUTH.digest(3)


def checked(proof: Refuted) -> bool:
    """What a third party can see for itself, without the run: the signed list is not what the step gives."""
    index, state = proof.chunk - FRAGMENT.first, proof.before
    assert root_of(proof.claim.hashes) == proof.digest
    assert proof.claim.signature == signature_of(proof.claim.by, proof.digest)
    assert root_of(proof.base_hashes) == TRUTH.digest(proof.base)
    assert proof.base_hashes[index] == hash_bytes(proof.before)
    for version, payload in enumerate(proof.results, proof.base + 1):
        state = RULES.after(state, payload, proof.chunk, version)
    return proof.claim.hashes[index] != hash_bytes(state)


def test_P18_one_against_nine_is_right_and_the_proof_convinces_whoever_was_not_there() -> None:
    court = Court(*[liar(f"eve{number}") for number in range(9)], Holder("ann"))
    court.sits()
    [(digest, proof)] = court.dispute.refuted.items()
    assert digest == court.members["eve0"].digest and checked(proof)
    assert proof.chunk == FRAGMENT.first + 1 and "ann" not in court.dispute.unproven


@pytest.mark.parametrize("at", range(FRAGMENT.count))
def test_P18_wherever_the_lie_is_that_chunk_is_looked_at(at: int) -> None:
    court = Court(Holder("ann"), liar("eve", at=at))
    court.sits()
    assert [proof.chunk for proof in court.dispute.refuted.values()] == [FRAGMENT.first + at]


def test_P18_a_lie_in_one_chunk_that_is_not_the_first_one_of_another_lie_is_found_too() -> None:
    both = liar("eve", at=0)
    both.hashes[2] = hash_bytes(b"more")
    court = Court(Holder("ann"), liar("mal", at=2), both)
    court.sits()
    assert set(court.dispute.refuted) == {court.members["mal"].digest, both.digest}


def test_P18_its_own_true_proof_refutes_a_liar_of_whom_others_can_show_nothing() -> None:
    """The honest side has forgotten what the chunk was: whoever shows it, only one state follows."""
    ann = Holder("ann", says={(What.BEFORE, 3): None})
    court = Court(ann, liar("eve"))
    court.sits()
    assert set(court.dispute.groundless) == {"ann"} and not court.dispute.undecidable
    assert court.members["eve"].digest in court.dispute.refuted and TRUE not in court.dispute.refuted


# ---- whoever shows nothing, or something else -------------------------------------------------------------------

OTHER_STATE = (2).to_bytes(8, "little") + bytes(RULES.form.size_bytes)
UNPROVEN = {
    "a list of another root": (Holder("eve", named=b"e" * 32), "not those of the digest that it named"),
    "a list that is too short": (liar("eve", says={(What.HASHES, 3): b"e" * 32}), "not those of the digest"),
    "no list": (
        liar("eve", says={(What.HASHES, 3): None}),
        "did not show the hashes of its chunks: it has none",
    ),
    "an unsigned list": (liar("eve", signs=False), "its list of hashes is not signed by it"),
    "no answer": (liar("eve", mute=True), f"it showed nothing for {PATIENCE_S:g} s"),
    "too long an answer": (liar("eve", says={(What.HASHES, 3): bytes(1 << 18)}), "can't have so many"),
}


@pytest.mark.parametrize("what", UNPROVEN)
def test_P18_who_does_not_show_the_list_behind_its_digest_has_proven_nothing(what: str) -> None:
    eve, told = UNPROVEN[what]
    court = Court(Holder("ann"), replace(eve, asked=[]))
    court.sits()
    assert told in court.dispute.unproven["eve"]
    assert set(court.dispute.unproven) == {"eve"} and not court.dispute.refuted


NO_PROOF = {
    "another state before": ({(What.BEFORE, 3): OTHER_STATE}, "is not the state that the run settled"),
    "before of an unsettled version": (
        {(What.BEFORE, 3): (1).to_bytes(8, "little") + TRUTH.states[1][1]},
        "the run keeps no commits since version 1 any more",
    ),
    "before of the version itself": (
        {(What.BEFORE, 3): (3).to_bytes(8, "little") + TRUTH.states[3][1]},
        "no state of a chunk before that version",
    ),
    "half a state": ({(What.BEFORE, 3): OTHER_STATE[:-1]}, "no state of a chunk before that version"),
    "no state": ({(What.BEFORE, 3): None}, "did not show what the chunk was before: it has none"),
    "another list before": ({(What.HASHES, 2): b"".join(TRUTH.hashes(1))}, "are not those that the run settled"),
    "another result": (
        {(What.RESULT, 3): TRUTH.results[2][1]},
        "not the one that version 3 was committed with",
    ),
    "no result": ({(What.RESULT, 3): None}, "did not show the result that made the version: it has none"),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_PROOF)
def test_P18_who_does_not_show_what_the_chunk_was_is_out_and_who_does_refutes_it(what: str) -> None:
    says, told = NO_PROOF[what]
    court = Court(Holder("ann"), liar("eve", says=says), settled=(0, 2))
    court.sits()
    assert set(court.dispute.refuted) == {court.members["eve"].digest}
    assert not court.dispute.unproven and "ann" not in court.dispute.groundless
    alone = Court(liar("eve", says=says), liar("mal", b"another lie", says=says), settled=(0, 2))
    alone.sits()
    assert not alone.dispute.refuted and alone.dispute.undecidable
    assert all(told in why for why in alone.dispute.groundless.values())
    assert set(alone.dispute.groundless) == {"eve", "mal"}


def test_P18_two_liars_that_both_show_the_truth_are_both_refuted() -> None:
    court = Court(liar("eve"), liar("mal", b"another lie"))
    court.sits()
    assert len(court.dispute.refuted) == 2 and all(map(checked, court.dispute.refuted.values()))


# ---- chains, sides, leagues ----------------------------------------------------------------------------------------


def test_P18_the_way_from_the_newest_settled_version_may_lead_over_several_commits() -> None:
    court = Court(Holder("ann", base=1), liar("eve", base=1), settled=(0, 1))
    court.sits()
    [proof] = court.dispute.refuted.values()
    assert checked(proof) and (proof.base, len(proof.results)) == (1, 2)
    assert proof.results == (TRUTH.results[2][1], TRUTH.results[3][1])


def test_P18_each_of_several_lies_is_refuted_and_the_truth_is_left() -> None:
    lies = [liar(f"eve{number}", str(number).encode(), at=number % 3) for number in range(5)]
    court = Court(*lies, Holder("ann"))
    court.sits()
    out = set(court.dispute.refuted)
    assert out == {each.digest for each in lies} and not court.dispute.unproven


def test_P18_a_list_that_comes_late_turns_the_court_to_another_chunk_and_the_first_one_is_not_forgotten() -> (
    None
):
    """What a member showed of the first chunk meanwhile must not be lost, or the run waits for ever."""
    lost = {(What.BEFORE, 3): None}
    one, other = (liar(name, name.encode(), at=at, says=lost) for name, at in (("eve", 0), ("mal", 2)))
    late, early = sorted((one, other), key=lambda each: each.digest)
    ann = Holder("ann")
    assert ann.digest < late.digest, "so that the true one and the late one are compared first"
    court = Court(ann, early, late)
    late.mute = True
    court.sits(until=lambda: What.BEFORE in early.asked)
    ann.asked.clear()
    ann.mute, late.mute = True, False
    court.sits(until=lambda: What.HASHES in late.asked[1:])
    ann.mute = False
    court.sits()
    assert set(court.dispute.refuted) == {early.digest, late.digest}


def test_P18_a_list_that_comes_when_its_chunk_was_calculated_already_is_refuted_by_that() -> None:
    lost = {(What.BEFORE, 3): None}
    court = Court(
        Holder("ann"), liar("eve", b"one", at=0, says=lost), late := liar("mal", b"other", at=0, says=lost)
    )
    late.mute = True
    court.sits(until=lambda: bool(court.dispute.refuted))
    late.mute = False
    court.sits()
    assert set(court.dispute.refuted) == {court.members["eve"].digest, late.digest}
    assert all(map(checked, court.dispute.refuted.values()))


def test_P18_a_league_that_shows_nothing_does_not_take_turns_at_it() -> None:
    """Many that are asked one after the other, for 20 s each, would hold the run for minutes."""
    league = [liar(f"eve{number:02}", mute=True) for number in range(ASKED_AT_ONCE)]
    court = Court(*league, Holder("ann"))
    assert court.sits() <= 2 * PATIENCE_S
    assert set(court.dispute.unproven) == {each.name for each in league}


def test_P18_of_a_side_that_is_honest_one_that_lost_its_proof_does_not_speak_for_all() -> None:
    lost = {(What.BEFORE, 3): None}
    court = Court(Holder("ann", says=lost), Holder("bob", says=lost), Holder("cyd"), liar("eve", says=lost))
    court.sits()
    assert set(court.dispute.refuted) == {court.members["eve"].digest}


def test_an_answer_to_somebody_elses_question_is_not_taken() -> None:
    court = Court(Holder("ann"), liar("eve"))
    court.dispute.step(court.claims, 0.0)
    court.dispute.close()
    assert court.questions.asked == set(), "what is over asks nothing any more"


# ---- against a settled digest ---------------------------------------------------------------------------------------


def test_P18_a_digest_that_nobody_contradicts_any_more_is_looked_at_in_the_drawn_chunks() -> None:
    first, last = FRAGMENT.first, FRAGMENT.first + 2
    court = Court(liar("eve", at=2), drawn=(first, last))
    court.sits()
    assert court.members["eve"].digest in court.dispute.refuted
    court = Court(Holder("ann"), drawn=(first, last))
    court.sits()
    assert court.dispute.stands and not court.dispute.refuted and not court.dispute.unproven
