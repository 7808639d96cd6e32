"""Neighbours that can't work with each other: who gives up the seat, and what one word alone can do."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.coordinator.batches.seat_choice import (
    HEAR_OTHERS_S,
    OUT_MOST,
    SETTLED_BEATS,
    Complaints,
    GivesUp,
)
from farflung.protocol.mode_words import Complaint

SOON, LATE = SETTLED_BEATS, SETTLED_BEATS + HEAR_OTHERS_S


def seats_of(*per_stage: int) -> dict[int, BookedSeat]:
    """Seats 1, 2, ... in order of their stages; that of seat n is peer pn's."""
    stages = [stage for stage, count in enumerate(per_stage) for _ in range(count)]
    return {n: BookedSeat(n, f"p{n}", b"", 0, stage=stage) for n, stage in enumerate(stages, 1)}


def after(seats: dict[int, BookedSeat], now: float, **said: tuple[int, ...]) -> GivesUp | None:
    """`s1=(3, -4)`: seat 1 complains of 3 and 4 from the start, and what comes from 4 is damaged."""
    heard = Complaints(1.0)
    for who, about in said.items():
        heard.hear(int(who[1:]), [Complaint(abs(seat), seat < 0) for seat in about], 0.0)
    return heard.verdict(seats, now)


def test_whom_most_of_a_stage_complain_of_goes_at_once_and_gets_a_strike_for_damage() -> None:
    seats = seats_of(2, 2)
    assert after(seats, SOON, s1=(3,), s2=(3,)) == GivesUp(3, about=1, by=2, damaged=False)
    assert after(seats, SOON - 0.1, s1=(3,), s2=(3,)) is None, "two beats, or one word may be old"
    assert after(seats, SOON, s1=(-3,), s2=(-3,)) == GivesUp(3, about=1, by=2, damaged=True)
    found = after(seats, SOON, s1=(-3,), s2=(3,))
    assert found is not None and not found.damaged, "one word of damage is nobody's strike"
    found = after(seats, SOON, s3=(-1,), s4=(-1,))
    assert found == GivesUp(1, about=3, by=2, damaged=True), "in the other direction"


def test_P9_one_word_never_unseats_whom_others_get_on_with() -> None:
    seats = seats_of(3, 2)
    assert after(seats, LATE - 0.1, s1=(4,)) is None, "the others are asked first"
    assert after(seats, LATE, s1=(4,)) == GivesUp(1, about=4, by=0, damaged=False)
    assert after(seats, LATE, s1=(-4,)) == GivesUp(1, about=4, by=0, damaged=False)
    # Half of a stage are not most of it.
    found = after(seats_of(4, 2), LATE, s1=(5,), s2=(5,))
    assert found is not None and found.seat in (1, 2)


def test_P9_whoever_complains_of_most_is_itself_the_one() -> None:
    seats = seats_of(2, 3)
    assert after(seats, LATE, s1=(3, 4)) == GivesUp(1, about=3, by=0, damaged=False)
    assert after(seats, SOON, s1=(3, 4)) is None, "seat 2 is asked first"
    # Though one of them is complained of by two.
    assert after(seats, LATE, s1=(3, 4), s2=(3,)) == GivesUp(1, about=3, by=0, damaged=False)


def test_whoever_complains_of_most_keeps_its_seat_until_others_could_be_heard() -> None:
    assert after(seats_of(2, 3), LATE - 0.1, s1=(3, 4)) is None


def test_what_is_said_of_two_stages_is_weighed_stage_by_stage() -> None:
    """Seat 3 has no word about most of either; of seat 1 both who sit beside it complain."""
    seats = seats_of(2, 2, 2)
    assert after(seats, SOON, s3=(1, 5), s4=(1,)) == GivesUp(1, about=3, by=2, damaged=False)


def test_a_pair_that_a_verdict_helps_is_not_told_to_people() -> None:
    heard, seats = Complaints(1.0), seats_of(2, 2)
    heard.hear(1, [Complaint(3, False)], 0.0)
    assert heard.verdict(seats, LATE) is not None and heard.stuck(seats, LATE) == []


def test_a_complaint_that_is_said_again_is_as_old_as_it_was() -> None:
    heard, seats = Complaints(1.0), seats_of(1, 2)
    for now in (0.0, 1.0, SOON):
        heard.hear(1, [Complaint(2, False)], now)
    assert heard.verdict(seats, SOON) is not None


