"""Newcomers of an open run: who fetches the model now, and who is next.  Pure.

Used by the admission, for those whom the run has never seen.  So many fetch at once, at most half of them of one
network; who has to wait keeps its turn as long as it asks again as it is told to.  The first that was refused is the
first that comes in, but nobody waits for somebody whose own network is what holds it back.

Who may lie: identities cost nothing, and whoever has many is bounded by its network (networks.py): in those that
fetch, in those that have not shown that they hold the run's state, and in the turns that are kept.  Bytes that were
fetched are the newcomer's own word: who makes them up keeps its place no longer than ARRIVING_S.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from farflung.coordinator.door.allowance import Quota
from farflung.protocol.manifest_sections import AdmissionSection

ARRIVING_S = 120.0  # a newcomer that has no state after so long does not keep others out any more
FETCHES_WITHIN_S = 10.0  # nor does one that has fetched nothing for so long
BUSY_RETRY_S = 5.0
TURN_KEPT_S = 3 * BUSY_RETRY_S  # of who was told to ask again
WAITING_MOST, WAITING_OF_NETWORK = 1024, 64


@dataclass
class NewcomerTurn:
    network: str
    until: float


@dataclass(frozen=True)
class WaitOutside:
    code: str
    told: str
    retry_s: float


class ArrivalPace(Protocol):
    @property
    def fetched_at(self) -> float: ...


class WaitingMember(Protocol):
    """Of coordinator/run/membership.py."""

    @property
    def network(self) -> str: ...
    @property
    def admitted_at(self) -> float: ...
    @property
    def has_shown(self) -> bool: ...
    @property
    def pace(self) -> ArrivalPace: ...


class NewcomerQueue:
    """`look` at who is here, then `ask`."""

    def __init__(self) -> None:
        self._now, self._learned = 0.0, False
        # By peer, in the order in which they came.
        self._turns: OrderedDict[str, NewcomerTurn] = OrderedDict()
        self._rate: Quota[str] = Quota(1.0, 1.0)  # as the rules say when somebody comes
        self._fetching: Counter[str] = Counter()  # by network, at the last look and let in since then
        self._unproven: Counter[str] = Counter()  # that have not shown the run's state yet

    def ask(
        self, peer: str, network: str, rules: AdmissionSection, learned: bool, now: float
    ) -> WaitOutside | None:
        """None: it may come in now.  `learned`: there is something to fetch."""
        self._now, self._learned, per_minute = now, learned, float(rules.joins_per_minute)
        self._rate.change(per_minute / 60.0, per_minute)  # the host may have amended it
        before, of_network = self._before(peer, rules)
        wait = self._held_up(network, len(before), of_network[network], rules)
        if wait is None:
            self._turns.pop(peer, None)
            if network:
                self._rate.take(network, now)
            self._fetching[network] += 1
            self._unproven[network] += 1
        else:
            self._keep_turn(peer, network, now + max(TURN_KEPT_S, wait.retry_s + BUSY_RETRY_S))
        return wait

    def _held_up(
        self, network: str, before: int, of_network: int, rules: AdmissionSection
    ) -> WaitOutside | None:
        arriving = self._fetching.total()
        if self._learned and arriving + before >= rules.joins_at_once:
            next_one = f"{before} others are before you" if before else "yours is next"
            return WaitOutside(
                "busy", f"{arriving} newcomers are fetching the model already; {next_one}", BUSY_RETRY_S
            )
        if self._room_of(network, rules) <= of_network:
            mine = self._fetching[network]
            told = f"{mine} newcomers of your network ({network}) are fetching the model already"
            return WaitOutside("busy", f"{told}; {of_network} others of it are before you", BUSY_RETRY_S)
        wait_s = self._rate.wait_s(network, self._now, 1.0 + of_network) if network else 0.0
        if wait_s > 0:
            told = f"more than {rules.joins_per_minute} newcomers a minute from your network ({network})"
            return WaitOutside("rate", f"{told}; waiting", min(60.0, max(1.0, wait_s)))
        return None

    def _room_of(self, network: str, rules: AdmissionSection) -> float:
        """So many more of this network may come in, as far as those of it that are on their way go."""
        if not (network and self._learned):
            return math.inf
        fetching = max(1, rules.joins_at_once // 2) - self._fetching[network]
        return min(fetching, rules.joins_at_once - self._unproven[network])

    # ---- turns ---------------------------------------------------------------------------------------------

    def _before(self, peer: str, rules: AdmissionSection) -> tuple[list[str], Counter[str]]:
        """Who comes in before this one, as soon as somebody may; and how many of each network those are."""
        now, found, of_network = self._now, list[str](), Counter[str]()
        for other, turn in list(self._turns.items()):
            if other == peer:
                break
            if now > turn.until:
                del self._turns[other]
            elif self._may_be_next(turn.network, of_network[turn.network], rules):
                found.append(other)
                of_network[turn.network] += 1
        return found, of_network

    def _may_be_next(self, network: str, of_network: int, rules: AdmissionSection) -> bool:
        if self._room_of(network, rules) <= of_network:
            return False
        return not network or self._rate.wait_s(network, self._now, 1.0 + of_network) <= 0

    def _keep_turn(self, peer: str, network: str, until: float) -> None:
        known = self._turns.get(peer)
        if known is not None and self._now <= known.until:
            known.network, known.until = network, until
            return
        self._turns.pop(peer, None)  # it came too late
        mine = sum(turn.network == network for turn in self._turns.values()) if network else 0
        if mine < WAITING_OF_NETWORK and len(self._turns) < WAITING_MOST:
            self._turns[peer] = NewcomerTurn(network, until)

    # ---- those that are in ---------------------------------------------------------------------------------

    def look(self, here: Iterable[WaitingMember], now: float) -> None:
        """At everybody, or not at each hello where those are many: whoever came since then is not through yet."""
        unproven = [member for member in here if not member.has_shown]
        self._unproven = Counter(member.network for member in unproven)
        self._fetching = Counter(member.network for member in unproven if _fetches(member, now))


def _fetches(member: WaitingMember, now: float) -> bool:
    last = max(member.admitted_at, member.pace.fetched_at)
    return now - member.admitted_at < ARRIVING_S and now - last < FETCHES_WITHIN_S
