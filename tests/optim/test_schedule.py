"""When fragments are frozen: by steps and by the clock, together and staggered; and who leads, by how much."""

from __future__ import annotations

import pytest

from farflung.optim.schedule import Schedule, ScheduleRules


def frozen(schedule: Schedule, steps: int, step_s: float = 1.0, now: float = 0.0) -> list[tuple[int, ...]]:
    """After each of so many steps."""
    found = []
    for _ in range(steps):
        now += step_s
        schedule.count_step(now)
        found.append(tuple(schedule.take_due(now)))
    return found


@pytest.mark.parametrize("name", ["blocking", "overlap"])
def test_all_fragments_at_the_end_of_a_period(name: str) -> None:
    assert frozen(Schedule(ScheduleRules(name, 3, fragments=2)), 7) == [(), (), (0, 1), (), (), (0, 1), ()]


def test_streaming_freezes_each_fragment_at_its_own_time_once_in_a_period() -> None:
    found = frozen(Schedule(ScheduleRules("streaming", 8, fragments=4)), 24)
    period = [(), (1,), (), (2,), (), (3,), (), (0,)]
    assert found == 3 * period


@pytest.mark.parametrize("fragments", [2, 3, 5])
def test_a_period_shorter_than_the_fragments_are_many_leaves_none_out(fragments: int) -> None:
    found = frozen(Schedule(ScheduleRules("streaming", 2, fragments)), 8)
    for fragment in range(fragments):
        assert sum(fragment in due for due in found) == 4


def test_only_blocking_training_waits() -> None:
    assert [ScheduleRules(name, 1).waits for name in ("blocking", "overlap", "streaming")] == [
        True,
        False,
        False,
    ]
    assert [ScheduleRules("blocking", 1, period_s=s).told_of_rounds for s in (0.0, 5.0)] == [False, True]


# ---- by the clock ------------------------------------------------------------------------------------------


def test_by_the_clock_each_peer_takes_the_steps_it_can_and_none_that_ends_too_late() -> None:
    for step_s, steps in ((1.0, 10), (4.0, 2), (3.0, 3), (11.0, 1), (25.0, 1)):
        found = frozen(Schedule(ScheduleRules("blocking", 999, period_s=10.0)), 12, step_s)
        assert found.index((0,)) + 1 == steps, f"steps of {step_s} s"


def test_a_wait_is_no_part_of_a_step() -> None:
    schedule = Schedule(ScheduleRules("blocking", 999, period_s=10.0))
    assert frozen(schedule, 10)[-1] == (0,)
    schedule.on_opened(0, 12.0)
    schedule.on_waited(15.0)
    assert frozen(schedule, 7, now=15.0) == [()] * 6 + [(0,)], "ten seconds after the round opened"


def test_waiting_for_the_first_state_is_no_part_of_the_first_step() -> None:
    schedule = Schedule(ScheduleRules("overlap", 999, period_s=10.0))
    schedule.restart(100.0)
    assert frozen(schedule, 10, now=100.0) == [()] * 9 + [(0,)]


def test_by_the_clock_streaming_is_staggered_too() -> None:
    found = frozen(Schedule(ScheduleRules("streaming", 999, fragments=2, period_s=10.0)), 20)
    assert [(n + 1, due) for n, due in enumerate(found) if due] == [
        (5, (1,)),
        (10, (0,)),
        (15, (1,)),
        (20, (0,)),
    ]


# ---- together ----------------------------------------------------------------------------------------------


def test_a_fast_peer_is_never_more_than_a_part_of_a_period_ahead() -> None:
    schedule = Schedule(ScheduleRules("overlap", 20))
    frozen(schedule, 20)
    frozen(schedule, 15)  # the others are so late
    schedule.on_opened(0, 35.0)
    assert frozen(schedule, 18).index((0,)) + 1 == 18, "a tenth of a period ahead, no more"


def test_a_peer_that_is_not_early_keeps_to_its_steps() -> None:
    schedule = Schedule(ScheduleRules("overlap", 20))
    frozen(schedule, 21)
    schedule.on_opened(0, 21.0)
    schedule.on_opened(1, 22.0)
    assert frozen(schedule, 19).index((0,)) + 1 == 19


def test_what_was_frozen_in_this_period_is_not_frozen_again_where_the_period_is_moved() -> None:
    schedule = Schedule(ScheduleRules("streaming", 20, fragments=2))
    found = frozen(schedule, 20) + frozen(schedule, 12)
    assert [due for due in found if due] == [(1,), (0,), (1,)]
    schedule.on_opened(0, 32.0)
    assert [due for due in frozen(schedule, 18) if due] == [(0,)]


def test_a_result_is_not_taken_before_its_time() -> None:
    schedule = Schedule(ScheduleRules("overlap", 4, overlap_steps=3))
    assert schedule.may_take(0), "nothing was frozen"
    frozen(schedule, 4)
    told = []
    for _ in range(3):
        told.append(schedule.may_take(0))
        frozen(schedule, 1)
    assert told == [False] * 3 and schedule.may_take(0)