def test_where_one_is_alone_in_its_stage_the_other_one_goes_if_there_is_another() -> None:
    assert after(seats_of(1, 2), SOON, s1=(2,)) == GivesUp(2, about=1, by=1, damaged=False)
    assert after(seats_of(2, 1), LATE, s1=(3,)) == GivesUp(1, about=3, by=0, damaged=False)


def test_where_nobody_could_stand_in_nobody_goes_and_people_are_told() -> None:
    for seats, said in (
        (seats_of(1, 1), {1: 2}),
        (seats_of(2, 1), {1: 3, 2: 3}),
        (seats_of(1, 1), {1: 2, 2: 1}),
    ):
        heard = Complaints(1.0)
        for who, about in said.items():
            heard.hear(who, [Complaint(about, False)], 0.0)
        assert heard.verdict(seats, 100.0) is None
        assert heard.stuck(seats, 100.0) == sorted(said.items())
        assert heard.stuck(seats, 1.0) == [], "not before it is sure"
    assert after(seats_of(2, 2), 100.0, s1=(3, 4), s2=(3, 4)) is None, "a line between all of them"


def test_of_two_that_complain_of_each_other_the_younger_goes() -> None:
    assert after(seats_of(2, 2), LATE, s1=(3,), s3=(1,)) == GivesUp(3, about=1, by=1, damaged=False)
    seats = {**seats_of(2, 2), 9: BookedSeat(9, "p9", b"", 0, stage=0)}
    found = after(seats, LATE, s9=(3,), s3=(9,))
    assert found is not None and (found.seat, found.about) == (9, 3)


def test_what_is_not_said_again_is_over_and_begins_anew() -> None:
    heard, seats = Complaints(1.0), seats_of(1, 2)
    heard.hear(1, [Complaint(2, True)], 0.0)
    heard.hear(1, [], 1.0)
    assert heard.doubted(seats) == []
    heard.hear(1, [Complaint(2, False)], 5.0)
    assert heard.doubted(seats) == [2]
    assert heard.verdict(seats, 5.0 + SOON - 0.1) is None and heard.verdict(seats, 5.0 + SOON) is not None
    heard.on_gone(2)
    assert heard.verdict(seats, 100.0) is None


def test_P9_damage_that_is_not_said_again_is_nobody_s_strike() -> None:
    heard, seats = Complaints(1.0), seats_of(2, 2)
    for damaged in (True, False):
        for who in (1, 2):
            heard.hear(who, [Complaint(3, damaged)], 0.0)
    assert heard.verdict(seats, SOON) == GivesUp(3, about=1, by=2, damaged=False)


def test_complaints_of_those_who_are_no_neighbours_are_none() -> None:
    assert after(seats_of(1, 2, 2), 100.0, s1=(4, 5, 77)) is None
    assert after(seats_of(1, 2), 100.0, s77=(2,)) is None
    assert after(seats_of(3), 100.0, s1=(2,), s3=(2,)) is None


def test_who_gives_seats_up_again_and_again_gets_none_for_a_while() -> None:
    heard, out = Complaints(1.0), []
    for _ in range(6):
        heard.on_given_up("ann")
        assert not heard.bars("ann") and not heard.bars("bob"), "once is nobody's fault"
        heard.on_given_up("ann")
        batches = 0
        while heard.bars("ann"):
            batches += 1
            heard.forget()
        out.append(batches)
    assert out == [2, 4, 8, 16, 16, 16] and OUT_MOST == 16


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_P9_one_liar_unseats_nobody_as_long_as_others_of_its_stage_get_on(data: st.DataObject) -> None:
    """Whatever one member says: where its stage has another seat, which complains of nobody, only it goes."""
    seats = seats_of(*data.draw(st.lists(st.integers(2, 4), min_size=2, max_size=4)))
    liar = data.draw(st.sampled_from(sorted(seats)))
    said = data.draw(st.dictionaries(st.integers(0, 20).filter(bool), st.booleans()))
    heard = Complaints(1.0)
    for now in range(40):
        heard.hear(liar, [Complaint(seat, damaged) for seat, damaged in said.items()], float(now))
        found = heard.verdict(seats, float(now))
        assert found is None or (found.seat, found.damaged) == (liar, False)


def test_a_pair_apart_ends_with_one_of_them_gone_whoever_says_it() -> None:
    for above, below in permutations((2, 3)):
        for said in ({"s1": (above + 1,)}, {f"s{above + 1}": (1,)}):
            found = after(seats_of(above, below), LATE, **said)
            assert found is not None and found.seat in (1, above + 1)
