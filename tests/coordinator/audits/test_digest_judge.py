"""Digests that members contradict each other about: what is wrong is proven, and never voted.

A settling with members that are simply there (rig/digest_bench.py); the judge calculates with the model's real states.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from farflung.coordinator.audits.dispute import TRIED_AT_ONCE, DigestJudge
from farflung.coordinator.court.questions import PATIENCE_S
from farflung.coordinator.ledger.records import (
    CommittedRound,
    DigestFixed,
    DigestRefuted,
    DigestWithdrawn,
    RolledBack,
    Struck,
)
from farflung.coordinator.modes.registry import CoordinatorMode, DigestCase, Modes
from farflung.coordinator.run.core import Core, Offences
from farflung.protocol.digests import root_of, split_hashes
from farflung.protocol.messages import What
from rig.court_scene import FRAGMENT, TRUTH, Holder, liar
from rig.digest_bench import NUMBER, TRUE, fixed, holders
from rig.digest_bench import Bench as Unjudged
from rig.made_run import MadeRun, peer_of


class Judge(CoordinatorMode):
    """What the mode brings, without its audits of sums."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def judge(self, fragment: int, undefended: bool) -> DigestCase:
        return DigestJudge(self._core, fragment, undefended)


class Bench(Unjudged):
    def judges(self) -> Modes:
        return (Judge(self.core),)


def test_P18_in_a_crowd_who_hears_of_a_commit_late_and_knows_better_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = tuple(f"other{n}" for n in range(5))
    run = Bench.in_a_crowd(monkeypatch, "eve", "ivy", *others, makers=("eve", "ivy"))
    for name in ("eve", "ivy"):
        run.becomes(liar(name))
    [lie] = [each for each in run.goes_on() if isinstance(each, DigestFixed)]
    assert lie.digest != TRUE, "all who made it say so"
    for name in others:
        run.becomes(Holder(name))
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(30.0)
    assert run.banned() == {"eve", "ivy"}


@pytest.mark.parametrize("league", [1, 2, 9])
def test_P18_a_lie_is_refuted_its_liars_are_banned_and_the_truth_is_settled(league: int) -> None:
    run = Bench(Holder("ann"), *[liar(f"eve{number}") for number in range(league)])
    records = run.goes_on(1.0)
    [refuted] = [each for each in records if isinstance(each, DigestRefuted)]
    liars = {f"eve{number}" for number in range(league)}
    assert {run.core.name(peer) for peer in refuted.peers} == liars == run.banned()
    assert fixed(TRUE, run.true_value(3)) in records and run.is_verified("ann")
    assert (refuted.version, refuted.fragment, refuted.chunk) == (3, NUMBER, FRAGMENT.first + 1)
    [kept] = run.kept
    assert (
        set(kept.peers) == set(refuted.peers) and root_of(split_hashes(kept.proof.claimed)) == refuted.digest
    )
    assert not run.book.vouched & set(refuted.peers), "whoever comes back is heard no more"


def test_P18_nothing_is_settled_and_no_round_opens_while_members_contradict_each_other() -> None:
    run = Bench(Holder("ann"), Holder("bob"), replace(liar("eve"), mute=True))
    run.people["ann"][1].mute = run.people["bob"][1].mute = True
    assert run.goes_on(PATIENCE_S / 2, patience_over=True) == []
    assert "claim different states of version 3" in run.agreement.reason


def test_P18_a_stranger_that_lies_while_who_knows_better_is_behind_is_out_as_soon_as_that_one_is_there() -> (
    None
):
    run = Bench(Holder("ann", version=2, base=1))
    run.comes(liar("eve"), vouched=False)
    lie = run.people["eve"][1].digest
    settled = [each.digest for each in run.goes_on(patience_over=True) if isinstance(each, DigestFixed)]
    assert settled == [lie]
    run.people["ann"] = run.people["ann"][0], Holder("ann"), run.people["ann"][2]
    run.goes_on(1.0)
    assert run.banned() == {"eve"} and run.is_verified("ann")


