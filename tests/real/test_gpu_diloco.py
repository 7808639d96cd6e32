"""make gpu as somebody without a GPU tries it: its steps, and four peers beside one process, by one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rig.waiting import LONG_S

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "learning" / "gpu_diloco.py"


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    # Four peers with a thread for each core would wait for each other.
    few = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * LONG_S, env=few, check=False)


@pytest.mark.slow
@pytest.mark.hard
def test_four_peers_on_one_machine_learn_beside_one_process_and_end_with_one_model() -> None:
    done = ran("--tiny", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    run, alone = found["run"], found["alone"]
    assert run["equal"] and run["peers"] == 4
    for arm in (run, alone):
        assert len(arm["losses"]) == 3 and arm["losses"][2] < arm["losses"][0] - 0.2, "both learn"
    assert found["steps"] * found["batch"] * 64 > alone["text_bytes"], "more than one epoch, as on a GPU"
    assert alone["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
@pytest.mark.hard
def test_a_peer_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    """Else three of four would wait for it, and the time of a GPU is gone."""
    peer = tmp_path / "gpu_diloco_peer.py"
    peer.write_text("import sys, time\nif 'peer-1' in sys.argv[3]: sys.exit(3)\ntime.sleep(600)\n")
    driver = SCRIPT.read_text().replace('Path(__file__).with_name("gpu_diloco_peer.py")', f'Path("{peer}")')
    (tmp_path / "driver.py").write_text(driver)
    words = [sys.executable, str(tmp_path / "driver.py"), "--tiny", "--arm", "run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 1 and "a process of the run failed" in done.stderr


@pytest.mark.slow
@pytest.mark.hard
def test_steps_of_make_gpu_run_on_a_cpu_and_what_is_cut_off_takes_nothing_from_the_others(
    tmp_path: Path,
) -> None:
    gpu = SCRIPT.parents[1] / "gpu.py"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(gpu), "--tiny", "--out", str(tmp_path / "figures"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=3 * LONG_S, check=False)

    done = run("--only", "env,step,freezing,builtin,alone")
    assert done.returncode in (0, 1), done.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "figures").glob("*.json")}
    assert set(found) == {"env", "step", "freezing", "builtin", "alone"}, done.stdout
    assert found["env"]["device"] == "a CPU" and len(found["builtin"]["rows"]) == 4
    # Shorter than torch's import and some steps take anywhere; what ran before is left as it was.
    late = run("--only", "alone", "--deadline", "3")
    table = (tmp_path / "figures" / "table.md").read_text()
    assert (
        late.returncode == 1 and "alone: cut off after" in late.stdout and "| alone | cut off after" in table
    )
    assert (tmp_path / "figures" / "env.json").exists() and not (tmp_path / "figures" / "alone.json").exists()
    assert run("--only", "nothing").returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_large_one_says_that_nothing_was_run() -> None:
    done = ran()
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(
        "NOT RUN: torch finds no CUDA"
    )
