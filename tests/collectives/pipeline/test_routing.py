"""Which seat is next, and how many may wait: shares, newcomers, room that nobody can hold back from others."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.collectives.pipeline.neighbours import (
    CORRECTION_MOST,
    QUEUED_MOST,
    CreditsGiven,
    CreditsHeld,
    Routing,
    Window,
)
from farflung.collectives.pipeline.seats import Seat


def seats_of(shares: dict[int, float]) -> list[Seat]:
    return [Seat(number, f"p{number}", 1, share, since=1) for number, share in shares.items()]


@settings(max_examples=60)
@given(st.dictionaries(st.integers(1, 9), st.sampled_from((0.5, 1.0, 2.0, 4.0)), min_size=1, max_size=6))
def test_seats_get_microbatches_as_their_shares_are(shares: dict[int, float]) -> None:
    wiring = Routing(random.Random(1).random)
    wiring.on_seats(seats_of(shares))
    got = Counter(wiring.choose(shares) for _ in range(1000))
    for number, share in shares.items():
        assert abs(got[number] - 1000 * share / sum(shares.values())) <= len(shares) + 1


def test_a_newcomer_gets_its_share_and_not_all_that_others_had_before() -> None:
    wiring = Routing(random.Random(1).random)
    wiring.on_seats(seats_of({1: 1.0, 2: 1.0}))
    for _ in range(500):
        wiring.choose([1, 2])
    wiring.on_seats(seats_of({1: 1.0, 2: 1.0, 3: 1.0}))
    got = Counter(wiring.choose([1, 2, 3]) for _ in range(30))
    assert all(9 <= got[number] <= 11 for number in (1, 2, 3))


def test_only_who_is_able_is_chosen_and_nobody_where_nobody_is() -> None:
    wiring = Routing(lambda: 0.5)
    wiring.on_seats(seats_of({1: 1.0, 2: 1.0}))
    assert wiring.choose([]) is None and wiring.choose([7]) is None
    assert [wiring.choose([2]) for _ in range(3)] == [2, 2, 2]


def test_who_is_full_gets_less_within_bounds() -> None:
    wiring = Routing(lambda: 0.5)
    wiring.on_seats(seats_of({1: 1.0, 2: 1.0}))
    for _ in range(200):
        wiring.on_room(1, 0, 4)
        wiring.on_room(2, 4, 4)
    assert 1 / CORRECTION_MOST <= wiring.share(1) < 0.55 and 1.9 < wiring.share(2) <= CORRECTION_MOST
    wiring.on_room(9, 0, 4)  # somebody who is gone
    assert wiring.share(1) < wiring.share(2)


# ---- room ----------------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(st.data())
def test_what_waits_never_exceeds_the_limit_and_nobody_is_starved(data: st.DataObject) -> None:
    giving, senders, waiting, micro = CreditsGiven(), {1, 2, 3}, 0, 0
    giving.on_senders(senders)
    giving.more(0)
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(("send", "send", "work", "come", "go")))
        if what == "send":
            seat = data.draw(st.sampled_from(sorted(senders)))
            if giving.admits(seat, micro):
                giving.on_received(seat, micro)
                waiting, micro = waiting + 1, micro + 1
        elif what == "work":
            waiting = max(0, waiting - 1)
        else:
            new = max(senders) + 1
            senders = senders | {new} if what == "come" else senders - {min(senders)} or {new}
            giving.on_senders(senders)
        giving.more(waiting)
        assert waiting <= giving.limit
    giving.more(0)  # all of it is done
    assert all(giving.admits(seat, micro) for seat in senders)


def test_room_that_idle_senders_hold_leaves_one_for_each_of_the_others() -> None:
    giving = CreditsGiven()
    giving.on_senders([1, 2])
    giving.more(0)
    for micro in range(40):  # 1 sends alone, then 2 once for each
        seat = 1 if micro < 20 else 2
        assert giving.admits(seat, micro)
        giving.on_received(seat, micro)
        giving.more(1)
        giving.more(0)


def test_room_is_counted_once_for_a_microbatch_and_only_grows() -> None:
    spending = CreditsHeld()
    spending.on_seats([1])
    assert not spending.able
    assert spending.on_room(1, 2) and not spending.on_room(1, 1) and not spending.on_room(1, 2)
    spending.on_sent(1, 5)
    spending.on_sent(1, 5)
    assert spending.left(1) == 1 and spending.able == [1]
    spending.on_sent(1, 6)
    assert not spending.able and not spending.on_room(8, 100)  # of a seat that is not there
    assert spending.on_room(1, 3) and spending.able == [1]


def test_a_faster_trainer_lets_more_wait_and_a_slower_one_takes_nothing_back() -> None:
    giving = CreditsGiven()
    giving.on_unit(0.1)
    most = giving.limit
    giving.on_unit(1.0)
    assert giving.limit == most == 20


def test_a_window_grows_while_nothing_queues_and_shrinks_when_much_does() -> None:
    window = Window(stages=3)
    first = window.size
    for _ in range(200):
        window.on_back(1.0)
    grown = window.size
    assert grown > first
    for _ in range(400):
        window.on_back(10.0)
    assert QUEUED_MOST <= window.size < grown
    window.on_loss()
    assert 2 <= window.size <= grown // 2


def test_a_window_with_a_bound_grows_to_it_and_never_below_what_every_stage_can_have_in_hand() -> None:
    for most, due in ((8, 8), (2, 6), (6, 6)):
        window = Window(stages=3, most=most)
        for _ in range(200):
            window.on_back(1.0)
            assert window.size <= due
        assert window.size == due
        window.on_loss()
        for _ in range(200):
            window.on_back(1.0)
        assert window.size == due
