"""P6: an outage of twelve rounds, in which one peer is started again, costs nobody who trained on a single inner step.

In the world's calm, at 50 steps a round.  The invariants hold all along, too.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, from_bytes
from farflung.protocol.manifest import Manifest
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.world import World

CALM = dict.fromkeys(
    ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s"), 0.0
)
BEFORE, AWAY_ROUNDS, STEPS = 6, 12, 50


class Reader(VirtualTrainer):
    dataset_samples = 1_000_000


class Outage(World):
    """After `BEFORE` commits the coordinator is away for twelve rounds; one peer is started again at the end of it."""

    trainer_class = Reader

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        content = self.manifest.model_dump()
        content["round"]["sync_every"] = STEPS
        content["data"]["lease_samples"] = 100
        self.manifest = Manifest.model_validate(content)

    away_since = 0.0
    round_s = 0.0

    def start_coordinator(self, restored: bool = False) -> None:
        super().start_coordinator(restored)
        if not self.away_since:
            self.after(1.0, self.look)

    def look(self) -> None:
        commits = commits_of(self)
        if len(commits) < BEFORE:
            self.after(0.5, self.look)
            return
        apart = [b.at_s - a.at_s for a, b in pairwise(commits)]
        self.away_since, self.round_s = self.now, sum(apart) / len(apart)
        self.coordinator = None
        self.after(AWAY_ROUNDS * self.round_s, self.start_coordinator)
        self.after((AWAY_ROUNDS - 0.5) * self.round_s, self.reboot)

    def reboot(self) -> None:
        first = next(iter(self.peers))
        self.peers[first].alive = False
        self.start_again(first)


def commits_of(world: World) -> list[CommittedRound]:
    return [each for each in map(from_bytes, world.journal) if isinstance(each, CommittedRound)]


@pytest.mark.usefixtures("equal_work")
@pytest.mark.parametrize(
    ("peers", "seed"),
    [(2, 1), pytest.param(3, 3, marks=pytest.mark.hard), pytest.param(5, 1, marks=pytest.mark.hard)],
)
def test_P6_an_outage_and_a_reboot_cost_no_inner_step_of_who_trained_on(peers: int, seed: int) -> None:
    about = {"min_peers": 2, "rounds": BEFORE + 4, "end_s": 2000.0, "faults_until_s": 1.0}
    world = Outage(seed, Scenario(peers=peers, **(about | CALM)))  # type: ignore[arg-type]
    assert world.run().outcome == "finished"
    records = [from_bytes(raw) for raw in world.journal]
    assert not [each for each in records if isinstance(each, AbortedRound) and each.dropped]
    commits = [each for each in commits_of(world) if each.at_s > world.away_since]
    assert not any(
        each.merged.clipped or each.merged.suspects or "again: shortened" in each.merged.text
        for each in commits
    )
    long = [tokens for each in commits for tokens in each.tokens_by.values()]
    usual = STEPS * Reader.tokens_per_step
    assert max(long) > AWAY_ROUNDS * usual, "who trained on alone brought all of it"
    assert len([tokens for tokens in long if tokens > 6 * usual]) == peers - 1
