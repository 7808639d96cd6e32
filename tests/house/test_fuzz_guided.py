"""Fuzzing guided by coverage, for seconds: benchmarks/fuzz_guided.py is the long run (`make fuzz`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz_guided.py"


@pytest.mark.hard
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine"
)
def test_P8_what_guided_fuzzing_finds_in_seconds_ends_in_words() -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "5", "bulk", "member"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("| ok |")]
    assert len(rows) == 2 and all(int(row.split("|")[2].replace(",", "")) > 100 for row in rows)
