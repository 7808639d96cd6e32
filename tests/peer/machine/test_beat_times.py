"""When a peer's next beat is due, and how long the coordinator may say nothing: in large runs it is told."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.peer.machine.heartbeat import RARE, BeatTimes
from farflung.protocol.messages import FragmentTick, OpenRound, Tick
from farflung.protocol.round_words import Plan

USUAL_S, PATIENCE_S = 1.0, 5.0
TICK = Tick(
    session=bytes(16),
    seq=7,
    answers=1,
    heard_s=0.0,
    fragments=(FragmentTick(0, 0, (), False, (), 0, False, 0),),
    goal="train",
    reason="",
    roster_no=1,
    roster=None,
    leases=None,
    void=(),
    era=0,
    advice="",
    era_because="",
)
PLAN = Plan(3, 1, 0, ("ann", "bob"), (0,), ("int8", "int8"))


def heard(beat_s: float, now: float) -> BeatTimes:
    times = BeatTimes()
    times.begin(0.0)
    assert times.newest == 0
    times.said(now)
    times.heard(replace(TICK, beat_s=beat_s), now)
    assert times.newest == TICK.seq
    return times


def test_a_beat_is_due_when_the_coordinator_said_or_by_the_runs_terms() -> None:
    for beat_s, every_s in ((0.0, USUAL_S), (10.0, 10.0), (0.5, USUAL_S)):
        times = heard(beat_s, 100.0)
        assert not times.is_due(USUAL_S, False, 100.0 + every_s - 0.01)
        assert times.is_due(USUAL_S, False, 100.0 + every_s)


def test_a_turn_counts_from_the_answer_on_and_no_beat_is_said_again_before_it_is_answered() -> None:
    """Where thousands beat in one moment the last ones are answered seconds later."""
    times = heard(10.0, 100.0)
    times.said(110.0)
    assert not times.is_due(USUAL_S, False, 119.99) and times.is_due(USUAL_S, False, 120.0), "no answer came"
    times.heard(replace(TICK, answers=2, beat_s=10.0), 113.0)
    assert not times.is_due(USUAL_S, False, 122.99) and times.is_due(USUAL_S, False, 123.0)
    times.heard(replace(TICK, answers=2, beat_s=10.0), 120.0)
    assert times.is_due(USUAL_S, False, 123.0), (
        "the same answer with news: it is not to be heard of later for that"
    )
    small = heard(0.0, 100.0)
    small.heard(TICK, 100.9)
    assert small.is_due(USUAL_S, False, 101.0), "in a small run an answer that is late makes no beat late"


def test_in_a_round_of_a_large_run_beats_are_as_was_told_in_it() -> None:
    times = heard(10.0, 100.0)
    inside = (replace(TICK.fragments[0], round_no=3),)
    times.heard(replace(TICK, fragments=inside, beat_s=2.0), 100.0)
    assert not times.is_due(USUAL_S, True, 101.99) and times.is_due(USUAL_S, True, 102.0)
    assert not times.is_due(USUAL_S, False, 109.99), "outside of it as before"
    assert not times.is_lost(USUAL_S, PATIENCE_S, True, 100.99 + PATIENCE_S)
    assert times.is_lost(USUAL_S, PATIENCE_S, True, 101.0 + PATIENCE_S)


def test_P3_in_a_round_beats_are_as_in_a_small_run_whatever_was_told_outside_of_it() -> None:
    times = heard(10.0, 100.0)
    assert times.is_due(USUAL_S, True, 100.0 + USUAL_S)
    assert times.is_lost(USUAL_S, PATIENCE_S, True, 100.0 + PATIENCE_S)


def test_the_coordinator_may_say_nothing_for_that_much_longer() -> None:
    """It answers beats: where the next one is due later, so is its answer."""
    times = heard(10.0, 100.0)
    assert not times.is_lost(USUAL_S, PATIENCE_S, False, 100.0 + PATIENCE_S + 8.99)
    assert times.is_lost(USUAL_S, PATIENCE_S, False, 100.0 + PATIENCE_S + 9.0)
    assert heard(0.0, 100.0).is_lost(USUAL_S, PATIENCE_S, False, 100.0 + PATIENCE_S)


def test_a_new_session_begins_by_the_runs_terms() -> None:
    times = heard(10.0, 100.0)
    times.begin(200.0)
    times.said(200.0)
    assert times.is_due(USUAL_S, False, 200.0 + USUAL_S)


# ---- what is new -----------------------------------------------------------------------------------------------------

KNOWN = (replace(TICK.fragments[0], verified=True),)


def test_in_a_small_run_what_is_new_is_told_at_once() -> None:
    for beat_s in (0.0, RARE * USUAL_S - 0.01):
        times = heard(beat_s, 100.0)
        times.heard(replace(TICK, fragments=KNOWN, beat_s=beat_s), 100.0)
        assert not times.news_may_wait(USUAL_S)


def test_in_a_large_run_it_waits_for_the_next_beat_once_i_have_shown_that_i_hold_the_newest_version() -> None:
    times = heard(10.0, 100.0)
    assert not times.news_may_wait(USUAL_S), "a newcomer's first word is awaited by itself"
    times.heard(replace(TICK, fragments=KNOWN, beat_s=10.0), 101.0)
    assert times.news_may_wait(USUAL_S)
    times.heard(replace(TICK, beat_s=10.0), 102.0)
    assert times.news_may_wait(USUAL_S), "others made another version"
    times.begin(200.0)
    times.heard(replace(TICK, beat_s=10.0), 200.0)
    assert not times.news_may_wait(USUAL_S), "in a new session I am a newcomer again"


def test_of_a_rounds_member_nothing_waits_until_it_has_shown_what_came_of_it() -> None:
    times = heard(10.0, 100.0)
    times.heard(replace(TICK, fragments=KNOWN, beat_s=10.0), 101.0)
    times.heard(OpenRound(session=bytes(16), seq=8, plan=PLAN), 102.0)
    assert not times.news_may_wait(USUAL_S)
    inside = (replace(KNOWN[0], round_no=3),)
    times.heard(replace(TICK, fragments=inside, beat_s=2.0), 103.0)
    times.heard(replace(TICK, beat_s=10.0), 104.0)
    assert not times.news_may_wait(USUAL_S), "it is committed, and the version not shown yet"
    times.heard(replace(TICK, fragments=KNOWN, beat_s=10.0), 105.0)
    assert times.news_may_wait(USUAL_S)
