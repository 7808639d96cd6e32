"""Live tracking: what trackers get while a peer or a run goes on, and that none of them can hurt it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from farflung.console.history import live_tracker as tracking_module
from farflung.console.history.live_tracker import PeerRows, Tracking
from farflung.console.history.trackers import Chosen
from farflung.console.main import app
from farflung.peer.trainer.inner_loop import gradient_norm
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.process import exit_codes
from farflung.protocol.process.journal import JOURNAL_VARIABLE, EventLog
from rig.waiting import LONG_S, PATIENCE_S, eventually

WHO = {
    "role": "peer",
    "peer": "p" * 16,
    "name": "amber-fox",
    "run": "demo",
    "process": "ab" * 16,
    "software": "x",
}
RULES = {"rounds": 9, "fragments": 1}
AMBER = "amber-fox-ababab"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whoever waits for a tracker to end: to load one takes long on a machine that has far more to do."""
    monkeypatch.setattr(tracking_module, "ENDS_WITHIN_S", LONG_S)


def trained(log: EventLog, step: int, loss: float | None = 2.5, grad_norm: float | None = 0.75) -> None:
    log.write("trained", step=step, tokens=100 * step, loss=loss, grad_norm=grad_norm)


def committed(log: EventLog, version: int, **more: object) -> None:
    log.write("committed", round=version, version=version, fragment=0, **more)


# ---- a peer's own rows -----------------------------------------------------------------------------------------


def event(kind: str, pid: int = 7, wall: float = 1000.0, **fields: object) -> dict[str, Any]:
    return {"event": kind, "pid": pid, "wall": wall, **fields}


def test_a_peers_row_is_what_it_says_of_its_training() -> None:
    rows = PeerRows(7)
    first, second = rows.take(
        [
            event("start", **WHO),
            event("trained", step=50, tokens=5000, loss=None, grad_norm=None),
            event("committed", version=3, fragment=0),
            event("committed", version=9, fragment=1),
            event("trained", pid=8, step=60, tokens=1, loss=1.0, grad_norm=1.0),
            event("trained", wall=1005.0, step=60, tokens=6000, loss=2.5, grad_norm=0.75),
        ]
    )
    assert first.number == 50 and first.values == {"peer/step": 50, "peer/tokens": 5000, "peer/rounds": 0}
    assert (second.number, second.wall) == (60, 1005.0)
    assert second.values == {
        "peer/step": 60, "peer/tokens": 6000, "peer/rounds": 2, "run/version": 3, "peer/tokens_per_s": 200.0,
        "peer/loss": 2.5, "peer/grad_norm": 0.75,
    }  # fmt: skip
    assert (rows.name, rows.group) == (AMBER, "demo") and not rows.finished


def test_each_life_of_a_peer_is_another_one() -> None:
    rows = PeerRows(7)
    rows.take([event("start", **WHO), event("trained", step=5, tokens=500), event("end")])
    assert rows.finished
    before = rows.run_id
    [row] = rows.take(
        [event("start", **WHO | {"process": "cd" * 16}), event("trained", step=1, tokens=100, wall=1001.0)]
    )
    assert rows.run_id != before and "peer/tokens_per_s" not in row.values and not rows.finished
    rows.take([event("start", again=True, **WHO)])
    assert rows.name.endswith("cdcdcd"), "the head of a further file is no other life"


def test_the_norm_of_a_gradient_is_that_of_all_of_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert gradient_norm(ModelLayout.of(model, 16).own_gradients(model)) is None, "there is none yet"
    model(torch.ones(1, 3)).sum().backward()
    grads = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    assert gradient_norm(ModelLayout.of(model, 16).own_gradients(model)) == pytest.approx(float(grads.norm()))
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert gradient_norm(ModelLayout.of(sparse, 16).own_gradients(sparse)) is None


