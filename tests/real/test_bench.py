"""`farflung bench allreduce` and benchmarks/stages.py as people call them: real processes over encrypted loopback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rig.ports import free_ports
from rig.waiting import LONG_S, is_running

pytestmark = pytest.mark.slow

STAGES = Path(__file__).resolve().parents[2] / "benchmarks" / "stages.py"
SMALL = ["--mb", "1", "--rounds", "3"]


def bench(stage: Any, *words: str) -> dict[str, Any]:
    done = stage.call("bench", "allreduce", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.hard
@pytest.mark.forked_peers
@pytest.mark.parametrize("fraction", [1.5])  # 0.5 over a long line: tests/lab
def test_P3_a_death_in_the_middle_costs_no_round(stage: Any, fraction: float) -> None:
    found = bench(stage, "--peers", "3", *SMALL, "--rounds", "20", "--kill-at", str(fraction))
    killed = found["killed"]
    assert killed["at"] >= fraction and killed["survivors"] == 2 and killed["round"] >= 10
    assert killed["seconds"] > 0 and found["aborted_rounds"] == 0
    assert found["identical"] and found["rel_error"] < 1e-5 and len(found["seconds"]) == 19


@pytest.mark.forked_peers
def test_P1_a_host_joins_the_one_that_serves_and_both_end_with_the_same_bytes_and_the_mean(
    stage: Any,
) -> None:
    server, url = serve(stage)
    joined = stage.call("bench", "allreduce", "--join", url)
    assert joined.returncode == 0, joined.stderr
    assert stage.wait("server") == 0, stage.log("server")
    found = json.loads(server.stdout.read().splitlines()[-1])
    assert found["identical"] and found["peers"] == 2 and 0 < found["rel_error"] < 0.05
    assert len(found["seconds"]) == 3 and found["aborted_rounds"] == 0
    # Each peer sends half of its own vector and half of the result, in one byte a value.
    # What was late may be asked for, and sent, once more; four bytes a value would be a million.
    assert 250_000 < found["tx_bytes_per_peer"] < 600_000
    # From its own plan on: what the other one, which heard of the round before, sent until then is not in it.
    assert 100_000 < found["rx_bytes_per_peer"] < 600_000


def serve(stage: Any) -> tuple[subprocess.Popen[str], str]:
    """At the first three ports in a row that are free, and still are when the server takes them."""
    for port in free_ports(3):
        words = [
            "bench",
            "allreduce",
            "--serve",
            f"127.0.0.1:{port}",
            "--peers",
            "2",
            *SMALL,
            "--codec",
            "int8",
        ]
        server = stage.start("server", words, stdout=subprocess.PIPE)
        if line := server.stdout.readline():
            return server, json.loads(line)["url"]
        assert "cannot listen" in stage.log("server"), stage.log("server")
        server.stdout.close()
    raise AssertionError("no three free ports in a row")


def test_ctrl_c_leaves_no_process_behind(stage: Any) -> None:
    process = stage.start("bench", ["bench", "allreduce", "--peers", "2", "--mb", "8", "--rounds", "10000"])
    # Coordinator, two trainers, two agents.
    stage.eventually(lambda: len(descendants(process.pid)) >= 5, "all its processes are there")
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert stage.wait("bench") == 130
    stage.eventually(lambda: not any(map(is_running, children)), "all its processes have ended")
    assert "Traceback" not in stage.log("bench")


@pytest.mark.hard
def test_P14_batches_of_a_model_in_stages_with_a_death_in_one_of_them(stage: Any) -> None:
    words = ("--stages", "2", "--seats", "2", "--unit-ms", "10", "--batch", "48", "--batches", "3")
    done = subprocess.run(
        [sys.executable, str(STAGES), *words, "--kill-at", "scatter", "--json"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["batches"] == 3 and 0 < found["of_ideal"] < 1
    # By what is committed, and by what the trainers see in the merged sums.
    assert found["counted_once"] and found["proven_by_sums"] >= 4
    assert [death["moment"] for death in found["deaths"]] == ["scatter"]
    for death in found["deaths"]:
        assert death["twice"] == death["share"] and not death["twice_elsewhere"], found["deaths"]


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def test_a_wrong_option_is_one_line_and_exit_code_2(say: Callable[..., tuple[int, str, str]]) -> None:
    for words in (["--peers", "1"], ["--codec", "zip"], ["--serve", "nonsense"], ["--join", "nonsense"]):
        code, _, told = say("bench", "allreduce", *words)
        assert code == 2 and told.count("\n") == 1, told
