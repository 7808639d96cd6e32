"""When a round is looked at as a whole: a small one after each word, a large one when that can be of use.  Pure.

Used by the driver.  A look at a round costs as much as it has members, and each member says some dozens of words in
it: looked at after each, a round would cost the square of its members.  Nearly every word changes nothing: a phase ends
when the last one that it waits for has spoken, and who that is can be seen in passing.  So a large round is looked at
when nobody is left whom its phase waits for, when somebody was lost, and else with a pause that grows with it, in which
deadlines, stragglers and whoever is of no use are found.  Must not know what a look finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from farflung.protocol.round_words import Plan

SMALL = 32  # a round of so many is looked at after each word
PAUSE_S_PER_MEMBER, PAUSE_MOST_S = 0.004, 1.0  # of one in flight
# While none is: its members get ready, or show a new version.  And in phases that are short: when all is here and it
# waits for something else, when sums are compared, and at the end, which comes before all have all.
BRIEF_S_PER_MEMBER = 0.001


class Flight(Protocol):
    @property
    def plan(self) -> Plan: ...

    @property
    def phase(self) -> object: ...

    @property
    def is_brief(self) -> bool: ...

    def awaits(self, member: str) -> bool: ...


class Patience:
    def __init__(self) -> None:
        self._looked_at = -math.inf
        self._losses = 0  # members that the run had lost then
        self._phase: object = None
        self._left: list[str] = []  # of its members, without some that the phase does not wait for any more

    def is_due(
        self, flight: Flight | None, members: int, losses: int, is_here: Callable[[str], bool], now: float
    ) -> bool:
        """`members`: of the round in flight, or that could be in one; `losses`: how many the run has lost so far;
        `is_here`: the round counts on that member."""
        is_over = flight is not None and self._is_over(flight, is_here)
        brief = flight is None or flight.is_brief or not self._left
        each_s = BRIEF_S_PER_MEMBER if brief else PAUSE_S_PER_MEMBER
        pause_s = min(PAUSE_MOST_S, members * each_s) if members > SMALL else 0.0
        if is_over or now - self._looked_at >= pause_s or losses != self._losses:
            self._looked_at, self._losses = now, losses
            return True
        return False

    def _is_over(self, flight: Flight, is_here: Callable[[str], bool]) -> bool:
        """True once for each phase: then it waits for something else."""
        if flight.phase != self._phase:
            self._phase, self._left = flight.phase, list(flight.plan.members)
        elif not self._left:
            return False
        while self._left and not (is_here(self._left[-1]) and flight.awaits(self._left[-1])):
            self._left.pop()
        return not self._left
