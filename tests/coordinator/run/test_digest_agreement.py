"""Which digest a version has, and who holds it: settled while nobody contradicts, and without a judge.

A settling with members that are simply there (rig/digest_bench.py).  Nobody judges here: what is settled where members
contradict each other and somebody can is in tests/coordinator/audits/test_digest_judge.py.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace as changed

from farflung.coordinator.ledger.records import (
    Departed,
    DigestFixed,
    RolledBack,
    ShownFixed,
)
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import DepartureCause
from farflung.protocol.messages import What
from rig.court_scene import Holder, liar
from rig.digest_bench import NUMBER, TRUE, Bench, fixed, holders


def test_P18_in_a_crowd_a_digest_is_settled_when_most_of_those_have_spoken_who_heard_of_the_commit_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers = ("ann", "bob", "cyd")
    run = Bench.in_a_crowd(monkeypatch, *makers, *(f"other{n}" for n in range(9)), makers=makers)
    for name in ("ann", "bob"):
        assert not any(isinstance(each, DigestFixed) for each in run.goes_on()), name
        run.becomes(Holder(name))
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(), "two of three"


def test_P18_what_all_name_is_settled_and_who_shows_it_holds_it() -> None:
    run = Bench(*holders("ann", "bob"))
    assert run.goes_on() == [fixed(TRUE, run.true_value(3))]
    run.goes_on()
    assert run.is_verified("ann") and run.is_verified("bob")
    assert run.people["ann"][1].asked == [], "nobody is asked for bytes"


def test_P18_who_never_held_the_runs_state_is_not_heard_and_starts_no_dispute() -> None:
    run = Bench(*holders("ann", "bob"))
    for number in range(8):
        run.comes(liar(f"eve{number}"), vouched=False)
    assert run.goes_on() == [fixed(TRUE, run.true_value(3))] and run.agreement.reason == ""


def test_P18_for_newcomers_that_never_held_the_runs_state_nobody_waits() -> None:
    run = Bench(*holders("ann"))
    for number in range(8):
        run.comes(Holder(f"new{number}", version=2, base=1), vouched=False)
    assert fixed(TRUE, run.true_value(3)) in run.goes_on()


def test_P18_an_echo_of_the_digest_shows_nothing() -> None:
    """It knows the digest and the nonce, from its tick, and not the bytes."""
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    run.comes(Holder("eve", value=bytes(32), says={(What.HASHES, 3): None}))
    records = run.goes_on(1.0)
    assert not run.is_verified("eve") and run.is_verified("ann")
    assert [type(each).__name__ for each in records] == ["Struck"]
    member, _, _ = run.people["eve"]
    assert run.agreement.refuted(member, run.word("eve")) == TRUE, "it is told to take the run's state"


def test_P18_without_a_value_or_under_another_versions_nonce_nothing_is_shown() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    for value in (b"", run.true_value(2)):
        run.people["bob"][1].value = value
        run.people["bob"][1].mute = True
        run.goes_on()
        assert not run.is_verified("bob")


def test_P18_a_false_value_that_was_settled_is_corrected_by_an_honest_members_bytes() -> None:
    """Liars that were the first to show it name the true digest and a value of their own: nobody else could show it."""
    run = Bench(*holders("eve", "mal", value=hash_bytes(b"agreed"), mute=True))
    assert run.goes_on() == [fixed(TRUE, hash_bytes(b"agreed"))]
    run.goes_on()
    assert run.is_verified("eve")
    run.comes(Holder("ann"), vouched=False)
    records = run.goes_on(1.0)
    assert ShownFixed(version=3, fragment=NUMBER, shown=run.true_value(3)) in records
    assert run.is_verified("ann") and not run.is_verified("eve")
    assert What.STATE in run.people["ann"][1].asked


def test_P3_where_who_held_the_state_lacks_what_only_others_have_those_that_fetched_it_are_heard() -> None:
    """Both who made a version died before they had it; of two that fetched its results one lacks a piece."""
    run = Bench(Holder("ann", version=2, base=1))
    run.comes(Holder("bob"), vouched=False)
    assert run.goes_on() == [], "ann may be about to say"
    assert fixed(TRUE, run.true_value(3)) in run.goes_on(patience_over=True) and run.is_verified("bob")


def test_P3_a_peer_that_left_before_it_named_the_version_it_made_is_heard_at_once_when_it_comes_back() -> (
    None
):
    """It trained alone, and its disk has that version.  A stranger that is here meanwhile is not heard."""
    run = Bench(Holder("ann"))
    ann = run.people["ann"][0].peer
    run.book.commits[3] = changed(run.book.commits[3], members=(ann,), weights=(1.0,))
    run.core.write(Departed(peer=ann, cause=DepartureCause.LEFT, reason="it left"))
    came_back = run.people.pop("ann")
    run.comes(liar("eve"), vouched=False)
    assert [each for each in run.goes_on(1.0) if isinstance(each, DigestFixed)] == []
    run.people["ann"] = came_back
    assert fixed(TRUE, run.true_value(3)) in run.goes_on() and not run.is_verified("eve")
    run.goes_on()
    assert run.is_verified("ann")


def test_P18_in_a_new_era_a_member_that_had_shown_nothing_in_the_old_one_may_show_the_same_version() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    run.comes(Holder("cyd", value=bytes(32), says={(What.STATE, 3): None}))
    run.goes_on(1.0)
    member, _, guest = run.people["cyd"]
    assert run.agreement.refuted(member, run.word("cyd")) == TRUE
    run.core.write(RolledBack(versions=(0, 3), reason="lost"))
    run.people["cyd"] = (member, Holder("cyd"), guest)
    run.goes_on(1.0)
    assert run.agreement.refuted(member, run.word("cyd")) == b"" and run.is_verified("cyd")


# ---- members contradict each other, and nobody can tell who is right ------------------------------------------------


def test_without_a_judge_what_most_hold_is_settled_and_the_others_take_the_runs_state() -> None:
    run = Bench(*holders("ann", "bob"), liar("eve"))
    assert run.goes_on() == [fixed(TRUE, run.true_value(3))] and run.agreement.reason == ""
    eve, _, _ = run.people["eve"]
    assert run.agreement.refuted(eve, run.word("eve")) and not run.agreement.refuted(
        run.people["ann"][0], run.word("ann")
    )
    assert not run.banned(), "nothing was proven"
    assert any("stands, else what most hold" in text for _, text in run.core.events)


def test_without_a_judge_what_was_settled_stands_against_however_many() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    for number in range(5):
        run.comes(liar(f"eve{number}"))
    assert (
        run.goes_on(30.0) == [] and run.book.digests[3] == TRUE and run.agreement.contradictions.case is None
    )


def test_without_a_judge_a_digest_that_nobody_here_names_any_more_stands_and_is_noted_once_at_most() -> None:
    run = Bench(*holders("ann", "bob"))
    run.goes_on()
    for name in ("ann", "bob"):
        run.becomes(liar(name))
    told = len(run.core.events)
    assert run.goes_on(30.0, patience_over=True) == [] and run.book.digests[3] == TRUE
    assert len(run.core.events) == told
