"""In a crowd: whom each member is told of."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from farflung.coordinator.reach.acquaintances import (
    FRESH_S,
    KEPT,
    KEPT_S,
    THICK_LEAST,
    Acquaintances,
    thicker_half,
)
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import ROSTER_MOST
from farflung.protocol.round_words import Contact


@dataclass
class Here:
    contact: Contact


def people(count: int) -> dict[str, Here]:
    names = [f"p{number:05}" for number in range(count)]
    return {name: Here(Contact(name, name, hash_bytes(name.encode()), "")) for name in names}


def told(known: Acquaintances, peer: str, here: dict[str, Here], now: float = 0.0) -> list[str]:
    roster = known.news(peer, 0, here, now).roster
    assert roster is not None
    return [contact.peer for contact in roster]


def test_two_always_hear_of_each_other() -> None:
    here, known = people(5), Acquaintances()
    known.introduce("p00000", ["p00001", "p00002"], 0.0)
    assert told(known, "p00000", here) == ["p00001", "p00002"]
    assert told(known, "p00001", here) == told(known, "p00002", here) == ["p00000"]
    assert told(known, "p00003", here) == []


@example([float(rate) for rate in range(1, 41)])
@given(st.lists(st.one_of(st.just(0.0), st.floats(1.0, 1e12)), max_size=60))
def test_half_of_those_who_may_be_asked_are_whatever_others_say_of_their_lines(rates: list[float]) -> None:
    said = {f"p{number:02}": rate for number, rate in enumerate(rates)}
    asked = thicker_half([*said], said)
    assert (
        asked == sorted(asked) and 2 * len(asked) >= len(said) and len(asked) >= min(len(said), THICK_LEAST)
    )
    left_out = [said[peer] for peer in said if peer not in asked]
    assert all(rate <= min(said[peer] or rate for peer in asked) for rate in left_out if rate)


def test_nobody_is_left_out_of_a_few_nor_of_those_who_are_alike() -> None:
    few = {f"p{number}": 10.0**number for number in range(THICK_LEAST)}
    assert thicker_half([*few], few) == [*few]
    alike = dict.fromkeys(map(str, range(40)), 5e6) | {"nobody knows": 0.0}
    assert thicker_half([*alike], alike) == [*alike]


def test_all_of_a_group_hear_of_each_other_and_nobody_of_itself() -> None:
    here, known = people(5), Acquaintances()
    known.gather([["p00000", "p00001", "p00002"]], 0.0)
    assert told(known, "p00001", here) == ["p00000", "p00002"]


def test_a_list_is_told_until_a_beat_names_it_and_again_when_it_is_another_one() -> None:
    here, known = people(5), Acquaintances()
    known.introduce("p00000", ["p00001"], 0.0)
    number, roster = known.news("p00000", 7, here, 0.0)
    assert roster is not None and known.news("p00000", 7, here, 0.0).roster == roster
    assert known.news("p00000", number, here, 0.0) == (number, None)
    known.introduce("p00000", ["p00001"], 1.0)
    assert known.news("p00000", number, here, 1.0) == (number, None), "nobody new"
    known.introduce("p00000", ["p00002"], 1.0)
    newer, roster = known.news("p00000", number, here, 1.0)
    assert newer > number and roster is not None and len(roster) == 2


def test_P8_who_has_gone_or_has_another_key_is_told_at_once() -> None:
    """Else a peer that was banned could speak with others for as long as their lists last."""
    here, known = people(3), Acquaintances()
    known.introduce("p00000", ["p00001", "p00002"], 0.0)
    number = known.news("p00000", 0, here, 0.0).number
    gone = here.pop("p00001")
    assert known.lacks("p00000", here)
    number, roster = known.news("p00000", number, here, 0.0)
    assert roster is not None and [each.peer for each in roster] == ["p00002"]
    here["p00002"] = Here(Contact("p00002", "b", hash_bytes(b"another"), "h:1"))
    number, roster = known.news("p00000", number, here, 0.0)
    assert roster == (here["p00002"].contact,)
    here["p00001"] = gone
    known.introduce("p00000", ["p00001"], 0.0)
    assert told(known, "p00000", here) == ["p00001", "p00002"]


def test_who_is_not_needed_any_more_stays_for_a_while() -> None:
    here, known = people(4), Acquaintances()
    known.introduce("p00000", ["p00001"], 0.0)
    known.introduce("p00000", ["p00002"], KEPT_S - 1)
    assert told(known, "p00000", here, KEPT_S - 1) == ["p00001", "p00002"], "a line may be of use again"
    known.introduce("p00000", ["p00003"], 2 * KEPT_S - 2)
    assert told(known, "p00000", here, 2 * KEPT_S - 2) == ["p00002", "p00003"]


def test_P8_a_list_is_bounded_and_those_who_are_needed_now_come_first() -> None:
    here, known = people(ROSTER_MOST + KEPT + 100), Acquaintances()
    names = list(here)
    known.introduce(names[0], names[1 : KEPT + 51], 0.0)
    known.introduce(names[0], names[-50:], FRESH_S + 1)
    kept = told(known, names[0], here, FRESH_S + 1)
    assert len(kept) == KEPT and set(names[-50:]) <= set(kept)
    known.introduce(names[0], names[1:], FRESH_S + 2)
    assert len(told(known, names[0], here, FRESH_S + 2)) == ROSTER_MOST


def test_a_session_that_begins_has_been_told_nothing() -> None:
    here, known = people(3), Acquaintances()
    known.introduce("p00000", ["p00001"], 0.0)
    number = known.news("p00000", 0, here, 0.0).number
    known.forget("p00000")
    known.introduce("p00000", ["p00002"], 0.0)
    again, roster = known.news("p00000", 0, here, 0.0)
    assert again != number and roster is not None
