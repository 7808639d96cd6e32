"""Work that peers of a real run recorded is taken again by a process that knows nothing of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from farflung.peer.record.work_files import Work

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

SCRIPT = """
import torch
from torch import nn
import farflung

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
data = torch.randn(4096, 16)
with farflung.join(None, model, torch.optim.AdamW(model.parameters(), lr=3e-3)) as run:
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.99)
    for batch in run.batches(data):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        run.step(loss)
        schedule.step()
"""


@pytest.mark.forked_peers
@pytest.mark.parametrize(
    "own", [pytest.param(False, marks=pytest.mark.hard), pytest.param(True, marks=pytest.mark.hard)]
)
def test_recorded_work_is_taken_again_to_the_same_bits_and_scaled_work_is_found(
    stage: Any, own: bool
) -> None:
    stage.write_run(rounds=3, sync_every=5)
    script: list[str] = []
    if own:
        run_toml = stage.folder / "run.toml"
        text = run_toml.read_text().replace("[model]\n", '[model]\nbuiltin = ""\n')
        run_toml.write_text(text.replace("[data]\n", '[data]\nsource = ""\n'))
        file = stage.folder / "mine.py"
        file.write_text(SCRIPT)
        script = ["--script", str(file)]
    stage.coordinate("--exit-when-done")
    place = stage.folder / "work"
    stage.join("ann", "--record", str(place), *script)
    stage.join("bob", *script)
    assert [stage.wait(name) for name in ("ann", "bob", "coordinator")] == [0, 0, 0]
    done = stage.call("verify", *script, str(place))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout and "signed and sent, byte for byte" in done.stdout
    scale_by_3(Work(place).folder)
    done = stage.call("verify", "--repeats", "1", *script, str(place))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("DIFFERS") == 2 and "3 times as long" in done.stdout, done.stdout


def scale_by_3(folder: Path) -> None:
    file = folder / "after.safetensors"
    found: dict[str, torch.Tensor] = load_file(file)
    save_file({"delta": 3 * found["delta"]}, file)