def test_P18_an_objection_long_after_settling_withdraws_the_lie_and_settles_the_truth() -> None:
    run = Bench(liar("eve"), liar("mal"), Holder("ann", version=2, base=1))
    lie = run.people["eve"][1].digest
    assert [
        each.digest for each in run.goes_on(0.0, patience_over=True) if isinstance(each, DigestFixed)
    ] == [lie]
    run.core.now += 3600.0
    run.goes_on()
    assert run.is_verified("eve"), "nobody knows better yet"
    run.people["ann"] = (run.people["ann"][0], Holder("ann"), run.people["ann"][2])
    records = run.goes_on(1.0)
    assert DigestWithdrawn(version=3, fragment=NUMBER, digest=lie) in records
    assert fixed(TRUE, run.true_value(3)) in records and run.book.digests[3] == TRUE
    assert run.banned() == {"eve", "mal"}


def test_P18_who_was_told_a_lie_by_the_coordinator_and_fetched_it_is_not_banned_with_its_liars() -> None:
    run = Bench(liar("eve"), liar("mal"), Holder("ann", version=2, base=1), Holder("bob", version=-1))
    [lie] = [each.digest for each in run.goes_on(patience_over=True) if isinstance(each, DigestFixed)]
    joe = liar("joe", says={(What.BEFORE, 3): None})
    assert joe.digest == lie
    run.comes(joe, vouched=False)
    run.becomes(liar("bob", says=joe.says))  # it was here before, and took the run's state again
    run.goes_on()
    assert run.is_verified("joe") and run.is_verified("bob")
    run.goes_on()
    run.becomes(Holder("ann"))
    run.goes_on(1.0)
    assert run.banned() == {"eve", "mal"} and run.is_verified("ann")
    assert not run.is_verified("joe") and not run.is_verified("bob")


def test_P18_who_changed_its_word_answers_for_both() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve"))
    run.goes_on()
    member, _, guest = run.people["eve"]
    run.people["eve"] = (member, Holder("eve"), guest)
    run.comes(liar("mal"))
    run.people["ann"][1].mute = False
    run.goes_on(5.0)
    assert {"eve", "mal"} <= run.banned(), "eve named what is refuted now, and says the truth too late"


def test_P18_a_late_lie_against_a_settled_digest_costs_nobody_honest_its_state() -> None:
    """The honest ones have dropped what the chunks were: the run had confirmed the version.  They can prove nothing."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    run.comes(liar("eve", says=lost))
    records = run.goes_on(2 * PATIENCE_S)
    assert run.book.digests[3] == TRUE and run.is_verified("ann") and run.is_verified("bob")
    assert not [each for each in records if isinstance(each, DigestWithdrawn | DigestRefuted)]
    for name in ("ann", "bob"):
        member, _, _ = run.people[name]
        assert run.agreement.refuted(member, run.word(name)) == b""
    assert run.agreement.refuted(run.people["eve"][0], run.word("eve")) != b"" and run.agreement.reason == ""
    assert not run.banned()


def test_P18_of_states_of_which_nobody_can_show_how_he_came_to_them_the_settled_one_stands() -> None:
    lost = {(What.BEFORE, 3): None}
    run = Bench(Holder("ann", says=lost))
    run.goes_on()
    for number in range(5):
        run.comes(liar(f"eve{number}", says=lost))
    run.goes_on(3.0)
    assert run.book.digests[3] == TRUE and run.is_verified("ann") and run.agreement.reason == ""
    assert run.agreement.refuted(run.people["ann"][0], run.word("ann")) == b""


def test_P18_who_has_taken_the_runs_state_again_holds_it_whatever_it_could_not_show_before() -> None:
    """Or it would be told again and again, until the next version, that what it has just fetched is not the run's."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    run.comes(liar("eve", says=lost))
    run.goes_on(3.0)
    member = run.people["eve"][0]
    assert run.agreement.refuted(member, run.word("eve")) == run.word("eve").digest != TRUE
    run.becomes(Holder("eve"))
    run.goes_on(1.0)
    assert run.agreement.refuted(member, run.word("eve")) == b"" and run.is_verified("eve")


