"""A list of contacts, told by what is new in it."""

from __future__ import annotations

from farflung.coordinator.roster.partial_view import RosterDelta, RosterNews
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import ROSTER_GONE_MOST
from farflung.protocol.round_words import Contact


def contact(peer: str) -> Contact:
    return Contact(peer, peer, hash_bytes(peer.encode()), "")


def listing(*peers: str) -> RosterDelta:
    made = RosterDelta(10)
    for at, peer in enumerate(peers, 11):
        made.put(peer, at)
    return made


def told(of: RosterDelta, has_no: int) -> tuple[str, int, str]:
    """(who, since, gone)"""
    found = of.news(has_no, contact)
    assert found.roster is not None and found.number == of.number
    return " ".join(each.peer for each in found.roster), found.since, " ".join(found.gone)


def test_a_list_that_the_member_has_is_not_told() -> None:
    assert listing("ann", "bob").news(12, contact) == RosterNews(12, None)


def test_what_came_or_changed_since_the_number_that_it_names() -> None:
    mine = listing("bob", "cyd", "ann")
    assert told(mine, 11) == ("ann cyd", 11, "")
    assert told(mine, 12) == ("ann", 12, "")
    mine.put("bob", 14)
    assert told(mine, 12) == ("ann bob", 12, "") and told(mine, 13) == ("bob", 13, "")
    assert "bob" in mine and len(mine) == 3


def test_who_went_since_then_is_named_as_long_as_somebody_may_have_an_older_list() -> None:
    mine = listing("ann", "bob", "cyd")
    assert mine.drop("ann", 14) and not mine.drop("ann", 15) and not mine.drop("eve", 15)
    mine.drop("bob", 15)
    assert told(mine, 12) == ("cyd", 12, "bob ann") and told(mine, 14) == ("", 14, "bob")
    mine.put("ann", 16)
    assert told(mine, 13) == ("ann", 13, "bob"), "it is back"
    assert told(mine, 0) == ("ann cyd", 0, "")


def test_whoever_names_a_number_that_is_none_of_the_list_is_told_all_of_it() -> None:
    mine = listing("ann", "bob")
    for number in (0, 1, 9, 13, 1 << 61):
        assert told(mine, number) == ("ann bob", 0, "")
    assert told(mine, 10) == ("ann bob", 10, ""), "the empty one with which it began"


def test_P8_of_those_that_went_a_bounded_number_is_kept_and_older_lists_are_told_whole() -> None:
    mine = listing("ann")
    for number in range(ROSTER_GONE_MOST + 2):
        mine.put(str(number), 100 + number)
    for number in range(ROSTER_GONE_MOST + 2):
        mine.drop(str(number), 1000 + number)
    assert told(mine, 1000) == ("ann", 0, "")
    who, since, gone = told(mine, 1001)
    assert (who, since) == ("", 1001) and len(gone.split()) == ROSTER_GONE_MOST


def test_a_number_without_a_change_is_told_with_nothing_in_it() -> None:
    mine = listing("ann")
    mine.number += 1
    assert told(mine, 11) == ("", 11, "")
