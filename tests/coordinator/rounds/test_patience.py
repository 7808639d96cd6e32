"""When a round is looked at as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.coordinator.rounds.round import (
    BRIEF_S_PER_MEMBER,
    PAUSE_MOST_S,
    PAUSE_S_PER_MEMBER,
    SMALL,
    Patience,
)
from farflung.protocol.round_words import Plan


@dataclass
class Flight:
    count: int
    phase: object = 0
    is_brief: bool = False
    done: set[str] = field(default_factory=set)
    asked: int = 0

    @property
    def plan(self) -> Plan:
        names = tuple(f"p{number:04}" for number in range(self.count))
        return Plan(1, 1, 0, names, (0,), ("fp32",) * self.count)

    def awaits(self, member: str) -> bool:
        self.asked += 1
        return member not in self.done

    def hears_all_but(self, *left: str) -> None:
        self.done = set(self.plan.members) - set(left)


@dataclass
class Look:
    flight: Flight | None
    members: int
    patience: Patience = field(default_factory=Patience)
    losses: int = 0
    gone: set[str] = field(default_factory=set)

    def __call__(self, now: float) -> bool:
        here = lambda peer: peer not in self.gone  # noqa: E731
        return self.patience.is_due(self.flight, self.members, self.losses, here, now)


LARGE = SMALL + 18
PAUSE_S = LARGE * PAUSE_S_PER_MEMBER


def in_a_large_round() -> Look:
    look = Look(Flight(LARGE), LARGE)
    assert look(0.0)
    return look


def test_a_small_round_is_looked_at_after_each_word() -> None:
    look = Look(Flight(SMALL), SMALL)
    assert all(look(0.0) for _ in range(3))


def test_a_large_one_with_a_pause_that_is_bounded() -> None:
    look = in_a_large_round()
    assert not look(PAUSE_S - 0.01) and look(PAUSE_S) and not look(2 * PAUSE_S - 0.01)
    largest = Look(Flight(1024), 1024)
    assert largest(0.0) and not largest(PAUSE_MOST_S - 0.01) and largest(PAUSE_MOST_S)


def test_and_at_once_when_nobody_is_left_whom_its_phase_waits_for() -> None:
    look = in_a_large_round()
    assert look.flight is not None
    look.flight.hears_all_but("p0003")
    assert not look(0.01)
    look.flight.hears_all_but()
    assert look(0.02) and not look(0.03), "once: then it waits for something else"
    look.flight.phase, look.flight.done = 1, set()
    assert not look(0.04)
    look.flight.hears_all_but()
    assert look(0.05), "once for each phase"


def test_nobody_waits_for_whom_the_round_does_not_count_on() -> None:
    look = in_a_large_round()
    assert look.flight is not None
    look.flight.hears_all_but("p0003")
    look.gone = {"p0003"}
    assert look(0.01)


def test_P3_a_round_is_looked_at_as_soon_as_somebody_is_lost() -> None:
    look = in_a_large_round()
    look.losses = 1
    assert look(0.01) and not look(0.02)


def test_its_end_and_the_time_between_rounds_are_looked_at_more_often() -> None:
    brief_s = LARGE * BRIEF_S_PER_MEMBER
    look = in_a_large_round()
    assert look.flight is not None
    look.flight.is_brief = True
    assert not look(brief_s - 0.01) and look(brief_s)
    look.flight.is_brief = False
    look.flight.hears_all_but()
    assert look(brief_s) and not look(2 * brief_s - 0.01) and look(2 * brief_s), "all is here"
    between = Look(None, LARGE)
    assert between(0.0) and not between(brief_s - 0.01) and between(brief_s)


def test_words_that_end_nothing_cost_nothing_that_grows_with_the_round() -> None:
    look = in_a_large_round()
    assert look.flight is not None
    look.flight.asked = 0
    for number in range(LARGE):
        look.flight.done.add(f"p{number:04}")
        look(0.0)
    assert look.flight.asked <= 2 * LARGE
