"""When a round is looked at as a whole: a small one after each word, a large one when that can be of use.  Pure.

Used by the driver.  A look at a round costs as much as it has members, and each member says some dozens of words in
it: looked at after each, a round would cost the square of its members.  Nearly every word changes nothing: a phase ends
when the last one that it waits for has spoken, and who that is can be seen in passing.  So a large round is looked at
when nobody is left whom its phase waits for, when somebody was lost, and else with a pause that grows with it, in which
deadlines, stragglers and whoever is of no use are found.  Must not know what a look finds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from farflung.protocol.limits import ROUNDS_KEPT
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


# Whose process stays for as long as it owes something, and who is not counted on for a while.  Pure.
#
# A member owes the others its part in a round that is in flight, and for two commits the bytes that it contributed:
# nobody can audit a sum without them.  Whoever comes back as another process has neither.  Machines crash, and that is
# nobody's fault; but an accomplice could restart after every round, so that what its owner sums is never looked at, or
# in the middle of each, so that chunks move again and again.  So the first restarts cost nothing, and with each further
# one of the last so many commits a member stays out of twice as many rounds, and nobody waits for it.  Where too few
# others are there, it takes part all the same.
#
# Owned by the driver of a fragment.  Not durable: a coordinator that restarts forgives.

FORGIVEN = 2  # restarts that owed something, among so many commits
WINDOW = 64


class Steadiness:
    def __init__(self) -> None:
        self._commits = 0
        self._owes: dict[str, tuple[bytes, int]] = {}  # member -> the process that contributed last, and when
        self._broken: dict[str, deque[int]] = {}  # member -> when it came back without what it owed
        self._gone: dict[str, bytes] = {}  # member -> its process that is known to be gone

    def on_commit(self, processes: Mapping[str, bytes]) -> None:
        """`processes`: of the members whose contributions are in it."""
        self._commits += 1
        self._owes = {peer: owed for peer, owed in self._owes.items() if self._is_kept(owed[1])}
        self._owes |= {peer: (process, self._commits) for peer, process in processes.items()}
        for peer, when in list(self._broken.items()):
            while when and self._commits - when[0] >= WINDOW:
                when.popleft()
            if not when:
                del self._broken[peer], self._gone[peer]

    def comes(self, peer: str, process: bytes, was_in_round: bytes) -> None:
        """A session begins.  `was_in_round`: its process that the round in flight counts on; empty: none."""
        before, at = self._owes.get(peer, (process, 0))
        owed = {before} if self._is_kept(at) else set()
        gone = (owed | {was_in_round}) - {b"", process, self._gone.get(peer)}
        if gone:  # of both it is the same process that is gone
            self.breaks(peer, gone.pop())

    def breaks(self, peer: str, process: bytes) -> None:
        """Of this process nothing that was owed is here any more: it is gone, or has lost its state in a round."""
        self._gone[peer] = process
        self._broken.setdefault(peer, deque(maxlen=WINDOW)).append(self._commits)

    def rounds_out(self, peer: str) -> int:
        """So many more commits are made without it, if there are others to make them."""
        when = self._broken.get(peer)
        if not when or len(when) <= FORGIVEN:
            return 0
        stays = min(WINDOW, 1 << (len(when) - FORGIVEN))
        return max(0, when[-1] + stays - self._commits)

    def counted_on(self, peers: Iterable[str]) -> set[str]:
        return {peer for peer in peers if not self.rounds_out(peer)}

    def _is_kept(self, at: int) -> bool:
        return self._commits - at < ROUNDS_KEPT
