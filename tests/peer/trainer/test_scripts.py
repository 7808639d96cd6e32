"""Training scripts as processes: the built-in one beside an agent, and scripts whose agent fails them.

The agent is played by the test, over the real channel and real shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from farflung.peer.builtin.llama import Llama
from farflung.peer.local.channel import LocalServer
from farflung.peer.local.folder import make_folder, remove_folder
from farflung.peer.local.words import (
    Bye,
    Computed,
    FromTrainer,
    Frozen,
    Loaded,
    NeedSamples,
    Stop,
)
from farflung.peer.settings import OwnConfig
from farflung.peer.trainer import agent_process
from farflung.peer.trainer.agent_process import AgentProcess
from farflung.peer.trainer.api import connect, join
from farflung.protocol.errors import Refused, Unreachable, UserError
from farflung.protocol.join_url import JoinUrl
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.process.exit_codes import (
    MISMATCH,
    OK,
    REFUSED,
    TEMPORARY,
    UNEXPECTED,
    UNREACHABLE,
    USAGE,
    code_for,
)
from rig.lonely_agent import LonelyAgent, close_all
from rig.nursery import Child, Nursery
from rig.waiting import PATIENCE_S, eventually

URL = str(JoinUrl("coordinator.example", 7700, "my-run", bytes(32)))


def manifest(**sections: dict[str, object]) -> Manifest:
    small = {"round": {"sync_every": 4, "chunk_kb": 16}, "model": {"layers": 1, "width": 16, "heads": 2}}
    return Manifest.model_validate({**small, **sections})


@pytest.fixture(autouse=True)
def agents_that_a_failed_test_left() -> Iterator[None]:
    """An open socket that nobody has would hold up whichever test comes when it is collected."""
    yield
    close_all()


BUILT_IN = ("-m", "farflung.peer.builtin.trainer")


def trainer(nursery: Nursery, folder: Path, *words: str) -> Child:
    """Forked: torch is imported."""
    pipes = (subprocess.PIPE, subprocess.PIPE)
    return nursery.popen(words, {"FARFLUNG_AGENT": str(folder)}, *pipes)


def fresh_trainer(folder: Path, *words: str) -> subprocess.Popen[str]:
    """An interpreter of its own."""
    environment = {**os.environ, "FARFLUNG_AGENT": str(folder)}
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *words], env=environment, text=True, **pipes)


@pytest.mark.slow
def test_the_built_in_trainer_trains_until_the_run_is_finished(tmp_path: Path) -> None:
    run = manifest(data={"batch": 2, "lease_samples": 16})
    agent = LonelyAgent(run, rounds=3)
    out = tmp_path / "weights.safetensors"
    process = fresh_trainer(agent.folder, *BUILT_IN, "--out", str(out))
    agent.serve(process, last=Bye(reason="finished"))
    printed, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, printed, said.count("\n")) == (0, "", 1)
    assert said.startswith("farflung: memory: about ") and "free" in said, "whether it fits, before it trains"
    frozen = [m for m in agent.heard if isinstance(m, Frozen)]
    assert [(f.steps, f.tokens) for f in frozen] == [(4, 4 * 2 * 65)] * 3
    assert [f.used[-1].upto for f in frozen] == [8, 16, 24]
    losses = [f.loss for f in frozen]
    assert all(loss is not None and 4.0 < loss < 6.0 for loss in losses)
    assert losses[-1] < losses[0]  # type: ignore[operator]
    assert sum(isinstance(m, Loaded) for m in agent.heard) == 4
    assert agent.heard[-1] == Bye(reason="finished")
    assert agent.shared is not None
    weights = load_file(out)
    Llama(ModelSection(layers=1, width=16, heads=2)).load_state_dict(weights)
    assert torch.equal(weights["model.embed_tokens.weight"].flatten(), agent.shared.anchor[: 256 * 16])
    agent.close()


@pytest.mark.slow
def test_mistakes_are_one_line_and_an_exit_code(nursery: Nursery) -> None:
    agent = LonelyAgent(manifest(model={"kind": ""}), rounds=1)
    process = trainer(nursery, agent.folder, *BUILT_IN)
    agent.serve(process)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == USAGE
    assert said == (
        "farflung: run 'my-run' brings its own model or data: join it with its training script, "
        "which calls farflung.join or farflung.pipeline\n"
    )
    # It says nothing: its agent sees the exit code, does not start it again, and ends with the same code.
    heard = list(agent.heard)
    agent.close()
    assert heard == []


SCRIPT = """
import torch, farflung
model = torch.nn.Linear(2, 2)
run = farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in run.batches([torch.ones(2)] * 1000):
    loss = model(batch).sum()
    loss.backward()
    run.step(loss)
    if run.step_count == 3:
        {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("raise SystemExit", Bye(reason="the training script ended")),  # also without close()
        ("raise ZeroDivisionError", Loaded(version=0)),  # says nothing: its agent starts it again
    ],
)
def test_a_script_that_ends_leaves_and_one_that_crashes_may_come_back(
    nursery: Nursery, end: str, last: FromTrainer
) -> None:
    agent = LonelyAgent(manifest(data={"batch": 2, "lease_samples": 16}), rounds=9)
    process = trainer(nursery, agent.folder, "-c", SCRIPT.format(end=end))
    agent.serve(process, last=last)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (1 if "Zero" in end else 0)
    words = [m for m in agent.heard if not isinstance(m, NeedSamples | Computed)]
    assert words[-1] == last
    agent.close()


