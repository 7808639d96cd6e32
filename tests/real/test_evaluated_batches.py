"""The held-out loss of real runs of batches: as the models that they leave behind have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from farflung.console.history.audit import audit
from farflung.console.history.history import read_folder
from farflung.peer.builtin.corpus import held_out_bytes
from farflung.peer.builtin.llama import Llama, next_token_loss, parts_of, sizes_of
from farflung.peer.pipeline.parts import Stage
from farflung.protocol.manifest import Manifest

pytestmark = [pytest.mark.slow, pytest.mark.mode("batches"), pytest.mark.mode("evaluation")]

ROUNDS = 3
RUN = """
[run]
name = "small"
rounds = 3
min_peers = 2
[model]
layers = 2
width = 32
heads = 2
context = 32
[data]
batch = 1
[eval]
source = "python-stdlib"
windows = 17
[outer]
step = "adamw"
lr = 4e-3
[merge]
policy = "mean"
[round]
chunk_kb = 16
deadline_s = 300.0
[net]
heartbeat_s = 0.2
dead_after_s = 30.0
[pipeline]
batch = 16
micro = 2
"""


def rows(manifest: Manifest) -> Tensor:
    found = held_out_bytes(manifest.model.context)
    return torch.stack([found[(len(found) - 1) * window // 16] for window in range(17)])


def loss_of_whole(manifest: Manifest, weights: list[Path]) -> float:
    model = Llama(manifest.model, 0)
    model.load_state_dict(load_file(weights[0]), strict=False)
    with torch.no_grad():
        return float(model.loss(rows(manifest)))


def loss_of_stages(manifest: Manifest, weights: list[Path]) -> float:
    """Each peer leaves what it holds."""
    parts = parts_of(sizes_of(manifest), manifest.run.seed)
    model = Stage.build(parts, 0, len(parts), manifest.run.seed)
    model.load_state_dict({name: each for path in weights for name, each in load_file(path).items()})
    with torch.no_grad():
        due = rows(manifest)
        return float(next_token_loss(model(due[:, :-1]), {"labels": due[:, 1:]}))


@pytest.mark.parametrize("stages", [1, 2])
def test_the_last_version_is_evaluated_and_its_loss_is_that_of_what_is_left(stage: Any, stages: int) -> None:
    toml = stage.folder / "run.toml"
    toml.write_text(RUN + f"stages = {stages}\n")
    stage.coordinate()
    for name in ("ann", "bob"):
        stage.join(name)
    last = stage.until(lambda s: "version" in s["held_out"], "a version is evaluated")
    held_out = last["held_out"]
    assert [stage.wait("ann"), stage.wait("bob")] == [0, 0]
    assert (held_out["version"], held_out["windows"], held_out["of"]) == (ROUNDS, 17, 17)
    # Where the model ends; of two that hold it whole, one may be through before the other sits down.
    assert len(held_out["peers"]) == 1 or stages == 1
    manifest = Manifest.from_toml(toml.read_text(), "run.toml")
    of = loss_of_whole if stages == 1 else loss_of_stages
    assert held_out["loss"] == pytest.approx(of(manifest, [stage.model(n) for n in ("ann", "bob")]), abs=1e-4)
    report = audit(read_folder(stage.folder))
    assert report.kept, "\n".join(report.lines())


def test_a_script_that_holds_nothing_out_trains_on_and_its_log_says_so(stage: Any) -> None:
    toml, script = stage.folder / "run.toml", stage.folder / "mine.py"
    toml.write_text(
        RUN.replace("[model]\nlayers = 2\nwidth = 32\nheads = 2\ncontext = 32\n", '[model]\nkind = ""\n')
    )
    script.write_text(
        "import torch, farflung\n"
        "from torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.ones(512, 4), torch.zeros(512, dtype=torch.long))\n"
        "loss = lambda found, riders: torch.nn.functional.cross_entropy(found, riders['kind'])\n"
        "make = lambda: torch.nn.Linear(4, 3)\n"
        "farflung.pipeline(None, [make], data=data, inputs=('x',), riders=('kind',), loss=loss)\n"
    )
    stage.coordinate()
    for name in ("ann", "bob"):
        stage.join(name, "--script", str(script))
    assert [stage.wait("ann"), stage.wait("bob")] == [0, 0]
    told = "no loss is computed here: [eval] of run.toml wants 17 held-out rows, and farflung.pipeline was given no"
    assert any(told in stage.log(name) for name in ("ann", "bob"))
    assert f"version {ROUNDS} is not evaluated: no peer could compute a loss" in stage.log("coordinator")
    assert stage.status()["version"] == ROUNDS and "version" not in stage.status()["held_out"]
