"""`make gpu`: it says when nothing was run, and what was found is a table with its goals."""

from __future__ import annotations

import json
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


def test_a_figure_that_falls_short_of_its_goal_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))
    one = {"schedule": "blocking", "dtype": "bf16", "values": 2e9, "gpu_extra_bytes": 1e8}
    arm = {"seconds": 90.0, "losses": [2.0], "peers": 4, "equal": True}
    rows = [
        {"compiled": each, "rows": 8, "tokens_per_s": 1e5, "tflops": 500.0 - 200 * each}
        for each in (False, True)
    ]
    found: dict[str, Any] = {
        "env": {"device": "NVIDIA H200", "torch": "2", "cuda": "13", "when": "today"},
        "tests": {"told": "3 passed", "passed": True},
        "step": {"extra_ms": 0.05, "syncs": 0},
        "freezing": {"rows": [{**one, "freeze_s": 0.5, "load_s": 0.9}]},
        "builtin": {"values": 3.5e8, "rows": rows},
        "alone": {"alone": {"held_out": 1.2}},
        "four": {"run": {**arm, "held_out": 1.25}},
    }
    for name, figures in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(figures))
    figured = gpu["Figured"](tmp_path)
    figured.states["codecs"] = "cut off after 60 s"
    figured.write_table()
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "NVIDIA H200, torch 2, CUDA 13, today"
    for line in (
        "| freeze, blocking bf16, 2000 million | 0.50 s | 0.60 s |  |",
        "| load, blocking bf16, 2000 million | 0.90 s | 0.80 s | short of it |",
        "| 350.0 million values in bf16 | 100,000 tokens/s, 500 TFLOP/s with 8 rows | 445 TFLOP/s |  |",
        "| 350.0 million values in bf16, compiled | 100,000 tokens/s, 300 TFLOP/s with 8 rows | 445 TFLOP/s | "
        "short of it |",
        "| 4 peers end with one model | 90 s, 1 rounds | equal |  |",
        "| held-out loss, 4 peers beside one process | 1.2500 beside 1.2000: +4.2 % | +3.3 % | short of it |",
        "| codecs | cut off after 60 s |  | short of it |",
    ):
        assert line in lines, line
    assert [good for *_, good in figured.rows()].count(False) == 4
