"""Several processes as one peer of a real run: the others see one peer, and it ends with their model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from rig.ports import free_ports
from rig.waiting import is_running

pytestmark = [pytest.mark.slow, pytest.mark.forked_peers]

SCRIPT = str(Path(__file__).resolve().parents[1] / "rig" / "island_script.py")
RUN = """
[run]
name = "small"
rounds = {rounds}
min_peers = 2
[model]
kind = ""
[data]
source = ""
[round]
sync_every = 5
chunk_kb = 1
fragments = {fragments}
deadline_s = 300.0
scatter_grace_s = 300.0
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
        pytest.param("ep-same", "plain-ep", 1, "blocking", marks=pytest.mark.hard),
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
    # With several fragments one may be a round further when the last one is done.
    assert len(rounds) == 4 if fragments == 1 else len(rounds) >= 4 * fragments
    if (
        schedule == "blocking"
    ):  # of two ranks each reads samples of its own in a step, unless they share experts
        batches = 2 if "ep" in mode.split("-") else 3
        assert all(5 * 4 * 9 < each["tokens"] <= 5 * batches * 4 * 9 for each in rounds)


# What `farflung join` starts: a line of plan.txt says how many ranks, forked from here, where torch is imported, and at
# which failpoint rank 1 dies.  They end together.
LAUNCHER = """
import os, pathlib, runpy, signal, socket, sys
here = pathlib.Path({folder!r})
line, *left = (here / "plan.txt").read_text().splitlines()
(here / "plan.txt").write_text("\\n".join(left or [line]))
count, failpoint = line.split()
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
children = set()
for rank in range(int(count)):
    pid = os.fork()
    if pid == 0:
        if count != "1":
            os.environ |= dict(RANK=str(rank), WORLD_SIZE=count, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if rank == 1 and "=" in failpoint:
            os.environ["FARFLUNG_FAILPOINTS"] = failpoint
        with open(here / "pids.txt", "a") as file:
            file.write(f"{{os.getpid()}}\\n")
        sys.argv = [{script!r}, {mode!r}, str(here / "isle"), "4"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    children.add(pid)
code = 0
while children:
    pid, status = os.wait()
    children.discard(pid)
    code = code or abs(os.waitstatus_to_exitcode(status))
    for other in children if code else ():
        os.kill(other, signal.SIGKILL)
sys.exit(1 if code else 0)
"""


def frozen(stage: Any, name: str) -> int:
    return sum(each["event"] == "frozen" for each in stage.events(name))


@pytest.mark.hard
@pytest.mark.parametrize("mode", ["fsdp-nodes", "ddp"])
def test_P6_ranks_that_die_go_on_from_memory_as_three_two_or_one(stage: Any, mode: str) -> None:
    """Rank 1 is killed in the midst of a period, and at both places of a freeze; no byte of state comes from others.

    Of two ranks it may be on another node, and dies with its part of what is frozen not sent to the first.
    """
    stage.write_run(RUN, rounds=1_000_000, fragments=1, schedule="blocking")
    stage.coordinate()
    launcher = stage.folder / "launcher.py"
    launcher.write_text(LAUNCHER.format(folder=str(stage.folder), script=SCRIPT, mode=mode))
    plan = ["2 -", "2 freeze.mid=kill@2", "3 freeze.before_word=kill@2", "1 -"]
    (stage.folder / "plan.txt").write_text("\n".join(plan))
    stage.join("isle", "--script", str(launcher))
    start_ranks(stage, "solo", "plain", 1)
    stage.eventually(lambda: frozen(stage, "isle") >= 2, "both take part")
    pieces = pieces_of(stage)
    os.kill(int((stage.folder / "isle.pid.1").read_text()), signal.SIGKILL)
    stage.eventually(lambda: attached(stage) == len(plan), "they have died three times and are there again")
    *dead, _ = map(int, (stage.folder / "pids.txt").read_text().split())
    assert len(dead) == 2 + 2 + 3 and not any(map(is_running, dead))
    now = frozen(stage, "isle")
    stage.eventually(lambda: frozen(stage, "isle") >= now + 3, "one process goes on")
    assert pieces_of(stage) == pieces, "the state was in memory"
    for name in ("isle", "solo.0", "coordinator"):
        stage.processes[name].send_signal(signal.SIGINT if name == "isle" else signal.SIGTERM)
        stage.wait(name)
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


def attached(stage: Any) -> int:
    return sum("trainer_pid" in each for each in stage.events("isle"))


def pieces_of(stage: Any) -> int:
    """Chunks of the run's state that came from other peers."""
    return sum(each["event"] == "piece" for each in stage.events("isle"))


