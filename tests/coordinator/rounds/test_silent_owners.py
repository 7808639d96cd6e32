"""Whose word about the others stands alone, and whose results do not spread."""

from __future__ import annotations

import pytest

from farflung.coordinator.rounds.owners import (
    ROUNDS_NOT_WAITED,
    LastHolders,
    Spread,
    are_most,
    holders_needed,
    lacking_alone,
    lacks_most,
)

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


@pytest.mark.parametrize(
    ("here", "least", "needed"), [(5, 1, 3), (5, 4, 4), (5, 9, 5), (4, 2, 3), (2, 1, 2), (1, 3, 1)]
)
def test_most_of_the_living_have_to_hold_a_result_and_as_many_as_a_round_needs(
    here: int, least: int, needed: int
) -> None:
    assert holders_needed(here, least) == needed


def test_who_has_no_result_is_waited_for_once_and_then_not_for_some_rounds() -> None:
    last = LastHolders()
    assert not last.may_go_without({"ann"}, 0.0, 10.0) and not last.may_go_without({"ann"}, 9.9, 10.0)
    assert last.may_go_without({"ann"}, 10.0, 10.0)
    assert last.on_commit({"ann"}) == {"ann"}
    for _ in range(ROUNDS_NOT_WAITED):
        last.begin()
        assert last.may_go_without({"ann"}, 20.0, 10.0)
        assert not last.may_go_without({"ann", "bob"}, 20.0, 10.0), "bob was not waited for yet"
        assert last.on_commit({"ann"}) == set(), "it is told once"
    last.begin()
    assert not last.may_go_without({"ann"}, 30.0, 10.0), "its line may be another one by now"


def test_the_wait_begins_anew_when_something_has_to_be_merged_again() -> None:
    last = LastHolders()
    last.may_go_without({"ann"}, 0.0, 10.0)
    last.begin()
    assert not last.may_go_without({"ann"}, 10.0, 10.0) and last.may_go_without({"ann"}, 20.0, 10.0)
