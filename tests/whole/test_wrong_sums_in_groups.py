"""P19 in groups: the machines of the program in the simulator, with owners and roots that add up wrongly, and with two
that contradict each other about a sum.  The invariants hold each proof to the sum that it speaks of, and that nobody
honest is struck or banned for one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.admission.admission import Banned
from farflung.coordinator.ledger.records import CommittedRound, Opened, Struck, from_bytes
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.finished import finished
from rig.pieces import pieces, seeds

NO_FAULTS = dict.fromkeys(
    ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s"), 0.0
)
# Between rounds there is time enough for every audit.
CALM = Scenario(
    peers=9, group=3, chunks=6, rounds=5, min_peers=4, audit=1.0, period_s=4.0, end_s=300.0, **NO_FAULTS
)
BY_A_ROOT, BY_AN_OWNER = replace(CALM, cheats=True), replace(CALM, cheats=True, cheats_in_group=True)


def records(world: World, kind: type) -> list:  # type: ignore[type-arg]
    return [record for record in map(from_bytes, world.journal) if isinstance(record, kind)]


def test_in_an_honest_run_both_kinds_of_sums_are_merged_again_and_nobody_is_blamed() -> None:
    world = finished(1, CALM)
    told = [(said.group, each) for said in world.last.told_by_auditors for each in said.chunks]
    assert not world.invariants.found and not any(each.wrong for _, each in told)
    of = {group for group, each in told if not each.missing}
    assert of == {-1, 0, 1, 2}, "results, and what each of three groups adds to them"
    due = sum(len(record.commit.hashes) // 32 * 4 for record in records(world, CommittedRound))
    assert sum(not each.missing for _, each in told) >= 0.9 * due


@pytest.mark.parametrize(("scenario", "told"), [(BY_A_ROOT, "chunk "), (BY_AN_OWNER, "what group ")])
def test_one_that_adds_up_wrongly_is_convicted_by_its_own_signature(scenario: Scenario, told: str) -> None:
    seed = 0 if scenario is BY_A_ROOT else 1
    world = finished(seed, scenario)
    [found] = world.invariants.found
    assert {found.peer} == world.invariants.liars
    assert found.reason.startswith(f"it summed {told}") and found.evidence
    assert len(world.last.cheated) <= 2, "it is out: it makes no more sums"
    assert not records(world, Struck)


@pytest.mark.parametrize("batch", pieces(5))
def test_P19_over_seeds_liars_are_found_and_nobody_else_is_blamed(batch: int) -> None:
    cheated = found = 0
    for seed in seeds(batch, 3):
        world = finished(seed, Scenario.of_sums(seed))
        cheated += bool(world.last.cheated)
        found += bool(world.last.cheated) and bool(world.invariants.found)
        blamed = {record.peer for record in records(world, Banned)}
        assert blamed <= world.invariants.liars
    assert found >= cheated - 1, "where all that a liar made is asked for in vain, as its friends are gone"


@pytest.mark.parametrize("lies", ["twist", "disown"])
def test_of_two_that_contradict_each_other_about_a_sum_nobody_is_blamed_and_the_run_goes_on(
    lies: str,
) -> None:
    """An owner that sends the root another sum than it signed, and a root that says so of one that did not."""
    for seed in (0,):
        world = finished(seed, replace(CALM, rounds=3, liars=1, lies=lies))
        assert not world.invariants.found and not records(world, Struck) and not records(world, Banned)
        assert all(record.groups for record in records(world, CommittedRound))
        moved = [record.plan for record in records(world, Opened) if record.plan.epoch > 1]
        liars = {plan.members.index(liar) for plan in moved for liar in world.invariants.liars}
        assert moved and all(liars.isdisjoint(plan.owners) for plan in moved), "it owns nothing for a while"
