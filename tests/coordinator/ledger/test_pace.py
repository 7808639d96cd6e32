"""How fast things go, and why somebody is not in: what the status tells beside the bare facts."""

from __future__ import annotations

from typing import Any

import pytest

from farflung.console.screen.health import health
from farflung.coordinator.ledger.pace import RunPace
from farflung.coordinator.run.status import build_status
from farflung.peer.simulator.scenario import Scenario
from farflung.peer.simulator.world import World

CALM: dict[str, Any] = dict.fromkeys(
    ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s"), 0.0
)


def test_the_rest_of_a_run_is_estimated_from_its_commits() -> None:
    pace = RunPace()
    assert pace.left_s(10, 0.0) is None
    for version in (1, 2, 3):
        pace.on_commit(version, 10.0 * version)
        pace.on_commit(version, 10.0 * version + 1)  # another fragment's: the run is no further
    assert pace.left_s(10, 30.0) == pytest.approx(70.0)
    assert pace.left_s(10, 34.0) == pytest.approx(66.0)
    halted = pace.left_s(10, 130.0)
    assert halted is not None and halted >= 300.0, "a run that stands still does not come nearer to its end"
    pace.on_commit(1, 140.0)  # it went back
    assert pace.left_s(10, 141.0) is None


def test_the_status_says_who_takes_part_and_why_somebody_does_not() -> None:
    world = World(5, Scenario(peers=2, rounds=1, **CALM))
    world.run()
    assert world.coordinator is not None
    machine = world.coordinator
    status = build_status(machine.core, machine.conductors, machine.counters, world.now)
    assert {"phase_left_s", "eta_s", "tokens_per_s", "least_peers", "software"} <= status.keys()
    everybody = {member["id"]: member for member in status["members"]}
    assert all(each["behind"] == 0 and each["same"] is True for each in everybody.values())
    assert health(status).word == "DONE"
