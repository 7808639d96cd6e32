"""Rounds in groups: the machines of the program in the simulator, with every invariant, and deaths in every phase.

What is committed is held to a reference of two sums (Invariants._sum_of_sums): members in their order, rounded as sums
travel, then groups in theirs.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from farflung.coordinator.ledger.records import DecidedOn, Opened, Record
from farflung.coordinator.rounds.round_rules import Groups
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import COORDINATOR, World
from rig.pieces import pieces

CALM = Scenario(
    policy="mean",
    audit=0.0,
    faults_until_s=0.0,
    go_back_after_s=0.0,
).without_chance()


def storm(seed: int) -> Scenario:
    """The bad world of the seed, with more peers, in groups."""
    draw = random.Random(f"mesh {seed}")
    return replace(
        Scenario.of(seed),
        peers=draw.choice((5, 6, 8, 9)),
        group=draw.choice((2, 3, 3, 4)),
        chunks=draw.choice((3, 4, 6)),
        undialable=draw.choice((0, 0, 1, 2)),
        kill_per_effect=draw.choice((0.0, 0.001, 0.003, 0.006)),
        min_peers=draw.choice((1, 2, 3)),
        rounds=2,
        policy=draw.choice(("mean", "robust")),
        audit=draw.choice((0.0, 1.0)),
    )


class Churn(World):
    """Only peers die; it is counted how often chunks moved."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.moved = 0

    def survives(self, party: str) -> bool:
        return party == COORDINATOR or super().survives(party)

    def _write(self, record: Record) -> None:
        super()._write(record)
        self.moved += isinstance(record, Opened) and record.plan.epoch > 1


@pytest.mark.usefixtures("equal_work")
def test_a_mesh_commits_the_sum_of_its_groups_sums() -> None:
    world = World(1, replace(CALM, peers=9, group=3, chunks=6, rounds=2, gather_codec="int8"))
    assert world.run().outcome == "finished"
    groups = [of for of in world.invariants.groups_of.values()]
    assert all(sorted(of) == [0, 0, 0, 1, 1, 1, 2, 2, 2] for of in groups)
    assert len(set(groups)) == 2, "groups are drawn anew for each version"
    assert 3 in world.invariants.sums_of_groups


# 37: a trainer writes the first values of a run that is founded anew while pieces of the old ones wait to be read.
@pytest.mark.parametrize("seed", pieces([16, 19, 37, 20, *range(12)], 4))
def test_every_promise_holds_in_groups_too(seed: int) -> None:
    World(seed, storm(seed)).run()


def test_deaths_in_a_mesh_move_chunks_and_the_run_comes_to_its_end() -> None:
    scenario = replace(CALM, peers=16, group=4, chunks=8, rounds=3, min_peers=4)
    world = Churn(2, replace(scenario, kill_per_effect=0.003, faults_until_s=200.0))
    assert world.run().outcome == "finished"
    assert world.kills and world.moved, "somebody who owned chunks died"


class OwnerDiesAfterTheDecision(World):
    """In each round, the one with most chunks in its group."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.decisions: list[int] = []
        self.most = ""  # who owns most

    def survives(self, party: str) -> bool:
        return party == COORDINATOR or super().survives(party)

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, Opened) and record.plan.epoch == 1:
            shares = Groups(record.plan).shares
            self.most = max(shares, key=lambda peer: (shares[peer].bit_count(), peer))
        elif isinstance(record, DecidedOn):
            self.decisions.append(record.decision.decision_no)
            if record.decision.decision_no == 1:
                self.after(0.0, lambda owner=self.most: self._kill(owner))  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["mean", "robust"])
def test_an_owner_that_dies_after_the_decision_voids_nobodys_work(policy: str) -> None:
    scenario = replace(CALM, peers=12, group=4, chunks=12, rounds=3, min_peers=4, policy=policy)
    world = OwnerDiesAfterTheDecision(1, scenario)
    assert world.run().outcome == "finished"
    assert world.kills == 3
    assert world.decisions == [1] * 3, "all weights stay as they are"
