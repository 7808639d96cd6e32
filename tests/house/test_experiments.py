"""The experiments still run: each of them for a few steps."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "learning"
long = pytest.mark.skipif(not os.environ.get("FARFLUNG_LONG"), reason="minutes; FARFLUNG_LONG=1 runs it")


@long
@pytest.mark.parametrize("name", ["room", "schedules", "outer", "inner", "shards", "slow", "idle"])
def test_an_experiment_prints_its_table_and_draws_its_plot(name: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    command = [
        sys.executable,
        FOLDER / "learning.py",
        name,
        "--steps",
        "100",
        "--period",
        "10",
        "--plot",
        plot,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert all("%" in line or "pip install" in line for line in done.stdout.splitlines()[2:])
    assert plot.read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("malicious.py", "--rounds 1 --steps 1 --peers 4 flip"),
        ("codecs.py", "--rounds 1 --steps 1 --peers 2 int4"),
        ("exact_steps.py", "--steps 12 --seeds 1 --only 0 1 --lr 6e-3"),
        ("staged.py", "--steps 4 --period 2 --seeds 1 --only 0 1 3"),
        pytest.param("churn.py", "--rounds 4 --peers 4", marks=long),
    ],
)
def test_an_experiment_of_its_own_does_too(
    script: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """These build rounds by hand, so a new field in a message breaks them."""
    plot = tmp_path / "plot.svg"
    monkeypatch.setattr(sys, "argv", [script, "--plot", str(plot), *words.split()])
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert plot.read_text().startswith("<svg ")


def told_by(
    script: Path, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setattr(sys, "argv", [script.name, *words.split()])
    runpy.run_path(str(script), run_name="__main__")
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("setting", ["flat", "one", "regions --every 1 --momentum 0.5"])
def test_regions_are_learned_beside_one_crowd(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{setting} --regions 2 --of 2 --rounds 2 --steps 2"
    told = told_by(FOLDER / "regions.py", words, monkeypatch, capsys)
    assert list(told["losses"]) == ["1", "2"] and all(0.0 < loss < 7.0 for loss in told["losses"].values())
    assert (told["cosine_of_regions"] != 0.0) == setting.startswith("regions")


def test_a_mesh_over_home_lines_commits_and_its_rounds_take_their_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--peers 8 --group 2 --chunks 4 --rounds 1 --mb 5 --churn 0 --json"
    told = told_by(FOLDER.parent / "mesh.py", words, monkeypatch, capsys)
    assert (told["outcome"], told["committed"], told["digests_of_those_that_finished"]) == ("finished", 1, 1)
    assert told["over_ideal_median"] > 0.9, "nothing is faster than its line"


@pytest.mark.hard
def test_a_mesh_in_which_some_die_in_each_round_commits_it_and_nobody_makes_everything_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--peers 64 --group 8 --rounds 1 --policy mean --seed 2 --json"
    told = told_by(FOLDER.parent / "mesh.py", words, monkeypatch, capsys)
    assert (told["committed"], told["aborted"], told["digests_of_those_that_finished"]) == (1, [], 1)
    assert told["killed"] == 3 and told["results_equal_to_the_reference"] == 32
    assert told["over_ideal_median"] < 1.8, "in virtual time, so whatever else the machine does"