def test_P18_a_league_that_shows_lists_and_then_nothing_does_not_hold_the_run_for_long_nor_often() -> None:
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost))
    run.goes_on()
    league = {f"eve{number}" for number in range(2 * TRIED_AT_ONCE)}
    for name in sorted(league):
        run.comes(liar(name, after_list_mute=True))
    records = run.goes_on(2 * PATIENCE_S + 3.0)
    assert run.agreement.reason == "" and run.book.digests[3] == TRUE and run.is_verified("ann")
    assert {run.core.name(each.peer) for each in records if isinstance(each, Struck)} == league


def test_P18_a_list_that_nobody_shows_is_no_claim_and_the_second_time_it_costs_its_member_its_place() -> None:
    """A busy machine may be late once: it is not heard about that version, keeps its state, and has a strike."""
    run = Bench(Holder("ann"), liar("eve", mute=True))
    records = run.goes_on(PATIENCE_S + 3.0)
    assert fixed(TRUE, run.true_value(3)) in records and run.banned() == set()
    assert [run.core.name(each.peer) for each in records if isinstance(each, Struck)] == ["eve"]
    member = run.people["eve"][0]
    assert not run.is_verified("eve") and run.agreement.refuted(member, run.word("eve")) == b""
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.goes_on(PATIENCE_S + 3.0)
    assert run.banned() == {"eve"}


def test_P18_a_list_that_fits_nothing_costs_its_member_its_place_at_once() -> None:
    run = Bench(Holder("ann"), liar("eve", says={(What.HASHES, 3): b"no hashes"}))
    run.goes_on(PATIENCE_S + 3.0)
    assert run.banned() == {"eve"}


def test_P18_where_nobody_can_show_anything_most_of_those_that_are_here_are_believed() -> None:
    """All fetched it: nobody calculated it.  It is said in docs/security.md."""
    lost = {(What.BEFORE, 3): None}
    run = Bench(*holders("ann", "bob", says=lost), liar("eve", says=lost))
    records = run.goes_on(2.0)
    assert fixed(TRUE, run.true_value(3)) in records


def test_P18_in_a_new_era_nothing_of_the_old_one_stands() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve", mute=True))
    run.goes_on()
    assert run.agreement.reason and run.core.questions.asked
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.loses(run.people["eve"][0])
    run.goes_on()
    assert not run.agreement.reason and not run.core.questions.asked and not run.banned()


def test_P18_a_dispute_about_a_version_that_is_not_the_newest_any_more_is_over() -> None:
    run = Bench(Holder("ann", mute=True), liar("eve", mute=True))
    run.goes_on()
    assert run.agreement.reason
    run.core.write(fixed(TRUE, run.true_value(3)))
    commit = changed(TRUTH.commit(3), version=4, round_no=4)
    run.core.write(
        CommittedRound(
            commit=commit, used={}, excluded={}, tokens=10, steps=1, loss=1.0, seconds=1.0, tx_bytes=0
        )
    )
    run.goes_on()
    assert run.agreement.contradictions.case is None and not run.core.questions.asked


def test_P18_who_shows_a_list_and_nothing_else_is_struck_once_and_out_the_second_time() -> None:
    run = MadeRun()
    contradictions, ann = run.drivers[0].agreement.contradictions, peer_of("ann")
    contradictions.void[ann] = "it showed nothing for 20 s"
    contradictions._was_silent(ann)
    assert run.core.offences == Offences(struck=[ann])
    contradictions._was_silent(ann)
    [(peer, why)] = run.core.offences.convicted
    assert peer == ann and why == "once more it kept everybody waiting: it showed nothing for 20 s"
