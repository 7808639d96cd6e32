"""The last copy of a model is never thrown away: a peer that trained alone, and ended, comes back with what it held."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from farflung.protocol.process import failpoints

pytestmark = [pytest.mark.slow, pytest.mark.forked_peers]

LIGHT = Path(__file__).parents[1] / "rig" / "light_trainer.py"


def begin(stage: Any, **run: object) -> None:
    stage.environ |= {"FARFLUNG_STEP_S": "0.002", "FARFLUNG_VALUES": "20000"}
    stage.write_run(**({"min_peers": 1, "sync_every": 10, "patience_s": 3600.0} | run))
    stage.coordinate()
    join(stage)


def join(stage: Any) -> None:
    stage.join("ann", "--script", str(LIGHT))


def goes_on(version: int) -> Any:
    return lambda s: s["version"] > version and sum(m["participating"] for m in s["members"]) == 1


def committed(stage: Any) -> list[int]:
    return [each["version"] for each in stage.events("coordinator") if each["event"] == "committed"]


def end(stage: Any, how: int) -> int:
    """The newest committed version, once the peer is gone."""
    peer = stage.processes["ann"]
    peer.send_signal(how)
    peer.wait()
    stage.until(lambda s: not any(m["alive"] for m in s["members"]), "nobody is here")
    return int(stage.status()["version"])


def test_a_lone_peer_goes_on_from_the_newest_committed_version_after_any_end(stage: Any) -> None:
    begin(stage)
    draw, version = random.Random(9), 0
    for how in (signal.SIGINT, signal.SIGKILL):
        stage.until(goes_on(version), "it trains")
        time.sleep(draw.uniform(0.0, 0.3))  # the moment of the end is what is tried here
        version = end(stage, how)
        join(stage)
    stage.until(goes_on(version), "it goes on")
    assert stage.status()["era"] == 0
    made = committed(stage)
    assert made == list(range(1, len(made) + 1)), "a version was made twice"
    log = stage.log("ann")
    assert "nobody online has" not in log, log
    assert log.count("of the state lies on this peer's own disk") == 2, log
    assert "Traceback" not in log
    kept = stage.folder / "state"
    assert f"is kept in {kept}; run the same command to continue" in log
    assert kept.stat().st_mode & 0o777 == 0o700
    files = [path for path in kept.rglob("*") if path.is_file() and path.parent.suffix == ".kept"]
    assert files and all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_a_disk_that_is_full_is_told_once_and_training_goes_on(stage: Any) -> None:
    stage.environ["FARFLUNG_FAILPOINTS"] = "keep.mid_base=raise:ENOSPC@1+"
    begin(stage)
    stage.until(goes_on(5), "it trains")
    end(stage, signal.SIGINT)
    log = stage.log("ann")
    assert log.count("is not kept on this disk") == 2, "once while it trains, and once where it leaves"
    assert "No space left on device" in log and "You hold the last copy of the run" in log
    assert not list((stage.folder / "state").rglob("*.new")) and "Traceback" not in log


def test_nothing_is_kept_where_the_owner_says_so_and_the_last_one_is_told(stage: Any) -> None:
    stage.environ["FARFLUNG_KEEP"] = "off"
    begin(stage)
    stage.until(goes_on(2), "it trains")
    version = end(stage, signal.SIGINT)
    told = re.search(
        r"You hold the last copy of the run \(version (\d+)\). It is not kept on this disk", stage.log("ann")
    )
    assert told and int(told[1]) in (version - 1, version), "a commit may come while it leaves"
    assert not list((stage.folder / "state").rglob("*.kept"))
    waits = stage.until(lambda s: s["phase"] == "waiting", "the run waits")
    assert waits["eta_s"] is None


@pytest.mark.hard
@pytest.mark.parametrize("point", failpoints.KEEPING)
def test_a_lone_peer_that_is_killed_while_it_writes_goes_on(stage: Any, point: str) -> None:
    begin(stage)
    stage.until(goes_on(2), "it trains")
    end(stage, signal.SIGINT)
    stage.environ["FARFLUNG_FAILPOINTS"] = f"{point}=kill@2"
    join(stage)
    stage.wait("ann")
    version = end(stage, signal.SIGKILL)
    stage.environ["FARFLUNG_FAILPOINTS"] = ""
    join(stage)
    stage.until(goes_on(version), "it goes on")
    made = committed(stage)
    assert made == list(range(1, len(made) + 1)) and stage.status()["era"] == 0
