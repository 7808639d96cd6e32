"""At which addresses a peer knocks, and when: nobody waits for a dead one, nor follows a replaced coordinator."""

from __future__ import annotations

import itertools

import pytest

from farflung.peer.line.doors import (
    DOUBT_S,
    PATIENCE_S,
    SHUN_S,
    SHUNNED_AFTER_S,
    SPENT_PATIENCE_S,
    STAGGER_S,
    Doors,
)
from farflung.protocol.join_url import Address

A, B, C = (Address("a", 1), Address("b", 1), Address("c", 1))
SOON_S = STAGGER_S / 10


def test_the_next_address_is_tried_a_moment_after_the_one_before() -> None:
    doors = Doors((A, B, C))
    assert doors.due(0.0) == []
    doors.knock(10.0)
    assert doors.due(10.0) == [A]
    assert doors.due(10.0 + STAGGER_S) == [A, B]
    doors.knock(10.3)  # knocking again does not begin anew
    assert doors.due(10.0 + 2 * STAGGER_S) == [A, B, C]
    doors.answered(B)
    assert doors.due(11.0) == [] and doors.at == B


def test_the_one_that_answered_last_comes_first_and_gets_more_time() -> None:
    doors = Doors((A, B, C))
    doors.knock(0.0)
    doors.answered(B)
    doors.knock(20.0)
    assert doors.due(20.0 + PATIENCE_S) == [B]
    assert doors.due(20.0 + PATIENCE_S + STAGGER_S + SOON_S) == [B, A]
    assert doors.due(20.0 + PATIENCE_S + 2 * STAGGER_S + SOON_S) == [B, A, C]


def test_one_that_was_silent_for_long_gets_less_time() -> None:
    """A coordinator with a standby: nobody waits twice for a dead one."""
    doors = Doors((A, B))
    doors.knock(0.0)
    doors.answered(A)
    doors.knock(20.0, silent_s=PATIENCE_S)
    assert doors.due(20.0 + SPENT_PATIENCE_S) == [A]
    assert doors.due(20.0 + SPENT_PATIENCE_S + STAGGER_S + SOON_S) == [A, B]
    doors.answered(A)
    doors.knock(40.0, silent_s=0.1)  # it said good-bye, and is back in a moment
    assert doors.due(40.0 + PATIENCE_S) == [A]


def test_a_door_whose_coordinator_leaves_a_hello_unanswered_comes_last_if_there_are_others() -> None:
    doors = Doors((A, B))
    doors.knock(0.0)
    doors.answered(A)
    assert doors.doubt(5.0)
    doors.knock(5.0)
    assert doors.due(5.0) == [B]
    assert doors.due(5.0 + SHUNNED_AFTER_S + 2 * STAGGER_S) == [B, A]
    doors.hang_up()
    doors.knock(5.0 + DOUBT_S)
    assert doors.due(5.0 + DOUBT_S) == [A], "not for long"
    assert not Doors((A,)).doubt(5.0)


def test_where_a_replaced_coordinator_answered_is_tried_after_all_others_for_a_while() -> None:
    doors = Doors((A, B))
    doors.knock(0.0)
    doors.answered(A)
    doors.shun(1.0)
    doors.knock(2.0)
    assert doors.due(2.0) == [B]
    assert doors.due(2.0 + SHUNNED_AFTER_S) == [B]
    assert doors.due(2.0 + SHUNNED_AFTER_S + 2 * STAGGER_S) == [B, A]
    doors.hang_up()
    doors.knock(1.0 + SHUN_S)
    assert doors.due(1.0 + SHUN_S) == [A], "forgiven"


def test_the_only_address_is_tried_at_once_whatever_was_found_there() -> None:
    doors = Doors((A,))
    doors.knock(0.0)
    doors.answered(A)
    doors.shun(0.0)
    doors.knock(1.0)
    assert doors.due(1.0) == [A]


@pytest.mark.parametrize("answered", [False, True])
def test_other_places_than_before(answered: bool) -> None:
    doors = Doors((A, B))
    doors.knock(0.0)
    if answered:
        doors.answered(A)
    doors.look_at((B, C))
    assert doors.at == (A if answered else B), "where it was found stays a place, whatever is told"
    doors.knock(5.0)
    assert doors.due(50.0) == ([A, B, C] if answered else [B, C])


def test_every_address_is_tried_in_the_end_whatever_happened() -> None:
    for happened in itertools.product(["answer", "shun", "look", "knock"], repeat=4):
        doors, now = Doors((A, B, C)), 0.0
        for each in happened:
            now += 1.0
            match each:
                case "answer":
                    doors.answered(B)
                case "shun":
                    doors.shun(now)
                case "look":
                    doors.look_at((C, B, A))
                case "knock":
                    doors.knock(now)
        doors.knock(now)
        assert sorted(doors.due(now + 20.0)) == [A, B, C]
        assert len(doors.due(now)) >= 1
