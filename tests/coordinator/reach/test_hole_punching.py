"""Pairs that connect to each other at one instant: who, when, how often, and what they are told meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import pytest

from farflung.coordinator.reach.hole_punching import (
    AGAIN_MOST_S,
    AGAIN_S,
    HOLD_S,
    LEAD_S,
    LOOKS_S,
    SERIES_AT_ONCE,
    SERIES_MOST,
    SPREAD_S,
    STOOD_S,
    HolePunching,
    Nat,
)
from farflung.coordinator.roster.ways import DOORS, pair_of
from farflung.protocol.limits import MEETS_AT_ONCE
from farflung.protocol.mode_words import MEET_EVERY_S, MEET_TRIES
from farflung.protocol.round_words import Contact

EASY, HARD = "easy", "hard"
# Until a pair has a way at all, whatever happens: looks, and the first tries.
WAYLESS_S = LOOKS_S + LEAD_S + SPREAD_S + HOLD_S


@dataclass
class Hall:
    """Members, and what the coordinator sees of them; a turn is a tick of its clock."""

    count: int
    now: float = 100.0
    busy: set[frozenset[str]] = field(default_factory=set)  # who is in a round with whom
    meetings: HolePunching = field(default_factory=lambda: HolePunching(is_on=True))

    def __post_init__(self) -> None:
        names = [f"p{number:02}" for number in range(self.count)]
        self.contacts = {
            name: Contact(name, name, (at + 1).to_bytes(32, "big"), "") for at, name in enumerate(names)
        }
        self.pairs = {
            pair_of(one.key, other.key): (one, other)
            for one, other in combinations(self.contacts.values(), 2)
        }
        self.said: dict[str, set[str]] = {name: set() for name in names}
        self.shown: dict[str, tuple[str, int]] = {}
        self.turn()

    def turn(self, later_s: float = 0.0) -> bool:
        """Whoever showed itself before does so again when it is asked to."""
        self.now += later_s
        news = self._turn()
        asked = [name for name in self.shown if self.meetings.is_to_look(self.contacts[name].key)]
        for name in asked:
            self.shows(name, *self.shown[name])
        return self._turn() or news if asked else news

    def _turn(self) -> bool:
        keys = frozenset(each.key for each in self.contacts.values())
        return self.meetings.turn(
            self.pairs, keys, self.now, lambda one, other: frozenset((one, other)) in self.busy
        )

    def shows(self, name: str, nat: str = EASY, port: int = 40000) -> None:
        self.shown[name] = (nat, port)
        number = int(name[1:]) + 1
        for at, door in enumerate(DOORS):
            seen = port + (at if nat == HARD else 0)
            self.meetings.saw(self.contacts[name].key, door, f"203.0.113.{number}:{seen}")

    def connect(self, one: str, other: str, stands: bool = True) -> None:
        for mine, theirs in ((one, other), (other, one)):
            (self.said[mine].add if stands else self.said[mine].discard)(theirs)
            self.say(mine)

    def say(self, name: str) -> bool:
        return self.meetings.says(self.contacts[name].key, tuple(sorted(self.said[name])))

    def relayed(self) -> set[frozenset[str]]:
        return {
            frozenset((one.peer, other.peer))
            for name, (one, other) in self.pairs.items()
            if self.meetings.is_relayed(name)
        }

    def punched(self) -> set[frozenset[str]]:
        return {frozenset(pair) for pair in combinations(self.contacts, 2) if self.meetings.is_punched(*pair)}


PAIR = frozenset(("p00", "p01"))


def two(*nats: str) -> Hall:
    hall = Hall(2)
    for name, nat in zip(hall.contacts, nats, strict=False):
        hall.shows(name, nat)
    return hall


def test_both_hear_of_each_other_and_of_one_instant() -> None:
    hall = two(EASY, EASY)
    assert hall.turn(), "there is news for them"
    [mine], [theirs] = hall.meetings.told("p00", hall.now), hall.meetings.told("p01", hall.now)
    assert (mine.peer, theirs.peer) == ("p01", "p00") and mine.at_s == theirs.at_s
    assert (mine.endpoint, theirs.endpoint) == ("203.0.113.2:40000", "203.0.113.1:40000")
    assert hall.now + LEAD_S <= mine.at_s <= hall.now + LEAD_S + SPREAD_S
    assert not hall.turn(), "once is enough, and the tick says it again"
    hall.now = mine.at_s + MEET_TRIES * MEET_EVERY_S - 0.01
    assert hall.meetings.told("p00", hall.now) == (mine,), "whoever did not hear the first time is told again"
    hall.now = mine.at_s + MEET_TRIES * MEET_EVERY_S
    assert hall.meetings.told("p00", hall.now) == ()


def test_the_relay_is_held_back_for_the_first_tries_and_no_longer() -> None:
    hall = two(EASY, EASY)
    hall.turn()
    [meet] = hall.meetings.told("p00", hall.now)
    hall.now = meet.at_s
    hall.turn(HOLD_S - 0.01)
    assert not hall.relayed() and not hall.punched()
    assert hall.turn(0.02) and hall.relayed() == {PAIR}


def test_a_connection_counts_where_both_say_so() -> None:
    hall = two(EASY, EASY)
    hall.turn()
    hall.said["p00"].add("p01")
    assert hall.say("p00") and not hall.turn(0.1) and not hall.punched(), "one of them may lie"
    hall.said["p01"].add("p00")
    assert hall.say("p01") and hall.turn(0.1)
    assert hall.punched() == {PAIR} and not hall.relayed()
    assert not hall.say("p01") and not hall.turn(1.0), "no news"
    assert hall.meetings.told("p00", hall.now) == ()


@pytest.mark.parametrize(("nats", "found"), [((EASY, HARD), Nat.HARD), ((HARD, HARD), Nat.HARD)])
def test_behind_a_hard_router_nothing_is_tried_and_the_relay_is_there_at_once(
    nats: tuple[str, str], found: Nat
) -> None:
    hall = two(*nats)
    hall.turn()
    assert hall.relayed() == {PAIR} and not hall.meetings.told("p00", hall.now)
    assert hall.meetings.nat_of(hall.contacts["p01"].key) == found
    assert "another port for each" in hall.meetings.why_not("p01", hall.contacts["p01"].key)
    hall.turn(3 * AGAIN_MOST_S)
    assert hall.meetings.tries == 0


@pytest.mark.parametrize("port", [1, 22, 443, 1023])
def test_nobody_is_sent_to_a_port_that_belongs_to_others(port: int) -> None:
    hall = two(EASY)
    hall.shows("p01", port=port)
    hall.turn()
    assert hall.meetings.tries == 0 and hall.relayed() == {PAIR}
    assert hall.meetings.nat_of(hall.contacts["p01"].key) == Nat.LOW


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("203.0.113.1:4000", "192.168.1.7:4000"),  # of the coordinator's own network
        ("203.0.113.1:4000", "203.0.113.1:5000"),  # behind one router
        ("203.0.113.1:4000", "[2001:db8::1]:4000"),
    ],
)
def test_an_address_is_named_to_those_for_whom_it_is_the_same_machine(mine: str, theirs: str) -> None:
    hall = Hall(2)
    for contact, seen in zip(
        hall.contacts.values(), (mine.replace("203.0.113.1", "9.9.9.9"), theirs), strict=True
    ):
        for door in DOORS:
            hall.meetings.saw(contact.key, door, seen.replace("203.0.113.1", "9.9.9.9"))
    hall.turn()
    assert hall.meetings.tries == 0


def test_what_is_seen_of_strangers_is_not_kept() -> None:
    hall = two(EASY)
    assert not hall.meetings.saw(b"s" * 32, DOORS[0], "203.0.113.9:4000")
    assert hall.meetings.nat_of(b"s" * 32) == Nat.UNKNOWN and not hall.meetings.is_to_look(b"s" * 32)
    assert hall.meetings.is_to_look(hall.contacts["p01"].key)
    assert not hall.meetings.is_to_look(hall.contacts["p00"].key), "it was seen"


def test_nobody_waits_long_for_a_look() -> None:
    hall = two(EASY)
    hall.turn(LOOKS_S - 0.01)
    assert not hall.relayed()
    hall.turn(0.02)
    assert hall.relayed() == {PAIR}
    hall.shows("p01")
    assert hall.turn() and hall.meetings.tries == 1, "it is tried all the same"


def test_a_relayed_pair_changes_over_between_rounds_and_never_in_one() -> None:
    hall = two(EASY, EASY)
    hall.turn()
    hall.turn(WAYLESS_S)
    assert hall.relayed() == {PAIR}
    hall.busy.add(PAIR)
    hall.connect("p00", "p01")
    hall.turn(0.1)
    assert hall.relayed() == {PAIR} and hall.meetings.waits_for_gap
    hall.busy.clear()
    assert hall.turn(0.1)
    assert hall.punched() == {PAIR} and not hall.relayed() and not hall.meetings.waits_for_gap


def test_a_connection_that_breaks_leaves_them_the_relay_at_once_and_is_tried_again() -> None:
    hall = two(EASY, EASY)
    hall.turn()
    hall.connect("p00", "p01")
    hall.turn(0.1)
    hall.busy.add(PAIR)
    hall.said["p01"].clear()
    hall.say("p01")
    assert hall.turn(0.1) and hall.relayed() == {PAIR} and not hall.punched(), (
        "in a round, too: it has no other way"
    )
    assert hall.meetings.tries == 1
    hall.turn(1.3 * AGAIN_S)
    assert hall.meetings.tries == 2


def endpoints(hall: Hall, to: str) -> set[str]:
    return {meet.endpoint for meet in hall.meetings.told(to, hall.now)}


def test_before_later_tries_each_shows_itself_anew_since_its_address_may_be_another_one() -> None:
    hall = two(EASY, EASY)
    hall.turn()
    assert endpoints(hall, "p01") == {"203.0.113.1:40000"}
    hall.turn(10.0)
    key = hall.contacts["p00"].key
    assert hall.relayed() == {PAIR} and not hall.meetings.is_to_look(key), (
        "not before there is something to try"
    )
    hall.shown["p00"] = EASY, 41111  # it came to another place
    hall.turn(1.3 * AGAIN_S)
    assert hall.meetings.tries == 2 and endpoints(hall, "p01") == {"203.0.113.1:41111"}
    assert hall.relayed() == {PAIR}, "they have the relay meanwhile"


def test_nobody_is_asked_to_show_itself_anew_while_others_meet_it_or_again_and_again() -> None:
    hall = Hall(3)
    for name in ("p00", "p01"):
        hall.shows(name)
    hall.turn()
    hall.turn(1.2 * AGAIN_S)
    key = hall.contacts["p00"].key
    assert hall.meetings.tries == 2
    hall.shows("p02")
    hall.turn(0.1)
    assert endpoints(hall, "p02") == {"203.0.113.1:40000", "203.0.113.2:40000"}, "it was seen a moment ago"
    del hall.shown["p00"]  # it can't show itself any more
    for _ in range(20):
        hall.turn(AGAIN_S)
    assert hall.meetings.is_to_look(key), "it is waited for"


def test_nobodys_address_is_forgotten_while_a_newcomer_is_to_meet_it_there() -> None:
    def begun() -> Hall:
        hall = Hall(3)
        hall.shows("p00"), hall.shows("p01")
        hall.turn()
        return hall

    twin = begun()
    while twin.meetings.tries < 2:
        twin.turn(0.1)
    hall = begun()
    hall.turn(twin.now - 1.0 - hall.now)
    hall.shows("p02")
    hall.turn()
    both = {"203.0.113.1:40000", "203.0.113.2:40000"}
    assert endpoints(hall, "p02") == both
    hall.shown.clear()
    hall.turn(1.2)  # the other two are due again
    assert endpoints(hall, "p02") == both


def test_tries_in_vain_are_ever_rarer_and_so_many_in_all() -> None:
    hall = two(EASY, EASY)
    begun = []
    for _ in range(20_000):
        before = hall.meetings.tries
        hall.turn(5.0)
        if hall.meetings.tries > before:
            begun.append(hall.now)
    assert len(begun) == SERIES_MOST
    pauses = [later - sooner for sooner, later in pairwise(begun)]
    assert all(pause >= AGAIN_S for pause in pauses) and max(pauses) <= 1.25 * AGAIN_MOST_S + 10
    assert all(later > 1.5 * sooner for sooner, later in pairwise(pauses[:4]))
    assert "1 of 1 others it could not meet" in hall.meetings.why_not("p00", hall.contacts["p00"].key)


def test_a_connection_that_stood_for_long_earns_new_tries() -> None:
    hall = two(EASY, EASY)
    for _ in range(SERIES_MOST):
        hall.turn(2 * AGAIN_MOST_S)
    hall.connect("p00", "p01")
    hall.turn()
    hall.turn(STOOD_S)
    hall.connect("p00", "p01", stands=False)
    hall.turn()
    before = hall.meetings.tries
    hall.turn(2 * AGAIN_S)
    assert hall.meetings.tries == before + 1


def test_of_one_member_only_so_many_meet_at_once_and_new_sessions_buy_no_more() -> None:
    hall = Hall(24)
    for name in hall.contacts:
        hall.shows(name)
    hall.turn()
    told = {name: hall.meetings.told(name, hall.now) for name in hall.contacts}
    assert max(map(len, told.values())) == MEETS_AT_ONCE
    for name, meets in told.items():
        for meet in meets:
            assert meet.at_s in {each.at_s for each in told[meet.peer] if each.peer == name}
    begun = 0
    for session in range(200):
        fresh = Hall(2, now=hall.now + 0.1 * session, meetings=hall.meetings)
        key = (1000 + session).to_bytes(32, "big")
        fresh.contacts["p00"] = Contact("p00", "p00", key, "")
        fresh.pairs = {pair_of(key, fresh.contacts["p01"].key): tuple(fresh.contacts.values())}  # type: ignore[dict-item]
        before = hall.meetings.tries
        fresh.turn()
        for name in fresh.contacts:
            fresh.shows(name)
        fresh.turn()
        begun += hall.meetings.tries - before
    assert begun < SERIES_AT_ONCE, "by p00's quota, however often it comes back"


def test_where_nobody_can_tell_ports_everything_is_as_without() -> None:
    meetings = HolePunching()
    one, other = (Contact(name, name, name.encode() * 32, "") for name in "ab")
    pairs = {b"pair": (one, other)}
    meetings.turn(pairs, frozenset((one.key, other.key)), 1.0, lambda *_: False)
    assert meetings.is_relayed(b"pair") and not meetings.is_to_look(one.key)
    assert not meetings.saw(one.key, DOORS[0], "9.9.9.9:4000") and not meetings.says(one.key, ("b",))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_pair_has_exactly_one_way(seed: int) -> None:
    draw = random.Random(seed)
    hall = Hall(draw.randrange(2, 7))
    nats = {name: draw.choice((EASY, EASY, HARD)) for name in hall.contacts}
    unlucky = {frozenset(pair) for pair in combinations(hall.contacts, 2) if draw.random() < 0.3}
    standing: set[frozenset[str]] = set()
    began, told_at = hall.now, {}
    for number in range(600):
        before = hall.relayed(), hall.punched()
        hall.busy = {frozenset(pair) for pair in combinations(hall.contacts, 2) if draw.random() < 0.5}
        hall.turn(0.1 if number < 100 else draw.choice((0.05, 0.1, 1.0, 30.0)))
        for name, nat in nats.items():
            if draw.random() < 0.2:
                hall.shows(name, nat)
        for name in hall.contacts:
            for meet in hall.meetings.told(name, hall.now):
                pair = frozenset((name, meet.peer))
                assert HARD not in (nats[name], nats[meet.peer])
                instants = told_at.setdefault(pair, set())
                instants.add(meet.at_s)
                assert [
                    each.at_s for each in hall.meetings.told(meet.peer, hall.now) if each.peer == name
                ] == [meet.at_s]
                if pair not in unlucky and draw.random() < 0.5:
                    standing.add(pair)
        if standing and draw.random() < 0.05:
            standing.discard(draw.choice(sorted(standing, key=sorted)))
        for name in hall.contacts:
            if draw.random() < 0.7:  # beats come when they come
                hall.said[name] = {
                    other for other in hall.contacts if frozenset((name, other)) in standing
                } - {name}
                hall.say(name)
        relayed, punched = hall.relayed(), hall.punched()
        assert not relayed & punched, "two ways at once"
        if hall.now - began > WAYLESS_S + 1.0:
            assert relayed | punched == {frozenset(pair) for pair in combinations(hall.contacts, 2)}, "no way"
        assert not (punched - before[1]) & before[0] & hall.busy, "changed over in a round"
    assert all(len(instants) <= SERIES_MOST for instants in told_at.values())
