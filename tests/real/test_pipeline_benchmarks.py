"""Benchmarks of pipelines still run: each for a moment, with as little as shows something.

What they print on a machine of their own stands in docs/; here only what no load can change is looked at.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import beside
import beside_lab
import pipeline
import pipeline_wan
import pytest

from rig.lab.emulator import Lab
from rig.nursery import Nursery
from rig.waiting import LONG_S

pytestmark = pytest.mark.slow

COORDINATOR = Path(__file__).resolve().parents[2] / "benchmarks" / "coordinator.py"


@pytest.mark.hard
def test_beside_torch_the_same_is_learned(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "Nursery", lambda folder: contextlib.nullcontext(nursery))
    words = ["--runs", "1", "--batches", "1", "--micros", "4", "--pause-ms", "0", "--no-deaths"]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "beside", *words])
    assert pipeline.main() == 0, capsys.readouterr().out  # 1: the losses differ
    told = capsys.readouterr().out
    [cells] = re.findall(r"^\| 4 \|(.*)\|$", told, re.MULTILINE)
    figures = [float(cell) for cell in cells.split("|")]
    assert len(figures) == 8 and min(figures) > 0 and "THE LOSSES DIFFER" not in told


@pytest.mark.hard
def test_beside_torch_who_loses_somebody_ends_or_commits(nursery: Nursery) -> None:
    *theirs, ours = beside.deaths(beside.Asked(batches=2, micros=(4,), hangs_s=3.0), nursery)
    assert len(theirs) == 2
    for line in theirs:
        assert len(re.findall(r"rank [02] (?:ends with code 1|hangs)", line)) == 2, line
    assert "every microbatch counts once" in ours


def test_losses_that_differ_are_noticed() -> None:
    same, other = beside.Turn([1.0], 2.5), beside.Turn([1.0], 2.51)
    assert beside.alike({"farflung": same, "GPipe": same})
    assert not beside.alike({"farflung": same, "GPipe": other})


@pytest.fixture
def lab_can_be() -> None:
    if (reason := Lab.unavailable()) is not None:
        pytest.skip(reason)


@pytest.mark.hard
@pytest.mark.usefixtures("lab_can_be")
def test_beside_hivemind_where_that_does_not_run_the_row_says_why(nursery: Nursery, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no hivemind here' >&2\nexit 1\n")
    python.chmod(0o755)
    asked = beside_lab.Asked(str(python), rtt_ms=10, crossing_kb=64, micros=12, batches=1)
    _, told = beside_lab.beside_lab(asked, nursery)
    [rate] = re.findall(r"^\| ([\d.]+) \| does not run here: no hivemind here \|", told, re.MULTILINE)
    assert float(rate) > 0


FAR = pipeline_wan.Asked(mbit=100, rtt_ms=10, batch=24, batches=1, crossing_kb=512, state_mb=1)


@pytest.mark.hard
@pytest.mark.usefixtures("lab_can_be")
def test_far_stages_use_the_line_of_the_middle_one(nursery: Nursery) -> None:
    _, told = pipeline_wan.line_row(FAR, nursery)
    [(up, down, full)] = re.findall(r"\| (\d+) % up, (\d+) % down .* (\d+) % without", told)
    assert all(20 <= int(each) <= 101 for each in (up, down, full)), told


@pytest.mark.hard
@pytest.mark.usefixtures("lab_can_be")
def test_far_stages_have_a_round_right_after_crossings_and_one_after_hardly_any(nursery: Nursery) -> None:
    _, told = pipeline_wan.round_row(FAR, nursery)
    [(beside_s, alone_s)] = re.findall(r"\| ([\d.]+) s; ([\d.]+) s after crossings of 1 kB", told)
    # Each of the two sends half of its sums and half of the result, over a line of 100 Mbit/s.
    assert float(beside_s) > 0.08 and float(alone_s) > 0.08, told


@pytest.mark.hard
def test_a_coordinator_of_stages_seats_everybody() -> None:
    words = ["--members", "6", "--seconds", "1", "--stages", "3"]
    ran = subprocess.run(
        [sys.executable, str(COORDINATOR), *words], capture_output=True, text=True, timeout=LONG_S
    )
    assert ran.returncode == 0, ran.stderr
    assert "seats in 3 stages: 6 of 6, 2 to 2 a stage; 6 ever; goal all: yes" in ran.stdout, ran.stdout
    assert re.search(r"in 3 stages: from beat to tick: p50 \d+ ms", ran.stdout), ran.stdout
    [table] = re.findall(r"at most ([\d.]+) KB; (\d+) tables", ran.stdout)
    assert float(table[0]) > 0 and int(table[1]) >= 6