# ---- the process beside ----------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reason = "tensorboard is not installed; pip install tensorboard"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    log = reader.EventAccumulator(str(folder))
    log.Reload()
    return {tag: [(point.step, point.value) for point in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


@pytest.mark.slow
def test_what_a_peer_tells_while_it_trains_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install tensorboard")
    path, board = tmp_path / "identity.events.jsonl", tmp_path / "board"
    earlier = EventLog(path)
    earlier.write_start(**WHO | {"name": "an-earlier-life"})
    trained(earlier, 999)
    earlier.close()
    with Tracking(Chosen(tensorboard=board), "training") as tracking:
        tracking.of_this_process(path)
        log = EventLog(path)
        log.write_start(**WHO)
        trained(log, 50, loss=None)
        there = board / AMBER
        eventually(lambda: there.is_dir() and 50 in dict(scalars(there).get("peer/step", [])), "it is live")
        committed(log, 1)
        trained(log, 100)
        log.write("end", code="left", reason="enough")
        log.close()
    found = scalars(there)
    assert found["peer/step"] == [(50, 50.0), (100, 100.0)]
    assert found["peer/loss"] == [(100, 2.5)] and found["peer/grad_norm"] == [(50, 0.75), (100, 0.75)]
    assert found["run/version"] == [(100, 1.0)]
    assert os.listdir(board) == [AMBER]


def a_run(folder: Path, versions: range, norm: float = 0.5) -> None:
    log = EventLog(folder / "events.jsonl")
    log.write_start(role="coordinator", run="demo", run_id="c0ffee", rules=RULES)
    log.write("admitted", peer="p" * 16, name="amber-fox")
    for version in versions:
        told = {"members": ["p" * 16], "weights": [1.0], "tokens": 100, "seconds": 1.0, "tx_bytes": 7}
        committed(log, version, loss=5.0 - version, norm=norm, excluded={}, **told)
    log.close()


@pytest.mark.slow
def test_a_runs_rounds_are_read_back_with_its_loss_and_the_norm_of_its_updates(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install tensorboard")
    a_run(tmp_path, range(1, 3))
    with Tracking(Chosen(tensorboard=tmp_path / "board"), "the run") as tracking:
        tracking.of_run(tmp_path)
    found = scalars(tmp_path / "board")
    assert found["run/loss"] == [(1, 4.0), (2, 3.0)] and found["run/update_norm"] == [(1, 0.5), (2, 0.5)]


def fake_wandb(folder: Path, log: str = "pass", init: str = "pass") -> None:
    """A package of that name, which writes what it is told into a file beside it."""
    (folder / "wandb.py").write_text(
        f"""
import json, sys, time
def init(**words):
    print("wandb: a banner", file=sys.stderr)
    {init}
    return Run(words)
class Run:
    def __init__(self, words): self.say(words)
    def say(self, told): open({str(folder / "told")!r}, "a").write(json.dumps(told) + "\\n")
    def log(self, values, step):
        {log}
        self.say([step, values])
    def finish(self): self.say("finished")
"""
    )


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules this process and its children find."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(folder) + (os.pathsep + before if before else ""))
    return folder


@pytest.mark.slow
def test_weights_and_biases_gets_a_run_for_each_life_in_the_group_of_its_run(
    shown: Path, tmp_path: Path
) -> None:
    """A stand-in for wandb, which logs what it is asked; the real one is below, offline, where it is installed."""
    fake_wandb(shown)
    said: list[str] = []
    with Tracking(Chosen(wandb="far"), "training", lambda text, **_: said.append(text)) as tracking:
        tracking.of_this_process(tmp_path / "journal.events.jsonl")
        log = EventLog(tmp_path / "journal.events.jsonl")
        log.write_start(**WHO)
        trained(log, 50)
        log.close()
    words, row, end = [json.loads(line) for line in (shown / "told").read_text().splitlines()]
    assert (words["project"], words["group"], words["name"]) == ("far", "demo", AMBER)
    assert words["id"] == f"demo-{'p' * 16}-{'ab' * 6}" and words["resume"] == "allow"
    assert row[0] == 50 and row[1]["peer/loss"] == 2.5 and end == "finished" and said == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        ({"init": 'raise RuntimeError("no key is configured")'}, "no key is configured"),
        ({"log": "sys.exit(3)"}, "a banner"),
    ],
)
def test_a_tracker_that_fails_is_told_in_one_line(
    shown: Path, tmp_path: Path, breaks: dict[str, str], why: str
) -> None:
    fake_wandb(shown, **breaks)
    a_run(tmp_path, range(1, 3))
    said: list[str] = []
    with Tracking(Chosen(wandb="far"), "the run", lambda text, **_: said.append(text)) as tracking:
        tracking.of_run(tmp_path)
        eventually(lambda: said, "it is told while the run goes on")
    assert len(said) == 1 and said[0].startswith("--wandb failed: ") and why in said[0]
    assert said[0].endswith("; the run is not affected")


@pytest.mark.slow
def test_a_tracker_that_hangs_is_left_behind(
    shown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_wandb(shown, log="time.sleep(1e6)")
    monkeypatch.setattr(tracking_module, "ENDS_WITHIN_S", 1.0)
    a_run(tmp_path, range(1, 3))
    said: list[str] = []
    with Tracking(Chosen(wandb="far"), "the run", lambda text, **_: said.append(text)) as tracking:
        tracking.of_run(tmp_path)
        eventually((shown / "told").exists, "it has begun")
        begun = time.monotonic()
    assert time.monotonic() - begun < PATIENCE_S
    assert said == ["--wandb did not end within 1 s; the run is not affected"]


def test_nothing_is_started_where_nothing_is_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process"))
    with Tracking(Chosen(), "the run") as tracking:
        tracking.of_run(tmp_path)
        tracking.of_this_process(tmp_path / "journal")
        tracking.of_this_process(None)


# ---- what is told before anything begins -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "module", "package"),
    [
        ("--tensorboard", "tensorboard", "tensorboard"),
        ("--wandb", "wandb", "wandb"),
        ("--mlflow", "mlflow", "mlflow-skinny"),
    ],
)
@pytest.mark.parametrize("command", ["coordinate", "join", "export"])
def test_a_missing_package_is_one_line_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str, package: str, command: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path, range(1, 2))
    (tmp_path / "run.toml").write_text("")
    url = "farflung://127.0.0.1:1/demo?k=" + 43 * "A"
    last = {"coordinate": ["--plain", "run.toml"], "join": ["--plain", url], "export": [str(tmp_path)]}[
        command
    ]
    done = CliRunner().invoke(app, [command, option, "there", *last])
    assert isinstance(done.exception, UserError)
    assert f"{option} needs the package {package}: pip install {package}" in str(done.exception)
    assert not (tmp_path / "run.data").exists()


