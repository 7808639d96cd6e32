"""What rounds and deaths cost of a batch, as the status tells it, and how long a batch costs least."""

from __future__ import annotations

import pytest

from farflung.coordinator.batches.batches import BatchTimes, costs_of
from farflung.protocol.limits import MICROS_PER_BATCH


def after_two_batches(lost: int = 0) -> BatchTimes:
    """Each is counted for 80 s, and its round takes 20 s."""
    times = BatchTimes(since=0.0, lost=lost)
    for version in range(2):
        begun = 100.0 * version
        for at, complete in ((0.0, False), (40.0, False), (80.0, True), (90.0, True)):
            times.look(version, complete, begun + at)
    times.look(None, False, 199.0)
    times.look(2, False, 200.0)
    return times


def test_rounds_are_measured_from_the_last_microbatch_to_the_next_batch() -> None:
    times = after_two_batches()
    assert (times.counting_s, times.round_s) == (80.0, 20.0)
    told = times.told(1000, 4, 200.0)
    assert told is not None and (told["rounds_cost"], told["deaths_cost"], told["best"]) == (0.25, 0.0, None)


def test_a_death_after_all_were_counted_goes_on_with_the_counting() -> None:
    times = BatchTimes(0.0)
    for complete, at in ((False, 0.0), (True, 80.0), (False, 90.0), (True, 100.0)):
        times.look(0, complete, at)
    times.look(1, False, 110.0)
    assert (times.counting_s, times.round_s) == (100.0, 10.0)


def test_a_held_out_batch_is_no_part_of_the_round_before_it() -> None:
    times = after_two_batches()
    times.look(2, True, 280.0)
    times.look(3, False, 300.0, held_out=True)
    times.look(3, True, 380.0, held_out=True)
    times.look(None, False, 381.0)
    for at, complete in ((382.0, False), (462.0, True)):
        times.look(3, complete, at)
    times.look(4, False, 482.0)
    assert (times.counting_s, times.round_s) == (80.0, 20.0)


def test_a_batch_that_was_open_when_the_coordinator_began_says_nothing() -> None:
    times = BatchTimes(0.0)
    times.look(7, False, 0.0)
    times.look(7, True, 10.0)
    times.look(8, False, 20.0)
    assert times.told(8, 1, 20.0) is None
    times.look(8, True, 50.0)
    times.look(3, False, 60.0)  # it went back
    assert times.told(8, 1, 60.0) is None


def test_the_best_length_weighs_rounds_against_deaths() -> None:
    """The design's example: 600 s between deaths, 4 seats, rounds of 15 s."""
    costs = costs_of(87.0, 15.0, 600.0, 4)
    assert costs.rounds == pytest.approx(0.172, abs=0.001) and costs.deaths == pytest.approx(0.018, abs=0.001)
    assert costs.best_s == pytest.approx(268.3, abs=0.1)
    best = costs.best_s or 0.0
    least = sum(part for part in (15.0 / best, best / 4800.0))
    assert all(15.0 / other + other / 4800.0 > least for other in (best / 2, best * 2))


def test_the_batch_that_is_named_is_one_that_the_run_can_have() -> None:
    told = after_two_batches(lost=1).told(1000, 4, 200.0)
    assert told is not None and told["best"] == round(1000 * (2 * 200 * 4 * 20) ** 0.5 / 80)
    most = after_two_batches(lost=1).told(4000, 64, 4000.0)
    assert most is not None and most["best"] == MICROS_PER_BATCH
