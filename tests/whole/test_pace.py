"""Machines of several speeds train at the pace of the fastest third, and what the others learn counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import VirtualTrainer
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

STEP_S = 1.0
SPEEDS = (1.0, 1.0, 0.5, 0.2)
PERIOD, ROUNDS = 20, 12


class Machine(VirtualTrainer):
    """Of one speed."""

    def __init__(self, speed: float, *place: object) -> None:
        super().__init__(*place)  # type: ignore[arg-type]
        self.speed = speed

    def step_s(self) -> float:
        return STEP_S / self.speed


class UnequalWorld(World):
    def __init__(self, seed: int, scenario: Scenario, speeds: tuple[float, ...] = SPEEDS) -> None:
        super().__init__(seed, scenario)
        self.speeds, self.commits = speeds, list[tuple[float, CommittedRound]]()

    def start_peer(self, index: int) -> None:
        speed = self.speeds[index] if index < len(self.speeds) else 1.0
        self.trainer_class = partial(Machine, speed)  # type: ignore[assignment]
        super().start_peer(index)

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, CommittedRound):
            self.commits.append((self.now, record))


def calm(**changes: object) -> Scenario:
    quiet = replace(
        Scenario(
            policy="mean",
            peers=4,
            min_peers=4,
            rounds=ROUNDS,
            sync_every=PERIOD,
            deadline_s=3600.0,
            end_s=5000.0,
        ),
        duplicate=0.0,
        grace_s=300.0,
        **changes,  # type: ignore[arg-type]
    )
    return replace(quiet.without_chance(), faults_until_s=0.0)


def run(scenario: Scenario, seed: int = 1, speeds: tuple[float, ...] = SPEEDS) -> UnequalWorld:
    world = UnequalWorld(seed, scenario, speeds)
    assert world.run().outcome == "finished"
    return world


def used(world: UnequalWorld) -> float:
    """Steps that were merged between the third round and the last, of those that all would have taken without any."""
    (begins, _), *rest = world.commits[2:]
    ends = rest[-1][0]
    return sum(record.steps for _, record in rest) * STEP_S / ((ends - begins) * sum(world.speeds))


@pytest.mark.parametrize("schedule", ["blocking", "overlap"])
def test_four_machines_of_three_speeds_lose_little_of_what_they_can_do(schedule: str) -> None:
    world = run(calm(schedule=schedule))
    assert used(world) > 0.85, used(world)
    for _, record in world.commits[3:]:
        assert len(record.commit.included) == 4, "what the slow ones have learned is in each version"


@pytest.mark.usefixtures("equal_work")
def test_without_the_mode_all_wait_for_the_slowest() -> None:
    """Otherwise the test above would prove nothing."""
    assert used(run(calm())) < 0.4


def test_machines_of_one_speed_take_all_their_steps() -> None:
    world = run(calm(), speeds=(1.0,) * 4)
    assert {record.steps for _, record in world.commits} == {4 * PERIOD}


def test_where_the_fast_ones_leave_the_others_take_longer_periods_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slower = calm(rounds=60)

    class Tiring(Machine):
        """The two fast ones are as slow as the third from some time on."""

        def step_s(self) -> float:
            return max(super().step_s(), 2.0 if self.world.now() > 100.0 else 0.0)

    monkeypatch.setattr(f"{__name__}.Machine", Tiring)
    world = run(replace(slower, end_s=50_000.0))
    fastest = [record.steps for _, record in world.commits[-5:]]
    assert min(fastest) >= 3 * PERIOD, "three take all their steps, and the fourth what it can"


@pytest.mark.parametrize("piece", pieces(4))
def test_the_promises_hold_where_machines_differ_and_much_fails(piece: int) -> None:
    for seed in seeds(piece, 6):
        drawn = Scenario.of(seed)
        speeds = ((1.0, 0.2), (0.3, 1.0, 1.0), (1.0, 1.0, 0.1, 0.5))[seed % 3]
        UnequalWorld(seed, replace(drawn, sync_every=8, end_s=400.0), speeds).run()
