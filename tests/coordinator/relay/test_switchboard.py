"""Who is joined, who waits, and whose time is over: whatever strangers and guests do."""

from __future__ import annotations

from farflung.coordinator.reach.relays import Ticket
from farflung.coordinator.relay.switchboard import (
    AGAIN_S,
    GUEST_PATIENCE_S,
    GUESTS_MOST,
    GUESTS_OF_NETWORK,
    IDLE_S,
    PAIRS_MOST,
    WAITS_S,
    PairingOutcome,
    Switchboard,
)

PAIR, OTHER = b"p" * 16, b"o" * 16


def ticket(side: int, until_s: int = 1000, pair: bytes = PAIR) -> Ticket:
    return Ticket(pair, side, until_s)


def board(*pairs: bytes) -> Switchboard:
    found = Switchboard()
    assert found.want(pairs or (PAIR,)) == []
    return found


def come(switch: Switchboard, connection: int, shown: Ticket, now: float = 0.0) -> PairingOutcome:
    assert switch.comes(connection, "", now) == []
    return switch.shows(connection, shown, now)


def test_two_sides_are_joined_and_end_together() -> None:
    switch = board()
    assert come(switch, 1, ticket(0)) == PairingOutcome()
    assert (switch.guests, switch.waiting, switch.joined) == (0, 1, 0)
    assert come(switch, 2, ticket(1)) == PairingOutcome(joined_to=1)
    assert (switch.waiting, switch.joined) == (0, 1) and switch.pair_of(2) == PAIR
    assert switch.ends(1) == [2] and (switch.waiting, switch.joined) == (0, 0)
    assert switch.ends(2) == []


def test_a_ticket_that_has_ended_or_is_of_no_wanted_pair_opens_nothing() -> None:
    switch = board()
    assert come(switch, 1, ticket(0, until_s=5), now=5.1).why_not == "its ticket has ended"
    assert "does not want" in come(switch, 2, ticket(0, pair=OTHER)).why_not
    assert switch.guests == 2 and switch.waiting == 0, "they are strangers still"


def test_tickets_end_by_the_clock_of_the_one_who_wrote_them() -> None:
    switch = Switchboard()
    switch.want((PAIR,), clock_ahead_s=500.0)
    assert come(switch, 1, ticket(0, until_s=510), now=10.1).why_not == "its ticket has ended"
    assert come(switch, 2, ticket(0, until_s=511), now=10.1) == PairingOutcome()
    behind = Switchboard()
    behind.want((PAIR,), clock_ahead_s=-500.0)
    assert come(behind, 1, ticket(0, until_s=20), now=519.0) == PairingOutcome()


def test_an_older_ticket_is_of_no_use_once_a_newer_one_was_shown() -> None:
    switch = board()
    assert not come(switch, 1, ticket(0, until_s=900)).why_not
    assert not come(switch, 2, ticket(0, until_s=1000), now=AGAIN_S).why_not
    assert "newer" in come(switch, 3, ticket(0, until_s=900), now=9.0).why_not


def test_a_side_that_comes_again_takes_its_own_place_and_the_other_side_must_come_again_too() -> None:
    switch = board()
    come(switch, 1, ticket(0))
    come(switch, 2, ticket(1))
    assert "moment ago" in come(switch, 3, ticket(0), now=AGAIN_S / 2).why_not, "not as often as it likes"
    assert switch.shows(3, ticket(0), AGAIN_S) == PairingOutcome(closed=(1, 2))
    assert come(switch, 4, ticket(1), now=AGAIN_S) == PairingOutcome(joined_to=3), (
        "who was hung up on need not wait"
    )
    assert switch.ends(1) == [] and switch.joined == 1


def test_a_pair_cannot_be_joined_to_another_one() -> None:
    switch = board(PAIR, OTHER)
    come(switch, 1, ticket(0))
    assert come(switch, 2, ticket(1, pair=OTHER)) == PairingOutcome()
    assert switch.joined == 0


def test_those_that_the_coordinator_wants_no_more_are_hung_up_on() -> None:
    switch = board(PAIR, OTHER)
    come(switch, 1, ticket(0))
    come(switch, 2, ticket(1))
    come(switch, 3, ticket(0, pair=OTHER))
    assert sorted(switch.want([OTHER])) == [1, 2] and switch.waiting == 1
    assert "does not want" in come(switch, 4, ticket(0), now=9.0).why_not


def test_strangers_have_few_places_and_a_moment_each() -> None:
    switch = board()
    for number in range(GUESTS_OF_NETWORK):
        assert switch.comes(number, "192.0.2.0/24", 0.0) == []
    assert switch.comes(99, "192.0.2.0/24", 0.0) == [99], "one network does not fill them all"
    for number in range(GUESTS_OF_NETWORK, GUESTS_MOST):
        assert switch.comes(100 + number, "", 0.0) == []
    assert switch.comes(999, "", 0.0) == [999] and switch.guests == GUESTS_MOST
    assert switch.comes(1000, "", GUEST_PATIENCE_S) == [0], "the longest silent one makes room"
    assert len(switch.over(GUEST_PATIENCE_S)) == GUESTS_MOST - 1


def test_who_waits_in_vain_and_pairs_that_say_nothing_are_hung_up_on() -> None:
    switch = board(PAIR, OTHER)
    come(switch, 1, ticket(0))
    assert switch.over(WAITS_S - 1) == [] and switch.over(WAITS_S) == [1]
    come(switch, 2, ticket(1), now=10.0)
    switch.moved(PAIR, 50.0)
    switch.moved(b"unknown", 50.0)
    assert switch.over(50.0 + IDLE_S - 1) == [] and sorted(switch.over(50.0 + IDLE_S)) == [1, 2]


def test_no_more_pairs_than_it_has_places_for() -> None:
    switch = Switchboard()
    switch.want(number.to_bytes(16, "big") for number in range(PAIRS_MOST + 1))
    assert not come(switch, 1, ticket(0, pair=(PAIRS_MOST - 1).to_bytes(16, "big"))).why_not
    assert come(switch, 2, ticket(0, pair=PAIRS_MOST.to_bytes(16, "big"))).why_not