@pytest.mark.hard
def test_ranks_of_join_are_started_again_when_one_dies(stage: Any) -> None:
    stage.write_run(
        RUN.replace("min_peers = 2", "min_peers = 1"), rounds=1_000_000, fragments=1, schedule="blocking"
    )
    stage.coordinate()
    words = [
        "join",
        "--identity",
        str(stage.folder / "isle.pem"),
        "--nproc",
        "2",
        "--script",
        SCRIPT,
        stage.url,
    ]
    stage.start("isle", [*words, "ddp", str(stage.folder / "isle"), "4"])
    stage.eventually(lambda: frozen(stage, "isle") >= 2, "it takes part")
    first = stage.trainer_of("isle")
    children = [pid for pid in ranks_of(stage) if pid != first]
    assert len(children) == 1
    os.kill(children[0], signal.SIGKILL)
    stage.until_log("isle", "starts again from the anchor")
    stage.eventually(lambda: stage.trainer_of("isle") != first, "its next ranks are there")
    assert not is_running(first) and len(ranks_of(stage)) == 2
    now = frozen(stage, "isle")
    stage.eventually(lambda: frozen(stage, "isle") >= now + 2, "they go on")
    stage.processes["isle"].send_signal(signal.SIGINT)
    assert stage.wait("isle") == 0
    assert seen(stage, "isle")["model"] == seen(stage, "isle", 1)["model"]


def ranks_of(stage: Any) -> list[int]:
    found = []
    for file in stage.folder.glob("isle.pid.*"):
        pid = int(file.read_text())
        found += [pid] if is_running(pid) else []
    return found


def start_torchrun(stage: Any, name: str, mode: str, *more: str) -> Any:
    before = dict(stage.environ)
    stage.environ |= {"ISLAND_KEY": str(stage.folder / f"{name}.pem")}
    # Else this torch's ranks look for each other, once started again, where they were before.
    stage.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *more]
    launcher = stage.run_python(name, [*words, SCRIPT, mode, str(stage.folder / name), "4", stage.url])
    stage.environ = before
    return launcher


@pytest.mark.hard
def test_ranks_of_a_plain_torchrun_are_one_peer_and_are_gone_when_it_is(stage: Any) -> None:
    """One of them dies, and torchrun starts them again; then one hangs, torchrun is killed and started anew."""
    stage.write_run(
        RUN.replace("min_peers = 2", "min_peers = 1"), rounds=1_000_000, fragments=1, schedule="blocking"
    )
    stage.coordinate()
    launcher = start_torchrun(stage, "isle", "ddp-die", "--max-restarts", "1")
    stage.eventually(
        lambda: attached(stage) == 2 and frozen(stage, "isle") >= 2, "its second life takes part"
    )
    ranks = ranks_of(stage)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGSTOP)
    launcher.kill()
    stage.wait("isle")
    stage.eventually(lambda: not any(map(is_running, ranks)), "they have gone with it")
    start_torchrun(stage, "isle", "ddp")  # nobody is left who has the run's state
    stage.eventually(lambda: attached(stage) == 3, "the next ones have the same key, and are let in")


# A node of its own, as far as memory goes: nobody else sees its /dev/shm.
NODE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for failed in (
    libc.unshare(0x20000),
    libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None),
    libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None),
):
    if failed:
        sys.exit(os.strerror(ctypes.get_errno()))
if len(sys.argv) > 1:
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *sys.argv[1:]])
"""


def start_nodes(stage: Any, name: str, mode: str) -> list[str]:
    before = dict(stage.environ)
    stage.environ |= {"ISLAND_KEY": str(stage.folder / f"{name}.pem"), "GLOO_SOCKET_IFNAME": "lo"}
    port = str(next(free_ports()))
    names = [f"{name}.node{number}" for number in range(2)]
    for number, node in enumerate(names):
        words = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "2"]
        words += ["--master-addr", "127.0.0.1", "--master-port", port]
        script = [SCRIPT, mode, str(stage.folder / name), "4", stage.url]
        stage.run_python(node, ["-c", NODE, *words, *script])
    stage.environ = before
    return names


@pytest.mark.hard
def test_P1_an_island_of_two_nodes_and_a_plain_peer_end_with_one_model(stage: Any) -> None:
    """Flat FSDP: half of the model lies where there is no way to the agent's memory."""
    if subprocess.run([sys.executable, "-c", NODE], capture_output=True).returncode:
        pytest.skip("a node of its own needs a mount namespace, which this user may not make")
    stage.write_run(RUN, rounds=4, fragments=1, schedule="blocking")
    stage.coordinate()
    nodes = start_nodes(stage, "isle", "fsdp")
    start_ranks(stage, "solo", "plain", 1)
    codes = [stage.wait(name) for name in (*nodes, "solo.0")]
    assert codes == [0, 0, 0], "".join(map(stage.log, (*nodes, "solo.0")))
    found = [seen(stage, "isle", rank) for rank in range(4)]
    assert [each["near"] for each in found] == [[0, 1]] * 4
    assert {each["model"] for each in found} == {seen(stage, "solo")["model"]}
    one, two = load_file(stage.folder / "isle.safetensors"), load_file(stage.folder / "solo.safetensors")
    assert one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)
    stage.processes["coordinator"].terminate()
    stage.wait("coordinator")
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())
