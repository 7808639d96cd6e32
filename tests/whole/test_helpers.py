"""P1-P4, P6, P7, P9 with peers that have no trainer: they own chunks, give state, keep checkpoints, and nothing waits
for them, counts them, or takes a gradient of theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.ledger.records import CommittedRound, Genesis, Granted, Opened, from_bytes
from farflung.protocol.signing import peer_id_of
from farflung.simulator.world import Scenario, World
from rig.pieces import pieces, seeds

CALM = Scenario(drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0)


def helpers_of(world: World) -> set[str]:
    keys = world._keys[world.scenario.peers - world.scenario.helpers :]
    return {peer_id_of(key.public_key().public_bytes_raw()) for key in keys}


def written(world: World, kind: type) -> list:
    return [record for raw in world.journal if isinstance(record := from_bytes(raw), kind)]


def test_one_who_helps_owns_chunks_and_contributes_nothing() -> None:
    world = World(1, replace(CALM, peers=3, helpers=1, chunks=6, faults_until_s=0.0))
    assert world.run().outcome == "finished"
    [helper] = helpers_of(world)
    plans = [record.plan for record in written(world, Opened)]
    assert any(plan.chunks_of(helper) for plan in plans)
    commits = [record.commit for record in written(world, CommittedRound)]
    assert commits and not any(helper in commit.included for commit in commits)
    assert helper not in {record.peer for record in written(world, Granted)}
    assert helper not in {record.peer for record in written(world, Genesis)}
    assert world.peers[helper].exit_code == "finished"


def test_where_nobody_who_trains_can_be_dialled_one_who_helps_owns_everything() -> None:
    world = World(2, replace(CALM, peers=3, helpers=1, chunks=4, undialable=2, faults_until_s=0.0))
    assert world.run().outcome == "finished"
    [helper] = helpers_of(world)
    for record in written(world, Opened):
        assert len(record.plan.chunks_of(helper)) == len(record.plan.owners)


def test_those_who_help_do_nothing_alone_and_count_for_no_quorum() -> None:
    alone = World(3, replace(CALM, peers=3, helpers=3, end_s=30.0, faults_until_s=0.0))
    report = _waits(alone)
    assert not written(alone, Genesis) and report == 0
    one_trains = World(4, replace(CALM, peers=4, helpers=3, min_peers=2, end_s=30.0, faults_until_s=0.0))
    assert _waits(one_trains) == 0 and not written(one_trains, Opened)


def _waits(world: World) -> int:
    """Versions that it has come to."""
    from farflung.simulator.invariants import Broken

    try:
        return world.run().version
    except Broken as broken:
        assert "not finished" in str(broken)
        assert world.coordinator is not None
        return max(world.coordinator.core.ledger.version, 0)


def test_one_who_helps_and_lies_about_its_sums_is_caught() -> None:
    scenario = replace(
        CALM, peers=4, helpers=1, chunks=6, rounds=8, cheats=True, audit=1.0, faults_until_s=0.0
    )
    world = World(5, replace(scenario, policy="mean", codec="int8"))
    assert world.run().outcome == "finished"
    [helper] = helpers_of(world)
    assert world.coordinator is not None
    assert world.coordinator.core.keeps_out(helper)


@pytest.mark.hard
@pytest.mark.parametrize("batch", range(1))
def test_no_promise_is_broken_in_batches_with_those_who_help(batch: int) -> None:
    outcomes = []
    for seed in range(12 * batch, 12 * batch + 12):
        usual = Scenario.of_batches(seed)
        world = World(seed, replace(usual, peers=usual.peers + 1, helpers=1))
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of_batches(seed) with one more, who helps")
            raise
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes


@pytest.mark.parametrize("batch", pieces(2))
def test_no_promise_is_broken_with_those_who_help(batch: int) -> None:
    outcomes, owned = [], 0
    for seed in seeds(batch, 4):
        usual = Scenario.of(seed)
        helpers = 1 + seed % 2
        scenario = replace(
            usual, peers=usual.peers + helpers, helpers=helpers, undialable=min(usual.undialable, usual.peers)
        )
        world = World(seed, scenario)
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"seed {seed}: Scenario.of(seed) with {helpers} more, who help")
            raise
        mine = helpers_of(world)
        owned += sum(any(plan.plan.chunks_of(peer) for peer in mine) for plan in written(world, Opened))
        for record in written(world, CommittedRound):
            assert not mine & set(record.commit.included)
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert owned > 0
