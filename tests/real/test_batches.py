"""Synchronous batches of real processes: whoever computed what, and whoever was killed, the update is the batch's.

What a run must come to is computed here, in one process, from the run's first values, its order of samples and its
outer step.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.optim.outer import AdamW
from farflung.optim.recipes import outer_of
from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.builtin.llama import Llama
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.pipeline.parts import build as build_part
from farflung.peer.pipeline.parts import seed_of_chance
from farflung.protocol.manifest import Manifest, ModelSection

pytestmark = pytest.mark.slow

BATCH, MICRO, ROUNDS, LR = 16, 2, 5, 0.5
PLAIN, ADAMW = 'step = "mean"\nlr = 0.5', 'step = "adamw"\nlr = 4e-3'
RUN = """
[run]
name = "small"
rounds = {rounds}
min_peers = {min_peers}
[model]
layers = 1
width = 32
heads = 2
context = 32
[data]
batch = 1
[outer]
{outer}
[merge]
policy = "mean"
[round]
chunk_kb = 16
deadline_s = 300.0
scatter_grace_s = 300.0
[net]
heartbeat_s = 0.2
dead_after_s = {dead_after_s}
[pipeline]
batch = 16
micro = 2
"""


def is_finished(status: dict[str, Any]) -> bool:
    return bool(status["phase"] == "finished")


def by_one_process(outer: str) -> dict[str, Tensor]:
    """The same model, batches and step; one microbatch after the other, added up in fp32."""
    torch.set_num_threads(1)
    manifest = Manifest.from_toml(
        RUN.format(rounds=ROUNDS, min_peers=1, dead_after_s=9, outer=outer), "run.toml"
    )
    exact = outer_of(manifest)
    model = Llama(ModelSection(layers=1, width=32, heads=2, context=32))
    windows = ByteWindows(load_corpus().train, 32)
    parameters = dict(model.named_parameters())
    moments = {name: (torch.zeros(p.numel()), torch.zeros(p.numel())) for name, p in parameters.items()}
    for version in range(ROUNDS):
        start, tokens = version * BATCH * MICRO, 0
        sums: dict[str, Tensor] = {}
        for micro in range(BATCH):
            first = start + micro * MICRO
            places = permuted_range(0, 0, len(windows), first, first + MICRO)
            rows = torch.stack([windows[place] for place in places])
            loss = model.loss(rows)
            assert loss is not None
            (loss * rows.numel()).backward()
            tokens += rows.numel()
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
                parameter.grad = None
        with torch.no_grad():
            for name, parameter in parameters.items():
                d_n = (sums[name] / tokens).flatten()
                (m_n, v_n), theta_n = moments[name], parameter.detach().view(-1)
                if isinstance(exact, AdamW):
                    exact.step(theta_n, m_n, v_n, d_n, version + 1)
                else:
                    exact.step(theta_n, m_n, d_n, version + 1)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def differences(path: Path, expected: dict[str, Tensor]) -> float:
    found = load_file(path)
    assert set(found) == set(expected)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def finish(stage: Any, *names: str) -> None:
    stage.until(is_finished, "the run is finished")
    assert [stage.wait(name) for name in names] == [0] * len(names)
    stage.processes["coordinator"].send_signal(signal.SIGTERM)
    assert stage.wait("coordinator") == 0
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


@pytest.mark.forked_peers
@pytest.mark.parametrize(
    "outer", [pytest.param(PLAIN, id="mean", marks=pytest.mark.hard), pytest.param(ADAMW, id="adamw")]
)
def test_one_peer_has_the_bits_of_one_process(stage: Any, outer: str) -> None:
    stage.write_run(RUN, rounds=ROUNDS, min_peers=1, outer=outer)
    stage.coordinate()
    stage.join("ann")
    finish(stage, "ann")
    expected, found = by_one_process(outer), load_file(stage.model("ann"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def check_update(stage: Any, name: str) -> None:
    """Two peers' sums are added in another order than one peer's: that changes some last bits of fp32, no sample."""
    first = Llama(ModelSection(layers=1, width=32, heads=2, context=32)).state_dict()
    expected = by_one_process(PLAIN)
    moved = max(float((expected[name] - first[name]).abs().max()) for name in expected)
    assert differences(stage.model(name), expected) < 1e-5 * moved


@pytest.mark.hard
@pytest.mark.forked_peers
def test_what_a_killed_peer_had_counted_is_computed_again_by_another(stage: Any) -> None:
    stage.write_run(RUN, rounds=ROUNDS, min_peers=1, outer=PLAIN)
    stage.coordinate()
    # It founds the run alone, and stops in the first batch, with six microbatches in its sums.
    stage.environ = {"FARFLUNG_FAILPOINTS": "trainer.step=stop@7"}
    stage.join("bob")
    stage.environ = {}
    stage.eventually(lambda: is_stopped(stage, "bob"), "bob's trainer stops")
    # Its words on the newest ones may not have left it when it stopped; and all microbatches may be granted to it, so
    # that ann adds none before it is killed.
    stage.until(lambda status: status["batch"]["counted"] >= 1, "the coordinator has heard of some")
    stage.join("ann")
    log = stage.folder / "ann.log"
    stage.eventually(lambda: log.exists() and "version 0 is here" in log.read_text(), "ann has the state")
    os.kill(stage.trainer_of("bob"), signal.SIGKILL)
    stage.processes["bob"].kill()
    finish(stage, "ann")
    assert re.search("had counted [1-6] microbatches, which are computed again", stage.log("coordinator"))
    check_update(stage, "ann")


@pytest.mark.forked_peers
def test_two_peers_make_the_update_of_one_also_when_a_trainer_is_killed(stage: Any) -> None:
    stage.write_run(RUN, rounds=ROUNDS, min_peers=2, outer=PLAIN)
    stage.coordinate()
    stage.join("ann")
    stage.environ = {"FARFLUNG_FAILPOINTS": "trainer.step=kill@5"}
    stage.join("bob")
    stage.environ = {}
    finish(stage, "ann", "bob")
    assert "the trainer ended with signal 9; it starts again" in stage.log("bob")
    check_update(stage, "ann")


SCRIPT = """
from functools import partial
from pathlib import Path
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
import farflung

