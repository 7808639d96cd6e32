"""Lines to the coordinator that are cut for long, and the host who says at last that the run shall go back.

Used by the simulated world.  The peers behind a cut line live on, with all that they hold; seen from the coordinator
they are as good as dead, and a stranger that gets through may be all that it sees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from farflung.coordinator.run.machine import RunMachine
from farflung.peer.simulator.invariants import Invariants, all_is_held
from farflung.peer.simulator.peer import VirtualPeer
from farflung.peer.simulator.scenario import Scenario
from farflung.protocol.orders import GoBack

HOST_LOOKS_EVERY_S = 2.0
NO_NEWS_S = 15.0  # the host waits so long for a newer version, or for somebody who holds the newest


@dataclass
class CutLines:
    scenario: Scenario
    behind: Collection[str] = ()  # peers that are cut off, while it lasts

    def is_cut(self, source: str, target: str, now: float) -> bool:
        """`source` or `target` is the coordinator."""
        begins = self.scenario.cut_off_at_s
        lasts = bool(self.behind) and begins <= now < begins + self.scenario.cut_off_s
        return lasts and (source in self.behind or target in self.behind)

    def is_behind(self, peer: str, now: float) -> bool:
        return self.is_cut(peer, "", now)


@dataclass
class Held:
    """What living peers held of each fragment when the lines were cut: (version, the round that made it)."""

    commits: dict[tuple[int, int], int] = field(default_factory=dict)

    @staticmethod
    def by(peers: Iterable[VirtualPeer], seen: Invariants) -> Held:
        newest: dict[int, int] = {}
        for peer in peers:
            if peer.machine.part is not None and peer.machine.era == len(seen.eras) - 1:
                for number, lane in peer.machine.part.lanes.items():
                    newest[number] = max(newest.get(number, 0), lane.version)
        commits = {
            key: each.round_no for key, each in seen.commits.items() if key[1] <= newest.get(key[0], 0)
        }
        return Held(commits)

    def lost(self, seen: Invariants) -> list[tuple[int, int]]:
        """Versions that are not what they were."""
        now = seen.commits
        return [key for key, made in self.commits.items() if key not in now or now[key].round_no != made]


class Host:
    """Looks at the run now and then, and says go-back when nobody living holds the newest version."""

    def __init__(self, scenario: Scenario) -> None:
        self._from_s = scenario.faults_until_s + scenario.host_after_s if scenario.host_after_s else None
        self._seen: object = None
        self._since = 0.0

    def order(self, machine: RunMachine, peers: Iterable[VirtualPeer], now: float) -> GoBack | None:
        ledger = machine.core.ledger
        seen = (ledger.era, [book.version for book in ledger.books])
        lost = ledger.learned and not machine.core.finished and not all_is_held(ledger, peers)
        if not lost or seen != self._seen:
            self._seen, self._since = seen, now
        if self._from_s is None or now < self._from_s or now - self._since < NO_NEWS_S:
            return None
        self._since = now
        held = machine.going_back.settled_held()
        # Of one fragment nothing is left, nor a checkpoint of them all: only founding anew makes a model of it.
        gone = max(held) <= 0 or (min(held) < 0 and not machine.going_back.saved)
        if ledger.model is not None and ledger.model.stages:  # all of them go to one version
            gone = max(machine.going_back.together(held)) <= 0
        return GoBack(to=0, sure=True) if gone else GoBack(sure=True)
