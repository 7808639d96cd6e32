"""When a peer's next beat is due, and how long the coordinator may say nothing: in large runs it is told."""

from __future__ import annotations

from msgspec.structs import replace

from farflung.peer.machine.reports import BeatTimes
from farflung.protocol.messages import FragmentTick, Tick

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
    batch=None,
)


def heard(beat_s: float, now: float) -> BeatTimes:
    times = BeatTimes()
    assert times.begin(0.0) == 0
    times.said(now)
    assert times.heard(replace(TICK, beat_s=beat_s), now) == TICK.seq
    return times


def test_a_beat_is_due_when_the_coordinator_said_or_by_the_runs_terms() -> None:
    for beat_s, every_s in ((0.0, USUAL_S), (10.0, 10.0), (0.5, USUAL_S)):
        times = heard(beat_s, 100.0)
        assert not times.is_due(USUAL_S, False, 100.0 + every_s - 0.01)
        assert times.is_due(USUAL_S, False, 100.0 + every_s)


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
