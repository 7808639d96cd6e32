"""When fragments are frozen: by steps and by the clock, together and staggered; and who leads, by how much."""

from __future__ import annotations

import math

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


# ---- called by others
# -----------------------------------------------------------------------------------------------


def test_a_peer_that_is_waited_for_ends_its_period_after_the_step_that_it_is_at() -> None:
    schedule = Schedule(ScheduleRules("blocking", 20))
    schedule.on_called(0, 0.0, 0.0)
    schedule.count_step(1.0)
    assert schedule.take_due(1.0) == [0], "not before it has taken one"
    schedule.on_waited(2.0)
    schedule.count_step(3.0)
    assert schedule.take_due(3.0) == [], "one call, one period"


def one_of_many() -> Schedule:
    """Of a peer that has been in a round, and begins its periods with the others."""
    schedule = Schedule(ScheduleRules("blocking", 20))
    for step in range(1, 21):
        schedule.count_step(-20.0 + step)
    assert schedule.take_due(0.0) == [0]
    return schedule


def periods(schedule: Schedule, begins: float, step_s: float, others_s: float, count: int = 1) -> list[int]:
    """Steps of each period where the others need so long, and call at once; rounds take no time."""
    found = []
    for _ in range(count):
        schedule.on_waited(begins)
        steps, now, called = 0, begins, False
        while True:
            before, now, steps = now, now + step_s, steps + 1
            if not called and before <= begins + others_s < now:
                schedule.on_called(0, 0.0, begins + others_s)
                called = True
            schedule.count_step(now)
            if schedule.take_due(now):
                break
        found.append(steps)
        begins = max(now, begins + others_s)
    return found


def test_next_time_it_ends_before_the_others_have_to_wait() -> None:
    schedule = one_of_many()
    assert periods(schedule, 0.0, step_s=3.0, others_s=20.0) == [7]
    assert periods(schedule, 21.0, step_s=3.0, others_s=20.0) == [6], "rather one too few"


def test_what_counts_is_when_the_others_were_ready_and_not_when_the_call_came() -> None:
    schedule = one_of_many()
    schedule.on_waited(0.0)
    for step in range(1, 9):
        schedule.count_step(step * 3.0)
    schedule.on_called(0, waited_s=12.0, now=24.0)
    schedule.count_step(27.0)
    assert schedule.take_due(27.0) == [0]
    assert periods(schedule, 27.0, step_s=3.0, others_s=1e9) == [4], "of 12 s"


def test_where_the_others_become_slower_its_periods_grow_again() -> None:
    schedule = one_of_many()
    periods(schedule, 0.0, step_s=1.0, others_s=5.0)
    found = periods(schedule, 100.0, step_s=1.0, others_s=1e9, count=8)
    assert found == [5, 5, 5, 5, 6, 8, 14, 20], "first a little, then ever faster"


def test_who_is_never_called_takes_all_its_steps() -> None:
    assert periods(one_of_many(), 0.0, 1.0, 1e9, count=3) == [20, 20, 20]


def test_who_comes_in_the_middle_of_a_period_learns_no_pace_from_its_call() -> None:
    schedule = Schedule(ScheduleRules("blocking", 20))
    assert periods(schedule, 0.0, step_s=1.0, others_s=1.5) == [2]
    assert periods(schedule, 2.0, step_s=1.0, others_s=1e9) == [20]
    schedule = one_of_many()
    schedule.on_loaded(0, 0.0, joins=True)  # the run went back, or its state was not the run's
    assert periods(schedule, 0.0, step_s=1.0, others_s=1.5) == [2]
    assert periods(schedule, 2.0, step_s=1.0, others_s=1e9) == [20]


def test_who_begins_when_the_others_wait_already_learns_no_pace_either() -> None:
    schedule = one_of_many()
    schedule.count_step(1.0)
    schedule.on_called(0, waited_s=5.0, now=1.5)
    schedule.count_step(2.0)
    assert schedule.take_due(2.0) == [0]
    assert periods(schedule, 2.0, step_s=1.0, others_s=1e9) == [20]


@pytest.mark.parametrize("called", [0, 1])
def test_where_training_waits_a_call_for_one_fragment_is_one_for_all(called: int) -> None:
    """What was not frozen would get no more steps, and others would wait for it for ever."""
    schedule = Schedule(ScheduleRules("blocking", 20, fragments=2))
    schedule.count_step(1.0)
    schedule.on_called(called, 0.0, 1.5)
    schedule.count_step(2.0)
    assert schedule.take_due(2.0) == [0, 1]


@pytest.mark.parametrize("called", [0, 1])
def test_where_training_waits_a_load_ends_the_calls_for_all(called: int) -> None:
    schedule = Schedule(ScheduleRules("blocking", 20, fragments=2))
    schedule.count_step(1.0)
    schedule.on_called(called, 0.0, 1.5)
    schedule.on_loaded(1 - called, 1.8, joins=False)
    schedule.count_step(2.0)
    assert schedule.take_due(2.0) == []


def test_where_training_goes_on_a_call_is_for_one_fragment() -> None:
    schedule = Schedule(ScheduleRules("streaming", 20, fragments=2))
    schedule.count_step(1.0)
    schedule.on_called(1, 0.0, 1.5)
    schedule.count_step(2.0)
    assert schedule.take_due(2.0) == [1]


def test_a_call_for_what_was_loaded_meanwhile_ends_nothing() -> None:
    schedule = one_of_many()
    schedule.count_step(1.0)
    schedule.on_called(0, 0.0, 1.5)
    schedule.on_loaded(0, 1.8, joins=False)  # that round began without it
    schedule.count_step(2.0)
    assert schedule.take_due(2.0) == []
    schedule.count_step(4.0)
    assert schedule.take_due(4.0) == [0], "at the pace of the others, from there on"


def test_ranks_look_before_a_period_ends_at_the_pace_of_others() -> None:
    schedule = one_of_many()
    assert schedule.due_at == math.inf
    periods(schedule, 0.0, step_s=3.0, others_s=20.0)
    schedule.on_waited(30.0)
    schedule.count_step(33.0)
    assert 30.0 + 20.0 - 3.0 <= schedule.due_at <= 30.0 + 21.0


def test_what_is_frozen_before_all_steps_is_early_by_a_call_or_by_the_pace_alone() -> None:
    schedule = one_of_many()
    periods(schedule, 0.0, step_s=3.0, others_s=20.0)
    assert schedule.early == {0}
    periods(schedule, 21.0, step_s=3.0, others_s=1e9)
    assert schedule.early == {0}
    periods(schedule, 60.0, step_s=0.5, others_s=1e9)
    assert schedule.early == set(), "it had time for all of them"
    by_clock = Schedule(ScheduleRules("blocking", 20, period_s=3.0))
    by_clock.count_step(2.0)
    assert by_clock.take_due(2.0) == [0] and by_clock.early == set()


def test_a_call_at_the_last_step_is_no_news_of_the_pace() -> None:
    schedule = one_of_many()
    assert periods(schedule, 0.0, step_s=1.0, others_s=19.5, count=3) == [20, 20, 20]


def test_where_periods_become_longer_so_does_the_pace() -> None:
    rules = ScheduleRules("blocking", 40, start=3)
    schedule = Schedule(rules)
    schedule.follow(rules, 0)
    periods(schedule, -99.0, step_s=1.0, others_s=1e9)
    assert periods(schedule, 0.0, step_s=3.0, others_s=5.0) == [2]
    schedule.follow(rules, 1)
    assert periods(schedule, 6.0, step_s=3.0, others_s=1e9) == [3], "10 s and a little"
