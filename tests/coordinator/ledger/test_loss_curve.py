"""The curve of a run's loss: bounded, true to its rounds, forgotten where the run went back, kept over a fold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farflung.coordinator.ledger.ledger import Ledger
from farflung.coordinator.ledger.pace import POINTS_MOST, LossCurve
from farflung.coordinator.ledger.records import RolledBack
from farflung.coordinator.run.status import CONTRIBUTORS_SHOWN, build_status, status_json
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World

CALM: dict[str, Any] = dict.fromkeys(
    ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s"), 0.0
)


def curve_of(rounds: int) -> LossCurve:
    curve = LossCurve()
    for version in range(1, rounds + 1):
        curve.add(version, 100 * version, float(version))
    return curve


@pytest.mark.parametrize("rounds", [1, POINTS_MOST, POINTS_MOST + 1, 5 * POINTS_MOST + 3, 20_000])
def test_a_curve_is_bounded_and_has_every_round_in_it_once(rounds: int) -> None:
    points = curve_of(rounds).points
    assert len(points) <= POINTS_MOST and sum(point.rounds for point in points) == rounds
    assert len({point.rounds for point in points[:-1]}) <= 1, (
        "none but the newest has fewer rounds than the others"
    )
    first = 1
    for point in points:
        assert point.version == first + point.rounds - 1 and point.tokens == 100 * point.version
        assert point.loss == pytest.approx((first + point.version) / 2), "the mean of its rounds"
        first = point.version + 1


def test_a_loss_that_is_no_number_is_no_point() -> None:
    curve = LossCurve()
    for loss in (None, float("nan"), float("inf"), 1.5):
        curve.add(1, 1, loss)
    assert [point.loss for point in curve.points] == [1.5]


def test_the_mean_of_the_largest_losses_is_finite() -> None:
    curve = LossCurve()
    for version in range(3 * POINTS_MOST):
        curve.add(version, 0, 1.7e308)
    assert all(point.loss <= 1.8e308 for point in curve.points)


def test_what_the_run_went_back_behind_is_not_in_it() -> None:
    curve = curve_of(2 * POINTS_MOST)  # each point is of two rounds
    curve.forget_after(101)
    assert curve.points[-1].version == 100
    curve.add(101, 10_100, 7.0)
    assert (curve.points[-1].version, curve.points[-1].rounds) == (101, 1)


def test_a_run_tells_its_curve_and_who_gave_what_and_keeps_both_when_it_is_folded() -> None:
    world = World(5, Scenario(peers=3, rounds=6, **CALM))
    world.run()
    assert world.coordinator is not None
    machine = world.coordinator
    status = build_status(machine.core, machine.drivers, machine.counters, world.now)
    assert [version for version, _ in status["curve"]] == [1, 2, 3, 4, 5, 6]
    assert status["curve"][-1][1] == pytest.approx(status["loss"], abs=1e-5)
    given = status["contributors"]
    assert sum(each["tokens"] for each in given) == status["tokens"]
    assert [each["tokens"] for each in given] == sorted((each["tokens"] for each in given), reverse=True)
    assert status["alive"] == sum(member["alive"] for member in status["members"])
    assert status["taking_part"] == sum(member["alive"] and not member["why"] for member in status["members"])
    assert status["admission"] == "open" and status["needs_script"] is False
    again = Ledger(machine.core.ledger.rules)
    again.apply(machine.core.ledger.folded(1))
    assert again.totals.curve == machine.core.ledger.totals.curve and again.totals.curve.points


def test_a_run_that_went_back_tells_the_curve_of_what_it_still_has() -> None:
    world = World(5, Scenario(peers=3, rounds=6, **CALM))
    world.run()
    assert world.coordinator is not None
    ledger = world.coordinator.core.ledger
    ledger.apply(RolledBack(versions=(4,), reason="it was lost"))
    assert [point.version for point in ledger.totals.curve.points] == [1, 2, 3, 4]


def test_the_list_of_contributors_has_an_end() -> None:
    world = World(5, Scenario(peers=2, rounds=1, **CALM))
    world.run()
    assert world.coordinator is not None
    machine = world.coordinator
    machine.core.ledger.peers.tokens.update({f"peer{n}": n for n in range(3 * CONTRIBUTORS_SHOWN)})
    raw = status_json(machine.core, machine.drivers, machine.counters, world.now)
    assert len(json.loads(raw)["contributors"]) == CONTRIBUTORS_SHOWN
