"""Everything is killed: the run goes on from the newest checkpoint, as its users would see it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

pytestmark = pytest.mark.slow

EVERYBODY = ("coordinator", "ann", "bob")


def kill(stage: Any, *names: str) -> None:
    for name in names:
        stage.processes[name].kill()
        stage.processes[name].wait()


def begin(stage: Any, *places: str) -> None:
    """Of what peers keep by themselves nothing is there: checkpoints are all that is left."""
    stage.environ["FARFLUNG_KEEP"] = "off"
    stage.coordinate()
    for name, place in zip(("ann", "bob"), places, strict=True):
        stage.join(name, "--checkpoints", place if "://" in place else str(stage.folder / place))


def trained(version: int) -> Any:
    return lambda s: (
        s["version"] >= version and sum(m["participating"] and m["alive"] for m in s["members"]) == 2
    )


@pytest.mark.hard
@pytest.mark.forked_peers
def test_P4_all_are_killed_and_the_run_goes_on_from_its_newest_version(stage: Any) -> None:
    """One of two ends first, so that the other one's last checkpoint is of the run's last version."""
    stage.write_run(every_rounds=1, patience_s=3600.0)  # it goes back to nothing before ann is there again
    begin(stage, "of-ann", "of-bob")
    stage.until(trained(5), "the run has begun")
    kill(stage, "bob")
    stage.until(lambda s: sum(m["alive"] for m in s["members"]) == 1, "bob is lost")
    # What the two had begun may still be committed by ann alone.
    before = stage.until(
        lambda s: s["round"] is None and [m["saved"] for m in s["members"] if m["alive"]] == [s["version"]],
        "ann has saved all",
    )
    kill(stage, "ann", "coordinator")
    begin(stage, "of-ann", "of-bob")
    after = stage.until(trained(before["version"] + 3), "the run goes on")
    assert after["run_id"] == before["run_id"] and after["era"] == 0
    # Whoever comes first reads its own; the other one may take it from there.
    assert f"read the checkpoint of version {before['version']}" in stage.log("ann") + stage.log("bob")


@pytest.mark.forked_peers
def test_a_place_that_fails_is_told_and_training_goes_on(stage: Any) -> None:
    stage.write_run(rounds=4, min_peers=1, every_rounds=2)
    stage.coordinate("--exit-when-done")
    (stage.folder / "no-folder").write_text("a file")
    stage.join("ann", "--checkpoints", str(stage.folder / "no-folder"))
    assert stage.wait("ann") == 0 and stage.wait("coordinator") == 0
    # Which one it tries depends on how fast the rounds are; the last one it tries in any case.
    assert "no checkpoint of version " in stage.log("ann") and "training goes on" in stage.log("ann")
    assert "Traceback" not in stage.log("ann")


@pytest.mark.forked_peers
@pytest.mark.hard
def test_P4_all_are_killed_at_once_and_the_run_goes_back_to_its_newest_checkpoint(
    stage: Any, buckets: Any
) -> None:
    place = f"{buckets.new()}/run"
    # Books keep 64 commits, and on a busy machine a checkpoint takes longer than so many of the usual rounds.
    stage.write_run(every_rounds=3, sync_every=100)
    begin(stage, place, place)
    before = stage.until(
        lambda s: trained(5)(s) and any(m["saved"] > 0 for m in s["members"]), "the run has a checkpoint"
    )
    kill(stage, *EVERYBODY)
    begin(stage, place, place)
    after = stage.until(trained(before["version"] + 3), "the run goes on")
    assert after["run_id"] == before["run_id"]
    for name in ("ann", "bob"):  # nobody takes an old checkpoint away while it is read
        stage.processes[name].send_signal(signal.SIGINT)
        assert stage.wait(name) == 0
    found = stage.call("checkpoint", "ls", "--verify", place)
    assert found.returncode == 0, found.stdout + found.stderr