dice = torch.Generator().manual_seed(9)
DATA = TensorDataset(torch.randn(512, 6, generator=dice), torch.randint(3, (512,), generator=dice))
PARTS = [partial(nn.Linear, 6, 8), nn.Tanh, partial(nn.Dropout, 0.2), partial(nn.Linear, 8, 3)]


def loss(logits, riders):
    return F.cross_entropy(logits, riders["kind"])


if __name__ == "__main__":
    model = farflung.pipeline(None, PARTS, data=DATA, inputs=("x",), riders=("kind",), loss=loss)
    assert model(DATA.tensors[0]).shape == (512, 3)
    save_file(model.state_dict(), Path(__file__).with_suffix(".safetensors"))
"""


def by_the_scripts_parts(path: Path, rounds: int) -> dict[str, Tensor]:
    """As one process would train them, with a graph through all parts."""
    script = runpy.run_path(str(path), run_name="script")
    modules = [build_part(part, number, 0) for number, part in enumerate(script["PARTS"])]
    parameters = dict(nn.ModuleList(modules).named_parameters())
    for version in range(rounds):
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for micro in range(BATCH):
            first = (version * BATCH + micro) * MICRO
            items = [script["DATA"][place] for place in permuted_range(0, 0, 512, first, first + MICRO)]
            x = torch.stack([item[0] for item in items])
            for number, module in enumerate(modules):
                torch.manual_seed(seed_of_chance(0, version, micro, number))
                x = module(x)
            (script["loss"](x, {"kind": torch.stack([item[1] for item in items])}) * MICRO).backward()
            for name, parameter in parameters.items():
                sums[name] += parameter.grad if parameter.grad is not None else 0
                parameter.grad = None
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(sums[name] / (BATCH * MICRO) * LR)
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.hard
@pytest.mark.forked_peers
def test_a_script_with_parts_of_its_own_has_the_bits_of_one_process(stage: Any) -> None:
    script = stage.folder / "train.py"
    script.write_text(SCRIPT)
    own = RUN.replace("[model]", '[model]\nkind = ""').replace("[data]", '[data]\nsource = ""')
    stage.write_run(own, rounds=ROUNDS, min_peers=1, outer=PLAIN)
    stage.coordinate()
    stage.join("ann", "--script", str(script))
    finish(stage, "ann")
    found, expected = load_file(script.with_suffix(".safetensors")), by_the_scripts_parts(script, ROUNDS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def is_stopped(stage: Any, name: str) -> bool:
    """Its trainer stands at its failpoint."""
    if not any("trainer_pid" in each for each in stage.events(name)):
        return False
    status = Path(f"/proc/{stage.trainer_of(name)}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"
