"""A run's figures for experiment trackers: what a round's row has, and that each tracker gets it once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.console.history import trackers
from farflung.console.history.history import History
from farflung.console.history.trackers import Chosen, ExportOptions, PlotRow, RunRows, export
from farflung.console.main import app
from farflung.protocol.errors import UserError
from rig.waiting import LONG_S

ALICE, BOB = "a" * 16, "b" * 16
RULES = {"rounds": 3, "fragments": 1}


class Rows:
    """Of the journals below a folder."""

    def __init__(self, folder: Path) -> None:
        self.history, self.run = History(folder, keep=False), RunRows()

    def news(self) -> list[PlotRow]:
        return self.run.take(self.history.new_events())


def start(**fields: object) -> dict[str, Any]:
    return {"event": "start", "wall": 1000.0, "pid": 1, "run": "demo", **fields}


def commit(
    round_no: int, wall: float, loss: float | None, weights: list[float], **more: Any
) -> dict[str, Any]:
    body = {"version": round_no, "fragment": 0, "members": [ALICE, BOB], "tokens": 100, "seconds": 2.0}
    body |= {"tx_bytes": 4000, "excluded": {} if all(weights) else {BOB: "late"}}
    return (
        body
        | {"event": "committed", "wall": wall, "round": round_no, "loss": loss, "weights": weights}
        | more
    )


def host(*commits: dict[str, Any]) -> list[dict[str, Any]]:
    here = [
        {"event": "admitted", "wall": 1001.0, "peer": peer, "name": name}
        for peer, name in ((ALICE, "alice"), (BOB, "bob"))
    ]
    return [start(role="coordinator", run_id="c0ffee", rules=RULES), *here, *commits]


def bob() -> list[dict[str, Any]]:
    """His clock is far ahead, and nothing may come of that."""
    frozen = {"event": "frozen", "wall": 5000.0, "fragment": 0, "step": 20, "loss": 3.5}
    return [
        start(role="peer", peer=BOB),
        frozen,
        {"event": "sent", "wall": 5001.0, "round": 1, "fragment": 0},
    ]


def add(path: Path, events: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two of three rounds; bob is left out of the second one."""
    rounds = commit(1, 1010.0, 3.0, [0.5, 0.5]), commit(2, 1015.0, 2.5, [1.0, 0.0])
    add(tmp_path / "journals/run.data/events.jsonl", host(*rounds))
    add(tmp_path / "journals/bob/identity.events.jsonl", bob())
    return tmp_path / "journals"


def test_a_row_tells_the_round_and_each_peers_part(folder: Path) -> None:
    first, second = Rows(folder).news()
    assert (first.number, first.wall) == (1, 1010.0)
    assert first.values["run/loss"] == 3.0 and first.values["run/alive"] == 2
    assert first.values["loss/bob"] == 3.5 and first.values["step/bob"] == 20, "from his own journal"
    assert "loss/alice" not in first.values, "her journal is not here"
    assert second.values["run/tokens"] == 200 and second.values["run/tokens_per_s"] == 20.0
    assert second.values["round/took_part"] == 1 and second.values["round/left_out"] == 1
    assert second.values["weight/alice"] == 1.0 and second.values["weight/bob"] == 0.0


def test_rows_come_once_while_files_grow(folder: Path) -> None:
    rows = Rows(folder)
    assert len(rows.news()) == 2 and rows.news() == [] and not rows.run.finished
    add(folder / "run.data/events.jsonl", [commit(3, 1020.0, None, [0.5, 0.5])])
    [row] = rows.news()
    assert "run/loss" not in row.values, "no figure is better than a wrong one"
    assert rows.run.finished


def test_other_fragments_do_not_count_tokens_twice(tmp_path: Path) -> None:
    rounds = commit(1, 1010.0, 3.0, [0.5, 0.5]), commit(2, 1011.0, 3.0, [0.5, 0.5], version=1, fragment=1)
    add(tmp_path / "events.jsonl", host(*rounds))
    first, second = Rows(tmp_path).news()
    assert first.values["run/tokens"] == 100
    assert "run/tokens" not in second.values and second.values["round/sent_bytes"] == 4000


def test_two_runs_in_one_folder_are_refused(folder: Path) -> None:
    add(folder / "other/events.jsonl", [start(role="coordinator", run_id="another", rules=RULES)])
    with pytest.raises(UserError, match="more than one run"):
        Rows(folder).news()


def test_mistakes_are_told(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()

    def refusal(*words: str) -> str:
        return str(runner.invoke(app, ["export", *words]).exception)

    assert "say where to" in refusal(str(folder))
    assert "no such folder" in refusal(str(folder / "nowhere"), "--json")
    (tmp_path / "empty").mkdir()
    assert "no journal of a coordinator" in refusal(str(tmp_path / "empty"), "--json")


def test_json_lines_for_scripts(folder: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["round"] for row in rows] == [1, 2] and rows[1]["run/loss"] == 2.5


def test_follow_ends_with_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "LOOK_EVERY_S", 0.01)
    said: list[str] = []
    threading.Timer(
        0.05, lambda: add(folder / "run.data/events.jsonl", [commit(3, 1020.0, 2.0, [0.5, 0.5])])
    ).start()
    export(ExportOptions(folder, as_json=True, follow=True), said.append, said.append)
    assert [json.loads(line)["round"] for line in said[:-1]] == [1, 2, 3]
    assert said[-1] == "exported 3 rounds of demo"


# ---- TensorBoard ---------------------------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_written_also_after_a_second_export(
    folder: Path, tmp_path: Path
) -> None:
    reason = "tensorboard is not installed; pip install tensorboard"
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    for _ in range(2):
        export(ExportOptions(folder, Chosen(tensorboard=tmp_path / "board")), print, print)
    log = reader.EventAccumulator(str(tmp_path / "board"))
    log.Reload()
    losses = [(point.step, point.value, point.wall_time) for point in log.Scalars("run/loss")]
    assert losses == [(1, 3.0, 1010.0), (2, 2.5, 1015.0)]
    assert [point.value for point in log.Scalars("step/bob")] == [20.0]


@pytest.mark.parametrize("option,package", [("--tensorboard", "tensorboard"), ("--wandb", "wandb")])
def test_a_missing_package_is_one_line_with_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = CliRunner().invoke(app, ["export", str(folder), option, str(tmp_path / "there")])
    assert isinstance(done.exception, UserError)
    assert f"{option} needs the package {package}: pip install {package}" in str(done.exception)


def test_no_tracker_is_imported_unasked() -> None:
    code = "import sys, farflung.console.history.trackers; print({'wandb', 'tensorboard', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout.strip() == "set()", done.stderr


# ---- Weights & Biases ----------------------------------------------------------------------------------------


def test_wandb_gets_one_run_and_a_step_for_each_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []

    class FakeRun:
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            ended.append(True)

    fake = types.ModuleType("wandb")
    fake.init = lambda **words: begun.append(words) or FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    export(ExportOptions(folder, Chosen(wandb="far")), print, print)
    [words] = begun
    assert (words["project"], words["name"], words["id"]) == ("far", "demo", "c0ffee")
    assert words["resume"] == "allow" and words["config"] == RULES
    assert [(step, values["run/loss"]) for step, values in logged] == [(1, 3.0), (2, 2.5)]
    assert ended == [True]
