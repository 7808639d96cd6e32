"""How many microbatches a seat is granted: busy for two heartbeats, and at the end all end together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farflung.coordinator.batches.batch_book import AHEAD_LEAST, GrantPace, first_of, patience_s, to_grant


def test_a_seat_has_work_for_two_heartbeats() -> None:
    paces = {1: GrantPace(0, 0.25), 2: GrantPace(0, 4.0), 3: GrantPace(0, 0.0)}
    assert to_grant(1, paces, free=1000, heartbeat_s=1.0) == 8
    assert to_grant(2, paces, free=1000, heartbeat_s=1.0) == AHEAD_LEAST
    assert to_grant(1, {**paces, 1: GrantPace(6, 0.25)}, free=1000, heartbeat_s=1.0) == 2


def test_the_last_ones_go_to_whoever_ends_them_first() -> None:
    fast_and_slow = {1: GrantPace(0, 0.5), 2: GrantPace(0, 10.0)}
    assert (to_grant(1, fast_and_slow, 3, 5.0), to_grant(2, fast_and_slow, 3, 5.0)) == (3, 0)
    busy_and_idle = {1: GrantPace(8, 1.0), 2: GrantPace(0, 1.0)}
    assert (to_grant(1, busy_and_idle, 2, 5.0), to_grant(2, busy_and_idle, 2, 5.0)) == (0, 2)


def test_who_says_that_it_is_infinitely_fast_gets_four_shares_at_most() -> None:
    paces = {1: GrantPace(0, 1e-9), **{number: GrantPace(0, 1.0) for number in range(2, 9)}}
    assert to_grant(1, paces, free=800, heartbeat_s=1.0) == 400


def test_how_long_a_seat_may_count_nothing_is_not_its_own_word() -> None:
    assert patience_s(30.0, 1.0, [1.0, 1.2]) == 30.0
    assert patience_s(30.0, 8.0, [4.0, 5.0, 0.0]) == 80.0, "it may be slower than others"
    assert patience_s(30.0, 1e9, [4.0, 5.0, 1e9]) == 200.0, "but not by as much as it likes"
    assert patience_s(30.0, 1e9, [0.0]) == patience_s(30.0, 0.0, [4.0]) == 150.0, (
        "nobody else has counted one"
    )


@given(
    paces=st.dictionaries(
        st.integers(1, 9),
        st.builds(GrantPace, st.integers(0, 9), st.floats(0, 100)),
        min_size=1,
        max_size=5,
    ),
    free=st.integers(1, 40),
)
def test_P15_whoever_is_idle_together_gets_something(paces: dict[int, GrantPace], free: int) -> None:
    idle = {number: GrantPace(0, pace.unit_s) for number, pace in paces.items()}
    granted = [to_grant(number, idle, free, 1.0) for number in idle]
    assert sum(granted) >= 1 and all(each <= free for each in granted)


def test_the_first_of_a_mask_as_ranges() -> None:
    assert first_of(0b1110_0110, 4) == [(1, 3), (5, 7)]
    assert first_of(0b1110_0110, 9) == [(1, 3), (5, 8)] and first_of(0b1, 0) == []
