"""The table of seats: what a change makes of it, and which tables nobody may say."""

from __future__ import annotations

import pytest

from farflung.collectives.pipeline.seats import Seat, Table
from farflung.protocol.limits import MEMBERS_PER_ROUND


def test_seats_come_and_go_by_number() -> None:
    table = Table().seated(1, "a", 0).seated(2, "b", 0).seated(5, "c", 1)
    assert (table.number, [seat.number for seat in table.living(0)]) == (3, [1, 2])
    assert table.last_loss(0) == 0 and table.last_change(0) == 2
    gone = table.unseated(1)
    assert not gone.lives(1) and gone.lives(2) and table.lives(1)
    assert (gone.last_loss(0), gone.last_change(0), gone.last_loss(1)) == (4, 4, 0)
    back = gone.seated(6, "a", 0)
    assert back.seats[6].since == back.last_change(0) == 5 and back.last_loss(0) == 4
    later = back.of_next_batch({})
    assert set(later.seats) == {2, 5, 6} and later.last_loss(0) == 0 and later.number == 6


def test_shares_change_and_nobody_moves() -> None:
    table = Table().seated(1, "a", 0).seated(2, "b", 1)
    other = table.of_next_batch({2: 0.25})
    assert other.number == 3 and other.seats[2].share == 0.25 and other.seats[1] == table.seats[1]
    assert other.last_change(0) == table.last_change(0)


def test_a_number_is_never_given_again() -> None:
    table = Table().seated(3, "a", 0)
    for taken in (3, 2):
        with pytest.raises(ValueError, match="not new"):
            table.seated(taken, "b", 0)
    with pytest.raises(ValueError, match="not there"):
        table.unseated(9)
    with pytest.raises(ValueError, match="not there"):
        table.unseated(3).unseated(3)


def test_a_stage_has_as_many_seats_as_a_round_has_members() -> None:
    table = Table()
    for number in range(1, MEMBERS_PER_ROUND + 1):
        table = table.seated(number, f"p{number}", 0)
    with pytest.raises(ValueError, match="no room"):
        table.seated(999, "more", 0)
    assert table.seated(999, "more", 1).lives(999)


@pytest.mark.parametrize(
    "seats",
    [
        (Seat(1, "a", 0, 1.0, since=1), Seat(1, "b", 0, 1.0, since=1)),
        (Seat(1, "a", 0, 1.0, since=1), Seat(2, "a", 1, 1.0, since=2)),  # one peer, two places
        (Seat(0, "a", 0, 1.0, since=1),),
        (Seat(1, "a", 0, 1.0, since=0),),
        (Seat(1, "a", 0, 1.0, since=6),),  # after the table
        (Seat(1, "a", 0, 1.0, since=3, gone=2),),
        (Seat(1, "a", 0, 1.0, since=1, gone=6),),
        (Seat(1, "a", 0, 0.0, since=1),),
        (Seat(1, "a", 0, float("nan"), since=1),),
    ],
)
def test_a_table_that_no_coordinator_would_say_is_refused(seats: tuple[Seat, ...]) -> None:
    with pytest.raises(ValueError, match="a table of seats"):
        Table(5, seats)
