"""In a crowd: whom each member is told of."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farflung.coordinator.roster.partial_view import (
    FORGET_EVERY_S,
    FRESH_S,
    KEPT,
    KEPT_LEAST,
    MET_EVERY_S,
    PAIRS_KEPT,
    THICK_LEAST,
    PartialView,
    RosterNews,
    RosterReader,
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


def news(
    known: PartialView,
    peer: str,
    here: dict[str, Here],
    has_no: int = 0,
    now: float = 0.0,
    ways: tuple[str, ...] = (),
) -> RosterNews:
    return known.news(RosterReader(peer, has_no, ways), here, now)


def told(known: PartialView, peer: str, here: dict[str, Here], now: float = 0.0) -> list[str]:
    return names_of(news(known, peer, here, now=now))


def names_of(told: RosterNews) -> list[str]:
    assert told.roster is not None
    return [contact.peer for contact in told.roster]


def test_two_always_hear_of_each_other() -> None:
    here, known = people(5), PartialView()
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
    here, known = people(5), PartialView()
    known.gather([["p00000", "p00001", "p00002"]], 0.0)
    assert told(known, "p00001", here) == ["p00000", "p00002"]


def test_a_list_is_told_until_a_beat_names_it_and_then_what_is_new_in_it() -> None:
    here, known = people(5), PartialView()
    known.introduce("p00000", ["p00001"], 0.0)
    first = news(known, "p00000", here, 7)
    assert first.since == 0 and names_of(first) == ["p00001"] and news(known, "p00000", here, 7) == first
    assert news(known, "p00000", here, first.number) == RosterNews(first.number, None)
    known.introduce("p00000", ["p00001"], 1.0)
    assert news(known, "p00000", here, first.number, 1.0).roster is None, "nobody new"
    known.introduce("p00000", ["p00002"], 1.0)
    newer = news(known, "p00000", here, first.number, 1.0)
    assert newer.number > first.number == newer.since and names_of(newer) == ["p00002"]
    assert not newer.gone and names_of(news(known, "p00000", here)) == ["p00001", "p00002"]


def test_P8_who_has_gone_or_has_another_key_is_told_at_once() -> None:
    """Else a peer that was banned could speak with others for as long as their lists last."""
    here, known = people(3), PartialView()
    known.introduce("p00000", ["p00001", "p00002"], 0.0)
    first = news(known, "p00000", here).number
    del here["p00001"]
    known.forget("p00001")
    assert known.lacks("p00000", here)
    second = news(known, "p00000", here, first)
    assert second.roster == () and second.gone == ("p00001",) and not known.lacks("p00000", here)
    assert told(known, "p00000", here) == ["p00002"]
    here["p00002"] = Here(Contact("p00002", "b", hash_bytes(b"another"), "h:1"))
    known.begins_anew("p00002", 0.0)
    known.has_changed("p00002")
    third = news(known, "p00000", here, second.number)
    assert third.roster == (here["p00002"].contact,) and not third.gone
    assert news(known, "p00000", here, first).gone == ("p00001",), "as long as it may have an older list"
    here |= people(3)
    known.introduce("p00000", ["p00001"], 0.0)
    fourth = news(known, "p00000", here, third.number)
    assert names_of(fourth) == ["p00001"] and told(known, "p00000", here) == ["p00001", "p00002"]


def test_who_is_not_needed_any_more_stays_and_is_not_told_again() -> None:
    here, known = people(4), PartialView()
    known.introduce("p00000", ["p00001"], 0.0)
    number = news(known, "p00000", here).number
    hours = 9 * 3600.0
    known.introduce("p00000", ["p00002"], hours)
    later = news(known, "p00000", here, number, hours)
    assert names_of(later) == ["p00002"] and not later.gone
    known.introduce("p00000", ["p00001"], 2 * hours)
    assert news(known, "p00000", here, later.number, 2 * hours).roster is None


def test_other_ways_to_those_that_it_knows_are_told_with_an_empty_difference() -> None:
    here, known = people(2), PartialView()
    known.introduce("p00000", ["p00001"], 0.0)
    first = news(known, "p00000", here, ways=("a",))
    assert news(known, "p00000", here, first.number, ways=("a",)).roster is None
    other = news(known, "p00000", here, first.number, ways=("b",))
    assert other.roster == () and other.since == first.number < other.number


def test_P8_a_list_is_bounded_and_those_who_are_needed_now_come_first() -> None:
    here, known = people(ROSTER_MOST + 200), PartialView()
    names = list(here)
    most = max(KEPT_LEAST, min(KEPT, PAIRS_KEPT // len(here)))
    assert most < KEPT, "in very large runs lists are shorter"
    known.introduce(names[0], names[1 : most + 51], 0.0)
    known.introduce(names[0], names[-50:], FRESH_S + 1)
    kept = told(known, names[0], here, FRESH_S + 1)
    assert len(kept) == most and set(names[-50:]) <= set(kept)
    known.introduce(names[0], names[1:], FRESH_S + 2)
    assert len(told(known, names[0], here, FRESH_S + 2)) == ROSTER_MOST


def test_whom_one_has_no_room_for_does_not_know_it_either() -> None:
    here, known = people(ROSTER_MOST + 2), PartialView()
    names = list(here)
    known.introduce(names[0], names[1:], 0.0)
    assert told(known, names[-1], here) == [names[0]]
    [out] = set(names[1:]) - set(told(known, names[0], here))
    assert told(known, out, here) == []


def test_who_met_the_same_moments_ago_is_not_introduced_again_unless_somebody_went() -> None:
    known = PartialView()
    assert not known.has_met("ann", ["bob"], 0.0)
    known.introduce("ann", ["bob"], 0.0)
    assert known.has_met("ann", ["bob"], MET_EVERY_S - 1)
    assert not known.has_met("ann", ["cat"], MET_EVERY_S - 1) and not known.has_met("ann", ["cat"], 9e9)
    known.forget("bob")
    assert not known.has_met("ann", ["cat"], 9e9)


def test_a_session_that_begins_has_been_told_nothing_and_hears_of_those_that_it_needs_now() -> None:
    here, known = people(4), PartialView()
    known.introduce("p00000", ["p00003"], 0.0)
    known.introduce("p00000", ["p00001"], FRESH_S + 1)
    number = news(known, "p00000", here, now=FRESH_S + 1).number
    known.begins_anew("p00000", FRESH_S + 1)
    known.introduce("p00000", ["p00002"], FRESH_S + 1)
    again = news(known, "p00000", here, number, FRESH_S + 1)
    assert again.number != number and again.since == 0 and names_of(again) == ["p00001", "p00002"]


class Life(RuleBasedStateMachine):
    """A run in which peers come, go, change and meet; words to them cross, and some are late."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.known, self.now = people(6), PartialView(), 0.0
        self.lists = {name: Heard() for name in self.here}
        self.away = people(6)
        self.changes = 0

    @rule(one=st.integers(0, 5), others=st.lists(st.integers(0, 5), max_size=4))
    def meet(self, one: int, others: list[int]) -> None:
        self.known.introduce(f"p{one:05}", [f"p{other:05}" for other in others], self.now)

    @rule(circle=st.sets(st.integers(0, 5), min_size=1, max_size=5))
    def gather(self, circle: set[int]) -> None:
        self.known.gather([[f"p{one:05}" for one in circle]], self.now)

    @rule(one=st.integers(0, 5))
    def go_or_come(self, one: int) -> None:
        name = f"p{one:05}"
        if self.here.pop(name, None) is not None:
            self.known.forget(name)
        else:
            self.here[name], self.lists[name] = self.away[name], Heard()
            self.known.begins_anew(name, self.now)
            self.known.has_changed(name)

    @rule(one=st.integers(0, 5))
    def change(self, one: int) -> None:
        name, self.changes = f"p{one:05}", self.changes + 1
        if name in self.here:
            self.here[name] = Here(Contact(name, name, hash_bytes(name.encode()), f"h:{self.changes}"))
            self.known.has_changed(name)

    @rule(seconds=st.floats(0.0, 2 * FORGET_EVERY_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(one=st.integers(0, 5), is_heard=st.booleans(), names_it=st.booleans())
    def tick(self, one: int, is_heard: bool, names_it: bool) -> None:
        """`is_heard`: else it is still on its way when the next one is made; `names_it`: its next beat shows it."""
        name = f"p{one:05}"
        if name not in self.here:
            return
        heard = self.lists[name]
        heard.coming.append(news(self.known, name, self.here, heard.named, self.now))
        if is_heard:
            heard.hear()
        if names_it:
            heard.named = heard.number

    @invariant()
    def both_know_each_other(self) -> None:
        needed = {peer: set(each.needed) for peer, each in self.known._of.items()}
        assert all(peer in needed[other] for peer, others in needed.items() for other in others)

    def teardown(self) -> None:
        for name in self.here:
            heard = self.lists[name]
            heard.coming.append(news(self.known, name, self.here, heard.named, self.now))
            heard.hear()
            needed = {peer: at for peer, at in self.known._of[name].needed.items() if peer in self.here}
            # A session that begins is not told of those whom the one before met long ago.
            fresh = {peer for peer, at in needed.items() if self.now - at <= FRESH_S}
            assert fresh <= heard.contacts.keys() <= needed.keys()
            assert all(self.here[peer].contact == contact for peer, contact in heard.contacts.items())


class Heard:
    """As a member keeps it: see peer/restoring/fellow_search.py."""

    def __init__(self) -> None:
        self.number, self.named = 0, 0
        self.contacts: dict[str, Contact] = {}
        self.coming: list[RosterNews] = []

    def hear(self) -> None:
        """All that is on its way, in order."""
        for told in self.coming:
            if told.roster is None:
                continue
            if told.since:
                assert told.since <= self.number <= told.number
            else:
                self.contacts = {}
            self.contacts = {peer: at for peer, at in self.contacts.items() if peer not in told.gone}
            self.contacts |= {contact.peer: contact for contact in told.roster}
            self.number = told.number
        self.coming = []


TestLife = Life.TestCase
