"""Phone books of five real nodes on loopback: what is put is found by its key, and what is forged or old is not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "phonebook.py"


@pytest.mark.hard
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hivemind") is None, reason="NOT RUN: hivemind is not installed")
def test_five_real_nodes_keep_a_runs_record_and_nobody_elses() -> None:
    """How fast a find is, is for a machine of its own: `python benchmarks/phonebook.py`."""
    words = [sys.executable, str(BENCHMARK), "--finds", "5", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    figures = json.loads(ended.stdout or "{}")
    assert figures, ended.stderr
    assert figures["forged"] == 4 and figures["forged_believed"] == 0 and figures["forged_taken"] == 0, (
        figures
    )
    assert figures["by_name"] == 1
