"""P19: an owner that sums wrongly is found by whoever merges its chunk again, convicted by what it signed, and banned;
and no honest peer is ever struck or banned for a sum.  Over seeded runs, with liars alone and in league.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from farflung.coordinator.ledger.records import Struck, from_bytes
from farflung.coordinator.rounds.round import Steadiness
from farflung.simulator.world import Scenario, World
from rig.finished import finished
from rig.pieces import pieces, seeds

SEEDS, FEW = 8, 4
CALM = Scenario(
    peers=4,
    chunks=4,
    rounds=6,
    drop=0,
    duplicate=0,
    slow=0,
    kill_per_effect=0,
    cut_per_s=0,
    trainer_crash_per_s=0,
    audit=1.0,
)
# Between rounds there is time enough for every audit.
RESTARTING = replace(
    CALM, peers=5, rounds=16, min_peers=3, period_s=6.0, end_s=400.0, cheats=True, league=2, restarts=True
)

LATE = 8  # rounds


def test_an_honest_run_is_audited_and_nobody_is_blamed() -> None:
    for seed in range(FEW):
        world = finished(seed, CALM)
        assert not world.invariants.found
        told = [each for audited in world.last.told_by_auditors for each in audited.chunks]
        assert not any(each.wrong for each in told)
        # Those who are finished are gone with what they kept.
        right = [each for each in told if not each.missing]
        assert len(right) >= 10, "of 24 chunks many were merged again"


def test_an_owner_that_corrupts_a_chunk_in_each_round_is_found_and_banned() -> None:
    """A round takes two virtual seconds here, and audits wait for rounds: it has cheated in a few more by then."""
    rounds = []
    for seed in range(SEEDS):
        world = finished(seed, replace(CALM, cheats=True))
        if world.last.cheated:  # in some seeds it owns nothing
            (found,) = world.invariants.found
            assert {found.peer} == world.invariants.liars
            rounds.append(len(world.last.cheated))
    assert len(rounds) >= SEEDS - 3 and median(rounds) <= 2 and max(rounds) < 6, (
        "it is out: it makes no more sums"
    )


@pytest.mark.hard
def test_auditors_in_league_with_it_hide_it_until_an_honest_one_is_drawn() -> None:
    """Six peers, three of them liars: half of the auditors say that all is well."""
    found = 0
    for seed in range(SEEDS):
        world = finished(seed, replace(CALM, peers=6, rounds=8, cheats=True, league=2))
        assert {each.peer for each in world.invariants.found} <= world.invariants.liars
        found += bool(world.invariants.found) or not world.last.cheated
    assert found >= SEEDS - 2


@pytest.mark.hard
def test_accomplices_that_restart_after_every_round_do_not_hide_it_for_long() -> None:
    """What they contributed is lost with their processes; when that has happened too often, rounds go without them."""
    rounds = []
    for seed in range(6):
        world = finished(seed, RESTARTING)
        if world.invariants.found:
            rounds.append(len(world.last.cheated))
    assert len(rounds) >= 5 and max(rounds) <= LATE


@pytest.mark.hard
def test_without_that_rule_they_would_hide_it_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one of them is away in a round, or for good."""
    monkeypatch.setattr(Steadiness, "rounds_out", lambda self, peer: 0)
    assert max(len(finished(seed, RESTARTING).last.cheated) for seed in range(2)) > LATE


def test_who_calls_right_sums_wrong_gets_strikes_until_it_is_banned_and_the_owners_stay() -> None:
    banned = 0
    for seed in range(FEW):
        world = finished(seed, replace(CALM, rounds=8, accuses=True))
        assert not world.invariants.found
        assert world.coordinator is not None
        (liar,) = world.invariants.liars
        banned += world.coordinator.core.keeps_out(liar)
        struck = {record.peer for record in map(from_bytes, world.journal) if isinstance(record, Struck)}
        assert liar in struck or banned
    assert banned >= FEW // 2


@pytest.mark.parametrize("lie", ["mutes", "withholds"])
def test_who_says_nothing_of_what_it_audits_or_gives_auditors_nothing_stops_no_run(lie: str) -> None:
    for seed in range(2):
        world = finished(seed, replace(CALM, end_s=400.0, **{lie: True}))
        assert not world.invariants.found
        assert world.coordinator is not None
        core = world.coordinator.core
        honest = world.peers.keys() - world.invariants.liars
        assert not any(core.keeps_out(peer) for peer in honest)


def test_an_owner_that_hides_its_own_contribution_from_auditors_is_convicted_all_the_same() -> None:
    """What two auditors don't get, its authors show to the coordinator: before two more commits have passed."""
    world = finished(1, replace(CALM, rounds=4, period_s=30.0, end_s=400.0, cheats=True, withholds=True))
    assert {each.peer for each in world.invariants.found} == world.invariants.liars
    assert len(world.last.cheated) <= 2
    assert not any(isinstance(record, Struck) for record in map(from_bytes, world.journal))


@pytest.mark.parametrize("batch", pieces(3))
def test_in_a_hostile_world_no_honest_peer_is_struck_or_banned_for_a_sum(batch: int) -> None:
    """Kills, lost messages and cut lines: what can't be shown in time is nobody's fault."""
    found = 0
    for seed in seeds(batch, 3):
        drawn = Scenario.of(seed)
        scenario = replace(
            drawn, peers=max(4, drawn.peers), min_peers=2, rounds=4, audit=1.0, cheats=True, league=seed % 2
        )
        world = World(seed, scenario)
        world.run()
        found += bool(world.invariants.found)
    assert found
