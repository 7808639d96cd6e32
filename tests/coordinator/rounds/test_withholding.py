"""Whose word about the others stands alone, and whose results do not spread."""

from __future__ import annotations

import pytest

from farflung.coordinator.rounds.withholding import Spread, are_most, lacking_alone, lacks_most

FOUR = {"ann", "bob", "cyd", "dan"}


@pytest.mark.parametrize(
    ("accusers", "owners", "members", "most"),
    [
        ({"ann"}, {"ann"}, 2, True),  # the only other one
        ({"ann"}, {"ann"}, 3, False),  # nobody else owns anything, but one word is one word
        ({"ann"}, {"ann", "bob"}, 3, False),
        ({"ann", "bob"}, {"ann", "bob"}, 3, True),
        ({"ann", "bob"}, {"ann", "bob", "cyd", "dan"}, 5, False),
        ({"ann", "bob", "cyd"}, {"ann", "bob", "cyd", "dan"}, 5, True),
        ({"eve", "fay"}, {"ann", "bob", "cyd"}, 6, False),  # who owns nothing got nothing
    ],
)
def test_so_many_bar_a_member(accusers: set[str], owners: set[str], members: int, most: bool) -> None:
    assert are_most(accusers, owners, members) == most


def test_an_owner_that_lacks_what_all_others_hold_stands_alone() -> None:
    lacks = {"ann": set(), "bob": {"ann", "cyd"}, "cyd": set(), "dan": set()}
    alone = lacking_alone(lacks, FOUR)
    assert alone["bob"] == {"ann", "cyd"} and lacks_most(alone, FOUR) == {"bob"}


def test_what_another_owner_lacks_too_is_its_senders_business() -> None:
    lacks = {"ann": {"cyd"}, "bob": {"ann", "cyd"}, "cyd": set(), "dan": set()}
    alone = lacking_alone(lacks, FOUR)
    assert alone["bob"] == {"ann"} and lacks_most(alone, FOUR) == set()


def test_owners_in_league_do_not_speak_for_each_other() -> None:
    everybody = {"ann", "bob", "cyd", "dan", "eve"}
    lacks = {
        "ann": set(),
        "bob": set(),
        "cyd": set(),
        "dan": {"ann", "bob", "cyd"},
        "eve": {"ann", "bob", "cyd"},
    }
    assert lacks_most(lacking_alone(lacks, everybody), everybody) == {"dan", "eve"}


def test_where_everybody_lacks_most_nobody_stands_alone() -> None:
    lacks = {who: FOUR - {who} for who in FOUR}
    assert lacks_most(lacking_alone(lacks, FOUR), FOUR) == set()


def test_of_one_owner_alone_nothing_is_known() -> None:
    assert lacking_alone({"ann": {"bob", "cyd"}}, {"ann", "bob", "cyd"}) == {}


def test_results_that_go_on_spreading_are_not_stuck() -> None:
    spread = Spread()
    assert spread.stuck({"ann"}, {"ann": 1}, 0.0, 10.0) == set()
    assert spread.stuck({"ann"}, {"ann": 2}, 9.0, 10.0) == set()
    assert spread.stuck({"ann"}, {"ann": 2}, 18.9, 10.0) == set()
    assert spread.stuck({"ann"}, {"ann": 2}, 19.0, 10.0) == {"ann"}


def test_an_owner_that_owed_nothing_for_a_moment_begins_anew() -> None:
    spread = Spread()
    spread.stuck({"ann"}, {"ann": 1}, 0.0, 10.0)
    spread.stuck(set(), {"ann": 1}, 5.0, 10.0)
    assert spread.stuck({"ann"}, {"ann": 1}, 11.0, 10.0) == set()