@pytest.mark.slow
def test_weights_that_a_script_loads_after_joining_are_refused_and_not_sent(nursery: Nursery) -> None:
    agent = LonelyAgent(manifest(data={"batch": 2, "lease_samples": 16}), rounds=9)
    process = trainer(
        nursery, agent.folder, "-c", SCRIPT.format(end="model.load_state_dict(model.state_dict())")
    )
    agent.serve(process, last=Loaded(version=0))
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and "as if they had been learned" in said, said
    assert not any(isinstance(word, Frozen) for word in agent.heard)
    agent.close()


WITH_WORKERS = """
import torch, farflung
from torch.utils.data import DataLoader, IterableDataset
model = torch.nn.Linear(2, 2)
run = farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1))
class Leased(IterableDataset):
    def __init__(self, run):
        self.run = run
    def __iter__(self):
        return self.run.batches([torch.ones(2)] * 1000)
torch.multiprocessing.set_start_method("{method}")
for batch in DataLoader(Leased(run), batch_size=None, num_workers=1):
    model(batch).sum().backward()
    run.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.hard)])
def test_run_batches_in_a_worker_of_a_data_loader_is_refused_where_it_would_wait_for_ever(
    method: str,
) -> None:
    agent = LonelyAgent(manifest(data={"batch": 2, "lease_samples": 16}), rounds=9)
    process = fresh_trainer(agent.folder, "-c", WITH_WORKERS.format(method=method))
    agent.serve(process)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and "num_workers=0" in said, said
    assert not any(isinstance(word, NeedSamples | Bye) for word in agent.heard), (
        "only the worker asked, or said good-bye"
    )
    agent.close()


# ---- an agent of the script's own


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program that is started where the agent should be."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "$@" > "{folder}/arguments"\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setattr(agent_process.sys, "executable", str(program))
    monkeypatch.setattr(agent_process, "check", lambda *_: None)  # nobody is at that URL
    monkeypatch.setenv("FARFLUNG_HOME", str(folder))
    monkeypatch.chdir(folder)
    monkeypatch.delenv(agent_process.AGENT_VARIABLE, raising=False)
    monkeypatch.delenv(agent_process.RUN_VARIABLE, raising=False)


def test_an_agent_that_dies_at_once_is_told_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exit 3")
    model = nn.Linear(2, 2)
    with pytest.raises(Refused, match="ended with exit code 3") as caught:
        join(URL, model, torch.optim.SGD(model.parameters()), identity="me.key", listen="0.0.0.0:9")
    assert caught.value.code == "agent"
    told = (tmp_path / "arguments").read_text().split()
    folder = Path(told[told.index("--folder") + 1])
    assert told == [
        "-m", "farflung.peer.agent.main", "--url", URL, "--folder", str(folder), "--parent", str(os.getpid()),
        "--settings", *OwnConfig(Path("me.key"), "0.0.0.0:9").as_json().split(),
    ]  # fmt: skip
    assert not folder.exists()


def test_an_agent_that_does_not_leave_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(agent_process, "LEAVE_S", 0.1)
    monkeypatch.setenv(agent_process.RUN_VARIABLE, URL)
    agent = AgentProcess.start_or_find(None, {})
    assert agent.problem() is None
    agent.close("enough")
    assert agent.problem() is not None
    agent.close("again")  # does no harm


def test_a_stop_while_connecting_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder()
    server = LocalServer(folder)
    monkeypatch.setenv(agent_process.AGENT_VARIABLE, str(folder))
    agent = AgentProcess.start_or_find(None, {})
    eventually(server.recv_nowait, "the trainer knocks")
    server.send(Stop(code="full", reason="the run is full: 2 peers"))
    with pytest.raises(Refused, match="the run is full"):
        agent.wait_for_begin()
    agent.close("")
    server.close()
    remove_folder(folder)


def test_without_a_run_or_an_agent_there_is_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(UserError, match="set FARFLUNG_RUN"):
        connect()
    with pytest.raises(UserError, match="does not start with farflung://"):
        connect("http://example")
    monkeypatch.setenv(agent_process.AGENT_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(UserError, match="no agent is there"):
        connect()


def test_one_rank_of_several_is_refused_before_an_agent_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = nn.Linear(2, 2)
    for folder in (None, str(tmp_path)):  # nor under `farflung join`
        if folder:
            monkeypatch.setenv(agent_process.AGENT_VARIABLE, folder)
        with pytest.raises(UserError, match="one of 8 processes .*part is for one process"):
            connect(URL)
        with pytest.raises(UserError, match="call torch.distributed.init_process_group"):
            join(URL, model, torch.optim.SGD(model.parameters()))
    assert not (tmp_path / "arguments").exists()


def test_a_worker_of_a_data_loader_is_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    with pytest.raises(UserError, match="can't be joined from a DataLoader's worker: call farflung.join or"):
        connect(URL)
    assert not (tmp_path / "arguments").exists()


def test_a_process_group_of_several_is_refused_and_one_of_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "exit 3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="one of 2 processes"):
        connect(URL)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.raises(Refused, match="exit code 3"):
        connect(URL)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x"), USAGE),
        (Refused("model", "x"), MISMATCH),
        (Refused("manifest", "x"), MISMATCH),
        (Refused("protocol", "x"), MISMATCH),
        (Refused("banned", "x"), REFUSED),
        (Refused("full", "x", retry_after_s=30.0), TEMPORARY),
        (Refused("left", "x"), OK),
        (Refused("agent", "x"), UNEXPECTED),
        (Unreachable("x"), UNREACHABLE),
        (RuntimeError("x"), UNEXPECTED),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int) -> None:
    assert code_for(error) == code


PIPELINE = """
import torch, farflung
from torch import nn
rows = [(torch.ones(2), 1)] * 64
loss = lambda logits, riders: nn.functional.cross_entropy(logits, riders["kind"])
parts = {parts}
farflung.pipeline(None, parts, data=rows, inputs=("x",), riders=("kind",), loss=loss)
"""


@pytest.mark.slow
@pytest.mark.mode("batches")
@pytest.mark.parametrize(
    ("batch", "code", "words"),
    [
        (4, SCRIPT.format(end="pass"), "join it with farflung.pipeline"),
        (
            0,
            PIPELINE.format(parts="[nn.Linear(2, 2)]"),
            "has no synchronous batches: join it with farflung.join",
        ),
        (4, PIPELINE.format(parts="[nn.Linear(2, 2), nn.Linear(3, 2)]"), "does not take what part 0 gives"),
        (4, PIPELINE.format(parts="[nn.Linear(2, 2).requires_grad_(False)]"), "no trainable parameter"),
    ],
)
def test_what_cannot_take_part_in_batches_is_refused_before_the_run_hears_of_it(
    nursery: Nursery, batch: int, code: str, words: str
) -> None:
    agent = LonelyAgent(manifest(pipeline={"batch": batch}, merge={"policy": "mean"}), rounds=1)
    process = trainer(nursery, agent.folder, "-c", code)
    agent.serve(process)
    _, said = process.communicate(timeout=PATIENCE_S)
    heard = list(agent.heard)
    agent.close()
    assert process.returncode == 2
    assert words in said.splitlines()[-1], said
    assert heard == []
