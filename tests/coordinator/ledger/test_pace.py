"""How fast things go, and why somebody is not in: what the status tells beside the bare facts."""

from __future__ import annotations

from typing import Any

import pytest

from farflung.console.screen.health import health
from farflung.coordinator.ledger.pace import RunPace
from farflung.coordinator.run.status import build_status
from farflung.protocol.errors import Counters
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.made_run import MadeRun, holding

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


def test_the_time_in_which_nobody_trained_says_nothing_of_the_rest() -> None:
    pace = RunPace()
    for version, at in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 9040.0), (5, 9050.0)):
        pace.on_commit(version, at)
    assert pace.left_s(10, 9050.0) == pytest.approx(50.0)


def test_a_run_that_nobody_trains_has_no_end_in_sight() -> None:
    run = MadeRun()
    ann, bob = (run.enters(name) for name in ("ann", "bob"))
    for member in (ann, bob):
        run.says(member)
    for at in (10.0, 20.0, 30.0):
        run.core.now = at
        version = run.commits()
        run.core.pace.on_commit(version, at)
    for member in (ann, bob):
        run.says(member, fragments=holding(version))

    def status() -> dict[str, Any]:
        return build_status(run.core, run.drivers, Counters(), run.core.now)

    assert status()["eta_s"] is not None
    run.loses(ann), run.loses(bob)
    run.core.now = 9000.0
    assert status()["eta_s"] is None
    told = "nobody is here; the run is at version 3 and goes on when a peer that has it is back"
    assert health(status()).text == told
    assert health(status() | {"version": 0}).text == "nobody is here; the first peer to join starts the run"


def test_the_status_says_who_takes_part_and_why_somebody_does_not() -> None:
    world = World(5, Scenario(peers=2, rounds=1, **CALM))
    world.run()
    assert world.coordinator is not None
    machine = world.coordinator
    status = build_status(machine.core, machine.drivers, machine.counters, world.now)
    assert {"phase_left_s", "eta_s", "tokens_per_s", "least_peers", "software"} <= status.keys()
    everybody = {member["id"]: member for member in status["members"]}
    assert all(each["behind"] == 0 and each["same"] is True for each in everybody.values())
    assert health(status).word == "DONE"
