"""examples/gpu_diloco.py as somebody without a GPU tries it: four peers beside one process, by one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rig.waiting import LONG_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpu_diloco.py"


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *words]
    # Four peers with a thread for each core would wait for each other.
    few = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * LONG_S, env=few, check=False)


@pytest.mark.slow
@pytest.mark.hard
def test_four_peers_on_one_machine_learn_beside_one_process_and_end_with_one_model() -> None:
    done = ran("--tiny", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["equal"], "every peer's model is the run's"
    assert [row[0] for row in found["losses"]] == [50, 100, 150]
    first, last = found["losses"][0], found["losses"][-1]
    assert last[1] < first[1] - 0.2 and last[2] < first[2] - 0.2, "both learn"
    assert found["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_large_one_says_that_nothing_was_run() -> None:
    done = ran()
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        "NOT RUN: torch finds no CUDA"
    )
