"""`make demo-pipeline`: all that it promises holds, and it says so by its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hard,
]

DEMO = Path(__file__).resolve().parents[2] / "benchmarks" / "demo_pipeline.py"


def test_a_stage_that_loses_a_peer_is_refilled_and_the_model_is_that_of_one_process(tmp_path: Path) -> None:
    words = [sys.executable, str(DEMO), "--keep", str(tmp_path / "kept")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=400, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "FAILED" not in ran.stdout and ran.stdout.count("\nok ") == 6
    assert "has one peer left: " in ran.stdout and "joined from 3 stages" in ran.stdout
