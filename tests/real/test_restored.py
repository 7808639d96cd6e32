"""A coordinator's disk is lost, or an older state of it, or of its etcd, comes back: peers give back the run, whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rig.etcd_cluster import EtcdCluster, needs_etcd

pytestmark = [pytest.mark.slow, pytest.mark.forked_peers]


def begin(stage: Any, *more: str, version: int = 3) -> Path:
    """The run's folder, when two peers have come so far."""
    stage.write_run(dead_after_s=3.0, fragments=2)
    stage.coordinate(*more)
    for name in ("ann", "bob"):
        stage.join(name)
    stage.until(lambda s: s["version"] >= version, "the run has begun")
    return Path(stage.folder / "run.data")


def kill(stage: Any) -> None:
    stage.processes["coordinator"].kill()
    stage.processes["coordinator"].wait()


def held(stage: Any) -> dict[int, int]:
    """Of each fragment the newest version that somebody holds."""
    newest: dict[int, int] = {}
    for name in ("ann", "bob"):
        for event in stage.events(name):
            if event["event"] == "sealed":
                at = event.get("fragment", 0)
                newest[at] = max(newest.get(at, 0), event["version"])
    return newest


def nobody_lost_anything(stage: Any) -> None:
    for name in ("ann", "bob"):
        log = stage.log(name)
        assert "my state differs" not in log and "fetch" not in log.partition("out of contact")[2], log[
            -2000:
        ]


@pytest.mark.hard
def test_a_coordinator_that_has_its_key_alone_goes_on_from_what_peers_hold(stage: Any) -> None:
    data = begin(stage)
    before = stage.status()
    kill(stage)
    known = held(
        stage
    )  # what the coordinator alone knew of a round that it had just committed is gone with its disk
    for path in data.iterdir():
        if path.name != "coordinator.key":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    stage.coordinate("--restored")
    had = held(stage)
    after = stage.until(lambda s: s["version"] > max(had.values()), "it goes on")
    assert after["run_id"] == before["run_id"] and after["era"] == 0
    made: dict[int, list[int]] = {}
    for event in stage.events("coordinator"):
        if event["event"] == "committed":
            made.setdefault(event.get("fragment", 0), []).append(event["version"])
    for fragment, versions in made.items():
        assert versions[0] <= had[fragment] + 1, "a round was lost"
        assert versions == list(range(versions[0], versions[0] + len(versions)))
    [restored] = [each for each in stage.events("coordinator") if each["event"] == "restored"]
    assert all(restored["versions"][fragment] >= version for fragment, version in known.items())
    assert sorted(restored["peers"]) == sorted(each["id"] for each in after["members"])
    assert "restored: the run goes on from version" in stage.log("coordinator")
    nobody_lost_anything(stage)
    stage.join("cyd")
    everybody = lambda: any(len(e.get("members", ())) == 3 for e in stage.events("coordinator"))  # noqa: E731
    stage.eventually(everybody, "somebody new takes part")


@pytest.mark.hard
def test_an_older_state_of_the_disk_forks_nothing_and_is_mended_by_the_peers(stage: Any) -> None:
    """The file is the same one, as where a machine's disk is set back to a snapshot: no --restored is asked for."""
    data = begin(stage)
    kill(stage)
    journal = data / "journal.sqlite"
    old = {path: path.read_bytes() for path in data.glob("journal.sqlite*")}
    stage.coordinate()
    version = stage.status()["version"]
    stage.until(lambda s: s["version"] >= version + 4, "it goes on")
    kill(stage)
    for path in data.glob("journal.sqlite-*"):
        path.unlink()
    for path, raw in old.items():
        path.write_bytes(raw)  # the file stays the same one
    assert journal.exists()
    stage.coordinate()
    began = stage.status()["version"]
    stage.until_log("coordinator", "this journal is an old copy")
    assert "start it again with --restored" in stage.log("coordinator")
    paused = stage.until(lambda s: "old copy" in s["reason"], "the status says so")
    assert paused["version"] == began
    kill(stage)
    stage.coordinate("--restored")
    had = held(stage)
    stage.until(lambda s: s["version"] > max(had.values()), "it goes on")
    nobody_lost_anything(stage)


@pytest.mark.hard
@needs_etcd
def test_an_older_state_of_etcd_is_mended_by_the_peers(stage: Any) -> None:
    with EtcdCluster(stage.folder / "etcd") as cluster:
        store = ("--store", cluster.url("r"))
        begin(stage, *store)
        kill(stage)
        cluster.kill(0)
        shutil.copytree(cluster.data(0), stage.folder / "snapshot")
        cluster.start(0)
        stage.coordinate(*store)
        version = stage.status()["version"]
        before = stage.until(lambda s: s["version"] >= version + 4, "it goes on")
        kill(stage)
        cluster.kill(0)
        shutil.rmtree(cluster.data(0))
        shutil.copytree(stage.folder / "snapshot", cluster.data(0))
        cluster.start(0)
        stage.coordinate("--restored", *store)
        had = held(stage)
        after = stage.until(lambda s: s["version"] > max(had.values()), "it goes on")
        assert after["run_id"] == before["run_id"] and "old copy" not in stage.log("coordinator")
        assert "restored: the run goes on from version" in stage.log("coordinator")
        nobody_lost_anything(stage)
        for name in ("ann", "bob", "coordinator"):  # while its store is there
            stage.processes[name].terminate()
            stage.wait(name)
