"""Two people at home, each behind a router, train together: the real program behind real NATs (nftables)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rig.home_run import HomeRun
from rig.routers import Homes, Router
from rig.waiting import LONG_S, eventually

pytestmark = [pytest.mark.hard, pytest.mark.xdist_group("lab")]


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    reason = Homes.unavailable()
    if reason:
        pytest.skip(reason)


ROUTERS = {
    "drop": Router(),
    "rst": Router(resets=True),
    "fully random": Router(hard=True),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_two_homes_finish_a_run_with_equal_models(kind: str, tmp_path: Path) -> None:
    with Homes(["ann", "bob"], ROUTERS[kind]) as homes:
        run = HomeRun(homes, tmp_path)
        run.coordinate()
        run.join("ann")
        run.join("bob")
        run.finish()
    assert len(run.commits) == run.rounds and all(len(each["members"]) == 2 for each in run.commits)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ann", "bob")]
    assert models[0] == models[1]


def test_without_a_relay_they_make_no_commit_and_are_told_why(tmp_path: Path) -> None:
    with Homes(["ann", "bob"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, relay="off")
        run.coordinate()
        run.join("ann")
        run.join("bob")
        log = tmp_path / "coordinator.log"
        eventually(lambda: log.read_text().count("can't be dialled") >= 2, "both were tried", LONG_S)
        assert not run.commits


def test_the_relay_killed_in_the_middle_costs_a_moment_and_no_round(tmp_path: Path) -> None:
    with Homes(["ann", "bob"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, rounds=20)
        run.coordinate()
        run.join("ann")
        run.join("bob")
        for after in (2, 6, 10):
            eventually(lambda after=after: len(run.commits) >= after, f"{after} commits", LONG_S)  # type: ignore[misc]
            run.kill_relay()
        run.finish()
    assert len(run.commits) == 20
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ann", "bob")]
    assert models[0] == models[1]


def test_a_third_one_joins_over_the_relay_and_fetches_the_state(tmp_path: Path) -> None:
    with Homes(["ann", "bob", "cyd"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, rounds=6)
        run.coordinate()
        for name in homes.names:
            run.join(name)
        run.finish()
    assert len(run.commits[-1]["members"]) == 3
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in homes.names}
    assert len(models) == 1
