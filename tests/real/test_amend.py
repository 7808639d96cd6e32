"""The host changes a run that goes on, as hosts do; the coordinator is killed after it, and the run is replayed."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_run_is_changed_while_it_goes_on_and_ends_by_the_new_terms(stage: Any) -> None:
    stage.write_run(every_rounds=2, dead_after_s=3.0)  # peers find its death by its silence
    stage.coordinate("--exit-when-done")
    shared = str(stage.folder / "shared")
    for name in ("ann", "bob"):
        stage.join(name, "--checkpoints", shared, "--archive")
    stage.until(lambda s: s["version"] >= 3, "the run has begun")

    toml = str(stage.folder / "run.toml")
    refused = stage.call("amend", "--set", "model.layers=2", toml)
    assert refused.returncode == 2 and "[model] layers may not change while a run goes on" in refused.stderr
    done = stage.call("amend", "--set", "round.sync_every=5", "--set", "outer.lr=0.4", "--json", toml)
    assert done.returncode == 0, done.stderr
    before = stage.until(lambda s: s["period_steps"] == 5 and s["version"] >= 6, "it follows")
    assert [each["changes"] for each in before["amendments"]] == [
        {"outer": {"lr": 0.4}, "round": {"sync_every": 5}}
    ]

    stage.processes["coordinator"].kill()
    stage.processes["coordinator"].wait()
    stage.coordinate("--exit-when-done")  # with the file that the run began with
    stage.join("cyd", "--checkpoints", shared)
    after = stage.until(lambda s: s["version"] > before["version"] and s["alive"] == 3, "it goes on")
    assert after["period_steps"] == 5 and after["run_id"] == before["run_id"]
    ends = stage.call(
        "amend", "--set", "round.sync_every=5", "--set", "outer.lr=0.4",
        "--set", f"run.rounds={after['version'] + 60}", toml,
    )  # fmt: skip
    assert ends.returncode == 0 and "amendment 2, from version" in ends.stdout, ends.stderr
    names = ("ann", "bob", "cyd")
    assert [stage.wait(name) for name in (*names, "coordinator")] == [0] * 4
    assert len({stage.model(name).read_bytes() for name in names}) == 1
    for name in ("ann", "bob"):
        assert " on, the host changed: " in stage.log(name)
        assert "my state differs" not in stage.log(name)
    replay = stage.call("audit", "--replay", shared, str(stage.folder / "run.data"))
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert "digest" in replay.stdout and "differs" not in replay.stdout
