"""Newcomers of an open run: how many fetch at once, who is next, and who loses its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from farflung.coordinator.admission.admission import (
    ARRIVING_S,
    BUSY_RETRY_S,
    FETCHES_WITHIN_S,
    TURN_KEPT_S,
    WAITING_MOST,
    WAITING_OF_NETWORK,
    NewcomerQueue,
    WaitOutside,
)
from farflung.coordinator.ledger.pace import FETCHED_BYTES, MemberPace
from farflung.coordinator.roster.ways import MemberPlace
from farflung.protocol.manifest import AdmissionSection
from farflung.protocol.messages import Beat


@dataclass
class Newcomer:
    place: MemberPlace
    has_shown: bool = False
    pace: MemberPace = field(default_factory=MemberPace)


class Hall:
    """What of a coordinator newcomers meet."""

    def __init__(self, learned: bool = True, per_minute: float = 100_000.0, **rules: int) -> None:
        self.rules = AdmissionSection.model_validate(rules)
        self.alive: dict[str, Newcomer] = {}
        self.now, self.learned = 1000.0, learned
        self.arrivals = NewcomerQueue(per_minute)

    def ask(self, peer: str, network: str = "") -> WaitOutside | None:
        self.arrivals.look(self.alive.values(), self.now)
        wait = self.arrivals.ask(peer, network or f"net of {peer}", self.rules, self.learned, self.now)
        if wait is None:
            self.alive[peer] = Newcomer(MemberPlace("", self.now, network or f"net of {peer}"))
        return wait

    def join(self, *peers: str, network: str = "") -> None:
        for peer in peers:
            assert self.ask(peer, network) is None, peer

    def waits(self, peer: str, network: str = "", code: str = "busy") -> str:
        wait = self.ask(peer, network)
        assert wait is not None and wait.code == code, (peer, wait)
        return wait.told

    def later(self, seconds: float) -> None:
        self.now += seconds

    def fetch(self, *peers: str, size: int = FETCHED_BYTES) -> None:
        for peer in peers:
            pace = self.alive[peer].pace
            beat = SimpleNamespace(tokens=0, tx_bytes=0, rx_bytes=pace._fetched + size)
            pace.on_beat(cast(Beat, beat), self.now)


def test_the_first_that_was_refused_is_the_first_that_comes_in() -> None:
    hall = Hall(joins_at_once=2)
    hall.join("a", "b")
    assert hall.waits("c").endswith("2 newcomers are fetching the model already; yours is next")
    assert hall.waits("d").endswith("1 others are before you")
    hall.alive["a"].has_shown = True
    hall.waits("d")
    hall.waits("new")
    hall.join("c")
    hall.alive["b"].has_shown = True
    hall.waits("new")
    hall.join("d")


def test_a_turn_is_kept_for_who_asks_again_as_it_is_told_and_lost_by_who_does_not() -> None:
    hall = Hall(joins_at_once=1)
    hall.join("a")
    hall.waits("b"), hall.waits("c")
    for _ in range(8):
        hall.later(BUSY_RETRY_S)
        hall.fetch("a")
        hall.waits("c"), hall.waits("b")
    hall.later(TURN_KEPT_S + 0.1)
    hall.fetch("a")
    hall.waits("c")
    hall.waits("b")
    hall.alive["a"].has_shown = True
    hall.waits("b")  # both came too late; c came again first
    hall.join("c")


def test_who_fetches_nothing_does_not_keep_others_out() -> None:
    hall = Hall(joins_at_once=2)
    hall.join("idle", "slow")
    hall.later(FETCHES_WITHIN_S - 1.0)
    hall.fetch("slow")
    hall.fetch("idle", size=FETCHED_BYTES - 1)
    hall.waits("c")
    hall.later(1.0)
    hall.join("c")
    hall.waits("d")
    for _ in range(14):
        hall.later(FETCHES_WITHIN_S - 1.0)
        hall.fetch("slow", "c")
    assert hall.now - hall.alive["slow"].place.since > ARRIVING_S, "who takes for ever keeps nobody out"
    hall.join("d")


def test_one_network_has_half_of_the_places_and_its_queue_holds_up_nobody_else() -> None:
    hall = Hall(joins_at_once=4)
    hall.join("lab 1", "lab 2", network="lab")
    assert "2 newcomers of your network (lab) are fetching" in hall.waits("lab 3", "lab")
    for each in range(4, 60):
        hall.waits(f"lab {each}", "lab")
    hall.join("home", "office")
    hall.waits("school")
    hall.alive["lab 1"].has_shown = True
    hall.waits("lab 4", "lab")
    hall.waits("school")
    hall.join("lab 3", network="lab")  # it was refused before the school was
    hall.alive["home"].has_shown = True
    hall.join("school")


def test_a_network_whose_newcomers_show_nothing_gets_no_more_of_them_in() -> None:
    """Or the run would be full of them."""
    hall = Hall(joins_at_once=4)
    for lot in range(2):
        hall.join(f"eve {lot}", f"eva {lot}", network="evil")
        hall.later(FETCHES_WITHIN_S)
    hall.waits("eve", "evil")
    hall.later(1000.0)
    hall.waits("eve", "evil")
    hall.alive["eve 0"].has_shown = True
    hall.join("eve", network="evil")


def test_of_a_network_that_comes_too_fast_the_first_is_the_next() -> None:
    hall = Hall(per_minute=2.0)
    hall.join("a", "b", network="lab")
    wait = hall.ask("c", "lab")
    assert wait is not None and wait.code == "rate" and 29.0 < wait.retry_s <= 30.0
    hall.waits("d", "lab", "rate")
    hall.later(wait.retry_s)
    hall.waits("d", "lab", "rate")
    hall.join("c", network="lab")
    hall.join("far away")


def test_before_anything_was_learned_nobody_waits_for_a_place() -> None:
    hall = Hall(learned=False, joins_at_once=1)
    hall.join("a", "b", "c", network="lab")


def test_turns_are_bounded_in_all_and_of_a_network() -> None:
    hall = Hall(joins_at_once=1)
    hall.join("a")
    for each in range(2 * WAITING_OF_NETWORK):
        hall.waits(f"eve {each}", "evil")
    assert len(hall.arrivals._turns) == WAITING_OF_NETWORK
    for each in range(WAITING_MOST):
        hall.waits(f"b {each}")
    assert len(hall.arrivals._turns) == WAITING_MOST
    hall.later(TURN_KEPT_S + 0.1)
    hall.fetch("a")
    hall.waits("late")
    assert [*hall.arrivals._turns] == ["late"], "those that did not come again have lost theirs"


def every(seconds: float, until: float, step: Callable[[float], None]) -> Iterator[float]:
    at = 0.0
    while at < until:
        step(at)
        yield at
        at += seconds


def test_P8_an_honest_newcomer_comes_in_beside_a_thousand_identities_of_one_network() -> None:
    """They ask without end, hold what they get, and fetch nothing."""
    hall = Hall(joins_at_once=16, per_minute=30.0)
    evil = [f"eve {number}" for number in range(1000)]
    tried = 0

    def flood(at: float) -> None:
        nonlocal tried
        hall.later(0.25)
        for _ in range(5):
            each = evil[tried % len(evil)]
            tried += 1
            if each not in hall.alive:
                hall.ask(each, "evil")

    for _ in every(0.25, 120.0, flood):
        pass
    asked_at = hall.now
    for at in every(0.25, 60.0, flood):
        if at % BUSY_RETRY_S == 0.0 and hall.ask("honest") is None:
            break
    assert hall.now - asked_at < 60.0 and "honest" in hall.alive
    assert len(hall.alive) <= 1 + 16, "nor is the run full of them"


def test_a_lab_behind_one_address_comes_in_in_turn() -> None:
    hall = Hall(joins_at_once=4, per_minute=600.0)
    names, order = [f"machine {number}" for number in range(20)], list[str]()
    for _ in range(200):
        for each in names:
            if each not in hall.alive and hall.ask(each, "lab") is None:
                order.append(each)
        hall.later(BUSY_RETRY_S)
        for each, member in hall.alive.items():
            hall.fetch(each)
            member.has_shown = hall.now - member.place.since >= 30.0
    assert order == names