def test_without_a_journal_there_is_nothing_to_track(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_VARIABLE, "off")
    monkeypatch.setattr(Chosen, "check", lambda chosen: None)
    url = "farflung://127.0.0.1:1/demo?k=" + 43 * "A"
    done = CliRunner().invoke(app, ["join", "--plain", "--wandb", "far", url])
    assert isinstance(done.exception, UserError) and f"{JOURNAL_VARIABLE}=off" in str(done.exception)


def test_no_tracker_is_imported_by_who_is_tracked() -> None:
    code = (
        "import sys, farflung.console.history.live_tracker; "
        "print({'wandb', 'tensorboard', 'mlflow', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.strip() == "set()", done.stderr


# ---- the real ones, where they are installed: `make adapters` ----------------------------------------------------


def tracked(folder: Path, chosen: Chosen) -> None:
    """Two rounds, a restart of the coordinator with the same tracker, and one round more."""
    said: list[str] = []
    for versions in (range(1, 3), range(3, 4)):
        a_run(folder, versions)
        with Tracking(chosen, "the run", lambda text, **_: said.append(text)) as tracking:
            tracking.of_run(folder)
    assert said == []


@pytest.mark.slow
def test_mlflow_reads_back_each_round_once_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; pip install mlflow-skinny")
    store = tmp_path / "store"
    tracked(tmp_path, Chosen(mlflow=str(store)))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the reader; the tracker has thought of it
    client = mlflow.MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("demo")
    [run] = client.search_runs([experiment.experiment_id])
    losses = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "run/loss")]
    assert losses == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert run.info.status == "FINISHED" and run.data.params["rounds"] == "9"


@pytest.mark.slow
def test_weights_and_biases_offline_has_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    a_run(tmp_path, range(1, 3))
    said: list[str] = []
    with Tracking(Chosen(wandb="far"), "the run", lambda text, **_: said.append(text)) as tracking:
        tracking.of_run(tmp_path)
    assert said == []
    [file] = tmp_path.rglob("*.wandb")
    raw = file.read_bytes()
    for word in (b"run/loss", b"run/update_norm", b"c0ffee"):
        assert word in raw, word


def test_exit_codes_of_mistakes_are_those_of_users(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farflung", "export", str(tmp_path / "nowhere"), "--json"], capture_output=True
    )
    assert done.returncode == exit_codes.USAGE


# ---- a run and its peer ------------------------------------------------------------------------------------------


@pytest.mark.hard
def test_a_run_and_its_peer_are_tracked_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; pip install tensorboard")
    farflung = [sys.executable, "-m", "farflung"]
    (tmp_path / "run.toml").write_text('[run]\nname = "tracked"\nrounds = 3\n')
    host = [
        "coordinate",
        "--plain",
        "--exit-when-done",
        "--listen",
        "127.0.0.1:0",
        "--set",
        "round.sync_every=5",
    ]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(
        [*farflung, *host, "--tensorboard", "board", "run.toml"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True,
    ) as coordinator:  # fmt: skip
        try:
            assert coordinator.stdout is not None
            url = coordinator.stdout.readline().strip()
            peer = [
                "join",
                "--plain",
                "--identity",
                "amber.pem",
                "--listen",
                "127.0.0.1:0",
                "--tensorboard",
                "board",
            ]
            done = subprocess.run([*farflung, *peer, url], cwd=tmp_path, capture_output=True, timeout=LONG_S)
            assert done.returncode == 0, done.stderr
            assert coordinator.wait(LONG_S) == 0, (tmp_path / "log").read_text()
        finally:
            coordinator.kill()
    [own] = [each for each in (tmp_path / "board").iterdir() if each.is_dir()]
    run, mine = scalars(tmp_path / "board"), scalars(own)
    assert [step for step, _ in run["run/loss"]] == [1, 2, 3] and all(
        norm > 0 for _, norm in run["run/update_norm"]
    )
    assert all(value > 0 for name in ("peer/loss", "peer/grad_norm") for _, value in mine[name])
