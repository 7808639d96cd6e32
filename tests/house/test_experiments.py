"""The experiments still run: each of them for a few steps."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

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
        ("exact_steps.py", "--steps 12 --seeds 1 --only 1 2 --lr 6e-3"),
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
