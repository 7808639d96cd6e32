"""A run that begins with what another one has learned, as its users would see it."""

from __future__ import annotations

import shutil
import tomllib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farflung.protocol.errors import LeaveCause

pytestmark = pytest.mark.slow


def first_run(stage: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Its folder of checkpoints, and the model that it ended with."""
    stage.write_run(rounds=3, min_peers=1, every_rounds=3)
    stage.coordinate("--exit-when-done")
    place = str(stage.folder / "saved")
    stage.join("ann", "--checkpoints", place)
    assert stage.wait("ann") == 0 and stage.wait("coordinator") == 0
    shutil.move(stage.folder / "run.data", stage.folder / "first.data")
    stage.port = 0
    return place, load_file(stage.model("ann"))


def start_of(stage: Any, place: str) -> dict[str, str]:
    """[start] of the run.toml that begins with what is there."""
    told = stage.call("init", "-", "--start", place)
    assert told.returncode == 0, told.stderr
    found: dict[str, str] = tomllib.loads(told.stdout)["start"]
    return found


def second_run(stage: Any, start: dict[str, str], rounds: int = 1) -> None:
    stage.write_run(rounds=rounds, min_peers=1, every_rounds=1)
    run = stage.folder / "run.toml"
    lines = "\n".join(["[start]", *(f'{key} = "{value}"' for key, value in start.items()), ""])
    run.write_text(run.read_text().replace("chunk_kb = 16", "chunk_kb = 32") + lines)
    stage.coordinate("--exit-when-done")


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_new_run_goes_on_from_a_checkpoint_with_its_momentum(stage: Any) -> None:
    place, _ = first_run(stage)
    start = start_of(stage, place)
    second_run(stage, start | {"momentum": "keep"}, rounds=2)
    # What lies on a disk is opened on the word of its owner alone: ann came first, and waits.
    stage.join("ann")
    stage.eventually(
        lambda: "waiting for a peer that joins with --start PATH" in stage.log("ann"), "ann waits"
    )
    stage.join("bob", "--start", start["from"], "--checkpoints", str(stage.folder / "saved again"))
    assert [stage.wait(name) for name in ("ann", "bob")] == [0, 0], stage.log("bob")
    assert "reads what the run begins with" in stage.log("bob")
    assert "reads what" not in stage.log("ann")
    events = [each for each in stage.events("coordinator") if each["event"] == "committed"]
    before = [each for each in _events_of(stage, "first.data") if each["event"] == "committed"]
    assert events[0]["loss"] < before[0]["loss"] - 0.3, "it does not begin anew"


def _events_of(stage: Any, data: str) -> list[Any]:
    from farflung.protocol.process.journal import read_events

    return list(read_events(stage.folder / data / "events.jsonl"))


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_file_that_does_not_fit_ends_the_founder_with_one_line(stage: Any) -> None:
    _, model = first_run(stage)
    del model["model.norm.weight"]
    path = stage.folder / "less.safetensors"
    save_file(model, path)
    second_run(stage, start_of(stage, str(path)))
    stage.join("bob", "--start", str(path))
    assert stage.wait("bob") == 21, stage.log("bob")
    assert "this run can't begin so" in stage.log("bob") and "Traceback" not in stage.log("bob")
    [gone] = [each for each in stage.events("coordinator") if each["event"] == "departed"]
    assert gone["reason"] == LeaveCause.START.told, "what is wrong with it, its owner alone is told"
    assert stage.status()["version"] == 0, "nothing was trained"
