"""Several processes as one peer of a real run: the others see one peer, and it ends with their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from rig.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.forked_peers, pytest.mark.xdist_group("processes")]

SCRIPT = str(Path(__file__).resolve().parents[1] / "rig" / "island_script.py")
RUN = """
[run]
name = "small"
rounds = {rounds}
min_peers = 2
[model]
builtin = ""
[data]
source = ""
[round]
sync_every = 5
chunk_kb = 1
fragments = {fragments}
deadline_s = 300.0
scatter_grace_s = 300.0
round_timeout_s = 600.0
[outer]
schedule = "{schedule}"
[net]
dead_after_s = 300.0
"""


def start_ranks(stage: Any, name: str, mode: str, ranks: int) -> None:
    """Each as torchrun would."""
    before = dict(stage.environ)
    stage.environ |= {"ISLAND_KEY": str(stage.folder / f"{name}.pem")}
    port = next(free_ports())
    for rank in range(ranks):
        if ranks > 1:
            stage.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            stage.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        stage.start(f"{name}.{rank}", [SCRIPT, mode, str(stage.folder / name), "4", stage.url])
    stage.environ = before


def seen(stage: Any, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage.folder / f"{name}.{rank}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("mode", "plain", "fragments", "schedule"),
    [
        ("fsdp", "plain", 1, "blocking"),
        pytest.param("ddp", "plain", 1, "blocking", marks=pytest.mark.hard),
        pytest.param("hsdp", "plain", 1, "blocking", marks=pytest.mark.hard),
        pytest.param("fsdp-bf16", "plain-bf16", 1, "blocking", marks=pytest.mark.hard),
        pytest.param("fsdp", "plain", 1, "overlap", marks=pytest.mark.hard),
        pytest.param("fsdp", "plain", 2, "streaming", marks=pytest.mark.hard),
    ],
)
def test_P1_an_island_and_a_plain_peer_end_with_one_model(
    stage: Any, mode: str, plain: str, fragments: int, schedule: str
) -> None:
    stage.write_run(RUN, rounds=4, fragments=fragments, schedule=schedule)
    stage.coordinate()
    start_ranks(stage, "isle", mode, 2)
    start_ranks(stage, "solo", plain, 1)
    codes = [stage.wait(name) for name in ("isle.0", "isle.1", "solo.0")]
    assert codes == [0, 0, 0], stage.log("isle.0") + stage.log("isle.1") + stage.log("solo.0")
    island, other, solo = seen(stage, "isle"), seen(stage, "isle", 1), seen(stage, "solo")
    assert island["model"] == other["model"] == solo["model"]
    one, two = load_file(stage.folder / "isle.safetensors"), load_file(stage.folder / "solo.safetensors")
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    stage.processes["coordinator"].terminate()
    stage.wait("coordinator")
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())
    rounds = [each for each in stage.events("coordinator") if each["event"] == "committed"]
    assert len(rounds) == 4 * fragments
    if schedule == "blocking":  # both take as many steps, and two ranks read twice the samples in each
        assert {each["tokens"] for each in rounds} == {5 * 3 * 4 * 9}
