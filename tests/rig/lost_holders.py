"""Pipelines whose peers are killed for good, at any effect of theirs: whoever comes instead is new and has no disk.

For tests/whole/test_lost_holders.py; by hand: `python tests/rig/lost_holders.py 0 200` prints the figures.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass, field, replace

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.coordinator.ledger.records import CommittedBatch, Record, RolledBack
from farflung.simulator.disk import VirtualDisk
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario, SimulationReport
from farflung.simulator.world import COORDINATOR, World

GOES_ON_S = 30.0  # after a death, at most, until the next commit
NEVER = 1e9
SPARES = 6


@dataclass
class Deaths:
    """Who dies when: the peer in this place, before its how-manieth effect; and with it those in other places."""

    effects: dict[int, int]
    together: tuple[int, ...] = ()


@dataclass
class Seen:
    killed_s: list[float] = field(default_factory=list)
    commits_s: list[float] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)  # versions, at each return

    @property
    def waits_s(self) -> list[float]:
        """From each death to the next commit; of several before it, from the last one.  After the run's last commit
        nobody waits for another."""
        found: dict[float, float] = {}
        for killed in sorted(self.killed_s):
            later = [at for at in self.commits_s if at > killed]
            if later:
                found[min(later)] = min(later) - killed
        return list(found.values())


class OnePlace(World):
    """One seat a stage, and only the peers of stage 1 keep checkpoints: where its only peer dies, the others go back by
    what they were before the last round, or not at all."""

    def __init__(
        self, seed: int, peers: int = 4, offers: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (1,))
    ) -> None:
        draw = random.Random(f"one place {seed}")
        self._dies_at, self._effects, self.went_back = draw.randint(60, 500), 0, 0
        scenario, _ = scenario_of(4 * seed, 1)  # on good lines
        super().__init__(seed, replace(scenario, peers=peers, offers=offers))

    def _late_s(self, index: int) -> float:
        return 0.0 if index < 3 else NEVER

    def _disk_of(self, index: int) -> VirtualDisk | None:
        return super()._disk_of(index) if index in (1, 3) else None

    def survives(self, party: str) -> bool:
        if party == COORDINATOR or [each.number for each in self.peers[party].held] != [1]:
            return True
        self._effects += 1
        disk = self.disks.get(0)
        if self._effects < self._dies_at or self.kills or disk is None or not disk.kept:
            return True
        self.kills, self.peers[party].alive = 1, False
        self.after(2.0, lambda: self.start_peer(3))
        return False

    def _write(self, record: Record) -> None:
        self.went_back += isinstance(record, RolledBack)
        super()._write(record)


class BeforeLost(OnePlace):
    """And stage 0 has two seats.  When the run goes back, what the second one was before the last round is gone, and
    somebody new sits down there: both take it from the first one, over the network."""

    NEW = 5

    def __init__(self, seed: int) -> None:
        super().__init__(seed, peers=6, offers=((0,), (1,), (2,), (1,), (0,), (0,)))
        self.at_return: set[str] = set()  # all that were there

    def _late_s(self, index: int) -> float:
        return NEVER if index in (3, self.NEW) else 0.0

    @property
    def of_first(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers.values() if [each.number for each in peer.held] == [0]]

    def _write(self, record: Record) -> None:
        if isinstance(record, RolledBack):
            self.at_return = set(self.peers)
            second = self.of_first[1].state
            second.before.begin(0, NO_VERSION, b"")
            self.after(0.0, lambda: self.start_peer(self.NEW))
        super()._write(record)


class LostHolders(World):
    def __init__(self, seed: int, scenario: Scenario, seats: int, deaths: Deaths) -> None:
        self._seats, self._deaths, self._next = seats, deaths, seats
        self._effects: dict[str, int] = {}
        self._draw = random.Random(f"lost holders {seed}")
        self.seen = Seen()
        super().__init__(seed, scenario)

    def _late_s(self, index: int) -> float:
        return 0.0 if index < self._seats else NEVER

    def survives(self, party: str) -> bool:
        if party == COORDINATOR:
            return True
        self._effects[party] = self._effects.get(party, 0) + 1
        index = list(self.peers).index(party)
        if self._deaths.effects.get(index) != self._effects[party] or not self._has_learned:
            return True
        for other in {index, *self._deaths.together}:
            self._dies(list(self.peers)[other])
        return self.peers[party].alive

    @property
    def _has_learned(self) -> bool:
        """And a first checkpoint lies there, of every stage: before that a stage's only peer takes all with it."""
        saved = [kept.parts.keys() for disk in self.disks.values() for kept in disk.kept]
        return len({stage for parts in saved for stage in parts}) == self.scenario.stages

    def _dies(self, party: str) -> None:
        peer = self.peers[party]
        if not peer.alive or peer.exit_code:
            return
        self.kills += 1
        peer.alive = False
        self.note(f"{party} dies for good, of stage {[each.number for each in peer.held]}")
        self.seen.killed_s.append(self.now)
        index, self._next = self._next, self._next + 1
        self.after(self._draw.uniform(1.0, 4.0), lambda: self.start_peer(index))

    def _write(self, record: Record) -> None:
        if isinstance(record, CommittedBatch):
            self.seen.commits_s.append(self.now)
        if isinstance(record, RolledBack) and self.coordinator is not None:
            # It is in the books already.
            self.seen.given_up.append(self.coordinator.core.ledger.eras.furthest - max(record.versions))
        super()._write(record)


