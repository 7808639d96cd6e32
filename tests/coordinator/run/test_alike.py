"""Peers whose models compute something else are named, by their word alone and with no other consequence."""

from __future__ import annotations

import math

import pytest

from farflung.coordinator.run.effects import Note
from farflung.protocol import messages as m
from farflung.protocol.manifest import Manifest, RunSection
from farflung.protocol.round_words import FORWARD_NUMBERS, Forward
from rig.guests import Guest
from rig.undialled_hall import Hall


def says(*first: float, version: int = 0, form: bytes = b"one form", coarse: bool = False) -> Forward:
    return Forward(version, form, coarse, (*first, *(1.0 for _ in range(FORWARD_NUMBERS - len(first)))))


class Room(Hall):
    def __init__(self, *guests: Guest) -> None:
        super().__init__(Manifest(run=RunSection(name="demo", min_peers=2, max_peers=8)))
        for guest in guests:
            self.let_in(guest)

    def let_in(self, guest: Guest) -> None:
        welcome = self.hello(guest)
        assert isinstance(welcome, m.Welcome)
        guest.session, guest.seq = welcome.session, 0

    def advice(self, guest: Guest, forward: Forward | None) -> str:
        return self.beat(guest, forward=forward).advice


def test_of_two_the_later_one_is_named_and_told_by_how_much_it_differs() -> None:
    ann, bob = Guest(1), Guest(2)
    room = Room(ann, bob)
    assert room.advice(ann, says(1.0)) == ""
    told = room.advice(bob, says(4.0))
    assert "computes something else than that of" in told and "with the weights of version 0" in told
    assert "differ by 54%" in told
    assert room.advice(ann, says(1.0)) == "", "the other one is not named"
    assert room.advice(bob, says(4.0)) == told, "it stays"
    assert room.advice(bob, says(1.0)) == "", "until it is no longer so"


def test_of_three_the_one_that_is_alone_is_named_even_if_it_came_first() -> None:
    ann, bob, cid = Guest(1), Guest(2), Guest(3)
    room = Room(ann, bob, cid)
    room.advice(ann, says(4.0))
    assert room.advice(bob, says(1.0))
    assert not room.advice(cid, says(1.0))
    assert room.advice(ann, says(4.0))
    assert not room.advice(bob, says(1.0, version=1)), (
        "by then it is compared with what others say of version 1"
    )
    assert not room.advice(cid, says(1.0, version=1))
    assert not room.advice(bob, says(1.0, version=1))


def test_whoever_comes_after_somebody_left_is_still_the_later_one() -> None:
    ann, bob, cid = Guest(1), Guest(2), Guest(3)
    room = Room(ann, bob)
    room.advice(ann, says(1.0))
    room.says(bob, m.Leave(session=bob.session, seq=1, reason=""))
    room.let_in(cid)
    assert room.advice(cid, says(4.0)), "it came last"
    assert room.advice(ann, says(1.0)) == ""


@pytest.mark.parametrize(
    "other",
    [
        says(4.0, version=1),
        says(4.0, form=b"a second"),
        says(1.001),
        says(1.1, coarse=True),
        None,
    ],
)
def test_nothing_is_said_of_other_weights_other_inputs_and_rounding(other: Forward | None) -> None:
    ann, bob = Guest(1), Guest(2)
    room = Room(ann, bob)
    assert room.advice(ann, says(1.0)) == ""
    assert room.advice(bob, other) == ""


@pytest.mark.parametrize("number", [math.nan, math.inf, -1e308, 1e308])
def test_whatever_a_liar_says_is_a_warning_of_it_alone(number: float) -> None:
    ann, bob, cid = Guest(1), Guest(2), Guest(3)
    room = Room(ann, bob, cid)
    room.advice(ann, says(1.0))
    room.advice(bob, says(1.0))
    told = room.advice(cid, Forward(0, b"one form", False, (number,) * FORWARD_NUMBERS))
    assert "computes something else" in told and "nan" not in told and "inf" not in told
    assert not room.advice(ann, says(1.0)) and not room.advice(bob, says(1.0))
    assert len(room.machine.core.members.alive) == 3


def test_it_stands_in_the_record_once_and_goes_with_the_member() -> None:
    ann, bob = Guest(1), Guest(2)
    room = Room(ann, bob)
    room.advice(ann, says(1.0))
    notes = []
    for version in range(3):
        room.advice(ann, says(1.0, version=version))
        notes += [each for each in room.told(bob, says(4.0, version=version)) if isinstance(each, Note)]
    assert len([each for each in notes if "computes something else" in each.text]) == 1
    room.says(bob, m.Leave(session=bob.session, seq=99, reason="left"))
    bob.restarts = 1
    room.let_in(bob)
    assert room.advice(bob, None) == ""


def test_a_peer_that_was_named_stays_so_while_the_others_have_not_spoken_of_a_version() -> None:
    ann, bob, cid = Guest(1), Guest(2), Guest(3)
    room = Room(ann, bob, cid)
    for guest, number in ((ann, 1.0), (bob, 4.0), (cid, 1.0)):
        room.advice(guest, says(number))
    assert room.advice(bob, says(4.0, version=1))
    assert not room.advice(cid, says(1.0, version=1)), "ann, who was here first, has said nothing yet"
    assert room.advice(bob, says(4.0, version=1))


@pytest.mark.parametrize("of_first_version", [("bob", "ann"), ("bob", "ann", "cid")])
def test_the_one_that_differs_from_two_is_named_though_it_came_first_and_meets_each_of_them_alone(
    of_first_version: tuple[str, ...],
) -> None:
    """Not everybody speaks of each version."""
    guests = {"bob": Guest(1), "cid": Guest(2), "ann": Guest(3)}
    room = Room(*guests.values())

    def says_of(who: str, version: int) -> str:
        return room.advice(guests[who], says(4.0 if who == "bob" else 1.0, version=version))

    assert [bool(says_of(who, 0)) for who in of_first_version[:2]] == [False, True], "of two the later one"
    says_of("bob", 1)
    for who in of_first_version[2:]:
        assert not says_of(who, 0), "ann is no longer named"
    assert not says_of("cid", 1), "bob has differed from ann, too"
    assert says_of("bob", 1)
    assert not says_of("ann", 1)


def test_a_process_that_began_again_is_blamed_for_nothing_that_the_last_one_computed() -> None:
    ann, bob, cid = Guest(1), Guest(2), Guest(3)
    room = Room(ann, bob)
    room.advice(ann, says(4.0))
    assert room.advice(bob, says(1.0)), "of two the later one, which is the right one here"
    room.says(ann, m.Leave(session=ann.session, seq=99, reason=""))
    ann.restarts = 1
    room.let_in(ann)
    assert not room.advice(ann, says(1.0, version=1))
    room.let_in(cid)
    assert room.advice(cid, says(4.0, version=1))
    assert not room.advice(ann, says(1.0, version=1))
