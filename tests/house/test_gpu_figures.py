"""`make gpu`: it says when nothing was run, and what was found is a table with its goals."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_plainly_that_nothing_was_run(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gpu.py")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 2 and done.stderr.startswith("NOT RUN: no test, no benchmark and no codec")
    assert not list(tmp_path.iterdir()), "no table of nothing"


def test_a_figure_that_falls_short_of_its_goal_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))
    one = {"schedule": "blocking", "dtype": "bf16", "values": 2e9, "gpu_extra_bytes": 1e8}
    found: dict[str, Any] = {
        "device": "a card",
        "torch": "2",
        "cuda": "13",
        "tests": {"told": "3 passed", "passed": True},
        "codecs": {"told": "exit code 0", "passed": True},
        "run": {"held_out": [1.25, 1.2], "equal": True},
        "step": {"extra_ms": 0.05},
        "syncs": 0,
        "freezing": [{**one, "freeze_s": 0.5, "load_s": 0.9}],
    }
    lines = gpu["table"](found).splitlines()
    assert "| freeze, blocking bf16, 2000 million | 0.50 s | 0.60 s |  |" in lines
    assert any("| 1.250 and 1.200 of one process | equal on all peers |  |" in each for each in lines)
    assert "| load, blocking bf16, 2000 million | 0.90 s | 0.80 s | short of it |" in lines
    assert [good for *_, good in gpu["rows_of"](found)].count(False) == 1
