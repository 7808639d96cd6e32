"""P4, P5: whoever holds a run alone may be killed at any moment: the run goes on from its newest committed version.

Every peer keeps the newest version on its own disk.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.ledger.records import CommittedRound, RolledBack, from_bytes
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

EACH = 20  # seeds of one test


def lone(seed: int) -> Scenario:
    """One peer, which dies often, and nothing else keeps anything: no checkpoint, no results beside."""
    world = Scenario.of(seed)
    return replace(
        world,
        peers=1,
        min_peers=1,
        undialable=0,
        rounds=6,
        keeps=True,
        every_rounds=0,
        results_on_disk=False,
        kill_per_effect=(0.005, 0.02, 0.05)[seed % 3],
        blackout_at_s=2.0 + seed % 7,
        go_back_after_s=0.0,
        host_after_s=0.0,
        store_fails=0.0,
        faults_until_s=20.0,
    )


def run(seed: int, scenario: Scenario) -> World:
    world = World(seed, scenario)
    try:
        report = world.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    assert report.outcome == "finished", (seed, report.outcome, report.log[-40:])
    return world


@pytest.mark.parametrize("batch", pieces(4))
def test_P4_a_lone_peer_that_dies_at_any_moment_loses_no_committed_version(batch: int) -> None:
    kills = 0
    for seed in seeds(batch, EACH):
        world = run(seed, lone(seed))
        kills += world.kills
        assert world.coordinator is not None
        assert world.coordinator.core.ledger.eras.number == 0, f"seed {seed}: it went back"
    assert kills > EACH


def test_P4_several_that_all_end_in_the_same_instant_lose_one_version_at_most() -> None:
    """Where nobody is alone, no commit waits for a disk: what it costs if all go before any of them has written."""
    went_back = 0
    for seed in range(8, 14):
        together = replace(
            lone(seed), peers=2 + seed % 2, min_peers=1 + seed % 2, kill_per_effect=0.0, trainer_crash_per_s=0.0,
            leave_per_s=0.0, cut_per_s=0.0, blackout_at_s=2.0 + seed * 0.37 % 15, go_back_after_s=20.0, end_s=600.0,
        )  # fmt: skip
        newest: dict[int, int] = {}
        for record in map(from_bytes, run(seed, together).journal):
            if isinstance(record, CommittedRound):
                newest[record.commit.fragment] = record.commit.version
            elif isinstance(record, RolledBack):
                went_back += 1
                lost = {number: version - record.versions[number] for number, version in newest.items()}
                assert all(each <= 1 for each in lost.values()), f"seed {seed}: {lost}"
    assert went_back, "none of them went between a commit and every disk"
