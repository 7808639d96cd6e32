"""`farflung simulate`: what it prints, draws and refuses.  What it simulates: tests/whole/test_laboratory.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farflung.console.main import app
from farflung.protocol.errors import UserError

RUN = """
[run]
name = "lab"
min_peers = 2
rounds = 3
[model]
kind = ""
[data]
source = ""
batch = 8
lease_samples = 80
[round]
sync_every = 10
chunk_kb = 16
"""
SCRIPT = """
import torch, farflung
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
with farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    for number, rows in enumerate(run.batches(torch.arange(64000.0).reshape(8000, 8) / 64000)):
        loss = model(rows).square().mean()
        loss.backward()
        run.step(loss)
        {then}
print("done")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["farflung"])
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "train.py").write_text(SCRIPT.format(then=""))
    return tmp_path


def simulate(*words: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "run.toml", "--script", "train.py", "--peers", "2", *words])


def test_recipes_are_compared_in_one_table_and_one_picture(folder: Path) -> None:
    told = simulate("--try", "outer.lr=0.5", "--try", "outer.lr=0.7 outer.momentum=0.5", "--plot", "x.svg")
    assert told.exit_code == 0, told.output
    rows = [line for line in told.stdout.splitlines() if line.startswith("outer.lr")]
    assert [row.split("  ")[0] for row in rows] == ["outer.lr=0.5", "outer.lr=0.7, outer.momentum=0.5"]
    assert all("3 of 3" in row for row in rows)
    assert "outer.momentum=0.5" in (folder / "x.svg").read_text()
    assert told.stderr.count("done") == 2, (
        "what both replicas print is shown once a recipe, and beside the table"
    )


def test_the_same_as_one_JSON_object(folder: Path) -> None:
    told = simulate("--json", "--set", "run.rounds=2")
    [recipe] = json.loads(told.stdout)["recipes"]
    assert recipe["version"] == recipe["of"] == 2 and len(recipe["rounds"]) == 2
    assert recipe["sent_bytes"] > 0 and recipe["tokens"] == sum(each["tokens"] for each in recipe["rounds"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--try", "outer.lr"], "expected SECTION.KEY=VALUE"),
        (["--try", "outer.lr=-1"], r"[outer] lr"),
        (["--lines", "none.toml"], "cannot read"),
        (["--plot", "x.jpg"], ".svg or .png"),
        (["--plot", "none/x.svg"], "no such folder"),
        (["--script", "none.py"], "there is no such file"),
    ],
)
def test_mistakes_are_told_in_one_line(folder: Path, words: list[str], told: str) -> None:
    base = ["simulate", "run.toml", "--script", "train.py"]
    result = CliRunner().invoke(app, [*base, *words])
    assert isinstance(result.exception, UserError) and told in str(result.exception)


def test_peers_and_lines_contradict_each_other(folder: Path) -> None:
    (folder / "home.toml").write_text("[[peers]]\n")
    result = simulate("--lines", "home.toml")
    assert isinstance(result.exception, UserError) and "--peers" in str(result.exception)


def test_a_failing_script_shows_its_own_lines_and_none_of_ours(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.format(then="if number == 12: 1 / 0"))
    told = simulate()
    assert told.exit_code == 1 and "ZeroDivisionError" in told.stderr
    assert "if number == 12: 1 / 0" in told.stderr and "replica.py" not in told.stderr


@pytest.mark.parametrize(
    "then", ["if run.manifest.outer.lr == 0.5: 1 / 0", "if run.manifest.outer.lr == 0.5: run.step(tokens=-1)"]
)
def test_a_recipe_that_fails_leaves_the_others_their_rows(folder: Path, then: str) -> None:
    (folder / "train.py").write_text(SCRIPT.format(then=then))
    told = simulate("--try", "outer.lr=0.4", "--try", "outer.lr=0.5", "--try", "outer.lr=0.6")
    assert told.exit_code == 1
    rows = [line.split()[0] for line in told.stdout.splitlines() if line.startswith("outer.lr")]
    assert rows == ["outer.lr=0.4", "outer.lr=0.6"]
    assert "ZeroDivisionError" in told.stderr or "tokens must not be negative" in told.stderr


def test_ctrl_C_shows_what_is_done(folder: Path) -> None:
    (folder / "train.py").write_text(
        SCRIPT.format(then="if run.manifest.outer.lr == 0.5: raise KeyboardInterrupt")
    )
    told = simulate("--try", "outer.lr=0.4", "--try", "outer.lr=0.5")
    assert told.exit_code == 130 or told.exception is not None
    assert "outer.lr=0.4" in told.stdout