def scenario_of(seed: int, seats: int) -> tuple[Scenario, Deaths]:
    """Three stages of so many seats, all of which keep their checkpoints at one place."""
    draw = random.Random(f"deaths {seed} {seats}")
    peers = 3 * seats
    bad = seed % 4 == 3
    scenario = Scenario(
        peers=peers + SPARES,
        stages=3,
        stage_chunks=(1, 2, 1),
        chunks=4,
        offers=tuple((at % 3,) for at in range(peers)) + ((0, 1, 2),) * SPARES,
        batch=8,
        rounds=10,
        min_peers=1,
        step="adamw",
        policy="mean",
        every_rounds=1,
        one_store=True,
        store_fails=0.0,
        dead_after_s=5.0,
        go_back_after_s=300.0,
        drop=0.02 if bad else 0.0,
        duplicate=0.02 if bad else 0.0,
        slow=0.02 if bad else 0.0,
        cut_per_s=0.0,
        trainer_crash_per_s=0.0,
        kill_per_effect=0.0,
        faults_until_s=60.0 if bad else 0.0,
        rebalance_s=60.0,
        deaths_per_s=1e-9,  # not a calm world: what the dead had counted is counted again
        end_s=400.0,
    )
    first = draw.randrange(peers)
    effects = {first: draw.randint(60, 700)}
    together: tuple[int, ...] = ()
    if draw.random() < 0.5:  # all of its stage at once, or the holders of another one too
        together = tuple(draw.sample(range(peers), draw.randint(1, 2)))
    if draw.random() < 0.5:
        effects[draw.randrange(peers + 1)] = draw.randint(60, 700)
    return scenario, Deaths(effects, together)


def run_of(seed: int, seats: int) -> tuple[LostHolders, SimulationReport]:
    scenario, deaths = scenario_of(seed, seats)
    world = LostHolders(seed, scenario, 3 * seats, deaths)
    try:
        return world, world.run()
    except Exception as error:
        error.add_note(f"3 x {seats}, seed {seed}")
        raise


def main(first: int, last: int) -> None:
    for seats in (1, 2):
        waits, given_up, finished, without = [], [], 0, 0
        for seed in range(first, last):
            world, report = run_of(seed, seats)
            finished += report.outcome == "finished"
            without += not report.kills
            waits += world.seen.waits_s
            given_up += world.seen.given_up
            if max(world.seen.waits_s, default=0.0) > GOES_ON_S or max(world.seen.given_up, default=0) > 1:
                print(
                    f"seed {seed}: waits {world.seen.waits_s}, given up {world.seen.given_up}, {report.outcome}"
                )
        print(
            f"3 x {seats}: {finished} of {last - first} runs finished, {len(waits)} deaths (none in {without} runs), "
            f"next commit after {statistics.median(waits):.1f} s (median), {max(waits):.1f} s (longest); "
            f"{len(given_up)} returns, of {max(given_up, default=0)} versions at most"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
