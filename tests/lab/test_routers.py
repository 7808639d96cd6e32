"""Two people at home, each behind a router, train together: the real program behind real NATs (nftables)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farflung.peer.machine.checkpoint_policy import AT_RELAY
from rig.home_run import HomeRun
from rig.meetings import met_in
from rig.routers import Homes, Router
from rig.waiting import LONG_S, eventually

MICROS = 8
# Of the small built-in model: what passes from stage to stage for one microbatch, at least.
ACTIVATIONS_BYTES = 10_000
STAGES = f"""
[outer]
step = "adamw"
lr = 4e-3
[merge]
policy = "mean"
[pipeline]
batch = {MICROS}
micro = 2
stages = 2
"""

pytestmark = [pytest.mark.hard, pytest.mark.xdist_group("lab")]


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    reason = Homes.unavailable()
    if reason:
        pytest.skip(reason)


# Two first packets cross where the way takes a while, as everywhere; where routers say no, they must.
WAY_S = 0.005
ROUTERS = {
    "drop": Router(),
    "rst": Router(resets=True, delay_s=WAY_S),
    "fully random": Router(hard=True),
}


@pytest.mark.parametrize("kind", ["drop", "rst"])
def test_two_links_meet_past_their_routers_twenty_times_of_twenty(kind: str) -> None:
    with Homes(["ann", "bob"], ROUTERS[kind]) as homes:
        found = met_in(homes, 20)
    assert len(found) == 40, "each end has told of each time"
    assert all(each["seconds"] is not None and each["seconds"] <= 2.0 for each in found), found


def test_two_whose_clocks_differ_by_more_than_the_way_takes_meet_all_the_same() -> None:
    apart_s = 2 * WAY_S
    # One try of three can cross: it has the room that a way just shorter than that leaves it.
    with Homes(["ann", "bob"], Router(resets=True, delay_s=0.8 * apart_s)) as homes:
        found = met_in(homes, 6, apart_s=apart_s)
    assert len(found) == 12, "each end has told of each time"
    assert all(each["seconds"] is not None for each in found), found
    assert any(each["tries"] > 1 for each in found), "the first packets did not cross"


def test_past_a_hard_router_nobody_meets() -> None:
    with Homes(["ann", "bob"], ROUTERS["fully random"]) as homes:
        found = met_in(homes, 1)
    assert [each["seconds"] for each in found] == [None, None]


@pytest.mark.parametrize("kind", ROUTERS)
def test_two_homes_finish_a_run_with_equal_models(kind: str, tmp_path: Path) -> None:
    for attempt in range(2 if kind == "rst" else 1):
        # Behind routers that say no both have to be there within milliseconds: where the machine has other work, too,
        # one pair of some twenty is not.
        place = tmp_path / str(attempt)
        place.mkdir()
        with Homes(["ann", "bob"], ROUTERS[kind]) as homes:
            # It is not over before the last try, which is seconds after the first.
            run = HomeRun(homes, place, rounds=24)
            run.coordinate()
            run.join("ann")
            run.join("bob")
            run.finish()
        if run.punched_at:
            break
    assert bool(run.punched_at) == (kind != "fully random"), run.told()
    took_s = float(run.commits[0]["at"]) - run.second_hello_at
    assert took_s <= (5.0 if kind == "fully random" else 3.0), f"the first commit came after {took_s:.1f} s"
    assert len(run.commits) == run.rounds and all(len(each["members"]) == 2 for each in run.commits)
    models = [(place / name / "model.safetensors").read_bytes() for name in ("ann", "bob")]
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


def test_a_router_that_opens_a_port_makes_its_home_dialable(tmp_path: Path) -> None:
    with Homes(["ann", "bob"], Router()) as homes:
        homes.open_ports("ann")
        run = HomeRun(homes, tmp_path, relay="off")
        run.coordinate()
        run.join("ann")
        run.join("bob", "--listen", "off")
        run.finish()
        assert "dnat to" not in homes.rules("ann"), "it was closed again"
    assert len(run.commits) == run.rounds and not run.punched_at, run.told()
    assert all(0 in each["owned"] for each in run.of("opened") if len(each["members"]) == 2), "only one owns"


def test_two_that_met_need_no_relay(tmp_path: Path) -> None:
    with Homes(["ann", "bob"], Router()) as homes:
        run = HomeRun(homes, tmp_path, relay="off")
        run.coordinate()
        run.join("ann")
        run.join("bob")
        run.finish()
    assert run.punched_at and len(run.commits) == run.rounds


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


def test_one_who_helps_beside_the_coordinator_owns_everything_where_nobody_can_meet(tmp_path: Path) -> None:
    with Homes(["ann", "bob"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, relay="off")
        run.coordinate()
        run.assist()
        run.join("ann")
        run.join("bob")
        run.finish()
    assert len(run.commits) == run.rounds and {len(each["members"]) for each in run.commits} == {3}
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


def test_whoever_comes_late_behind_a_hard_router_begins_with_a_checkpoint(tmp_path: Path) -> None:
    """And is given by others, over the relay, no more than results."""
    place = ("--checkpoints", str(tmp_path / "shared"))
    with Homes(["ann", "bob", "cyd"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, rounds=60, min_peers=2)
        run.more = "[checkpoint]\nevery_rounds = 1\nkeep = 8"
        run.coordinate()
        run.join("ann", *place)
        run.join("bob", *place)
        eventually(lambda: len(run.commits) >= 2, "the run has begun", LONG_S)
        run.join("cyd", *place)
        run.finish()
    log = (tmp_path / "cyd.log").read_text()
    assert AT_RELAY in log and "read the checkpoint of version " in log, log
    assert len(run.commits[-1]["members"]) == 3
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in homes.names}
    assert len(models) == 1


def test_two_stages_of_a_model_at_home_behind_hard_routers_pass_microbatches_over_the_relay(
    tmp_path: Path,
) -> None:
    with Homes(["ann", "bob"], Router(hard=True)) as homes:
        run = HomeRun(homes, tmp_path, rounds=4, more=STAGES)
        run.coordinate()
        run.join("ann")
        run.join("bob")
        run.finish()
        moved = json.loads((tmp_path / "run.data" / "relay.json").read_text())["bytes"]
    assert len(run.of("committed_batch")) == run.rounds, run.told()
    assert not run.punched_at and moved > run.rounds * MICROS * ACTIVATIONS_BYTES, run.told()
