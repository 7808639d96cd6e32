"""The examples of other people's loops, as they are: two peers, a few rounds, equal weights at the end.

Each needs a package that farflung does not; where it is not installed, the test says so and is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from farflung.protocol.manifest import Manifest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROUNDS, STEPS = 3, 4

pytestmark = pytest.mark.slow


def weights_at(folder: Path) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = [
        load_file(path)
        for path in sorted([*folder.glob("*-model/*.safetensors"), *folder.glob("*.safetensors")])
    ]
    for number, written in enumerate(sorted(folder.glob("*-titan"))):
        dcp_to_torch_save(written, folder / f"{number}.pt")
    return found + [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("finetune_trainer.py", "transformers"),
        ("finetune_hf.py", "transformers"),
        ("finetune_sft.py", "trl"),
        ("lightning_model.py", "lightning"),
        ("titan_model.py", "torchtitan"),
        ("accelerate_model.py", "accelerate"),
    ],
)
def test_the_example_runs_and_ends_with_the_runs_weights(stage: Any, example: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    text = (EXAMPLES / "custom_run.toml").read_text()
    for key, value in (("rounds", ROUNDS), ("sync_every", STEPS), ("batch", 8), ("lease_samples", 100)):
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.M)
    assert Manifest.from_toml(text, "run.toml").total_steps == ROUNDS * STEPS
    (stage.folder / "run.toml").write_text(text)
    stage.coordinate("--exit-when-done")
    shutil.copy(EXAMPLES / example, stage.folder)
    stage.environ = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    here = os.getcwd()
    os.chdir(stage.folder)
    try:
        for name in ("a", "b"):
            stage.run_python(name, [example, stage.url, f"{name}.pem"])
        assert [stage.wait(name) for name in ("a", "b")] == [0, 0], stage.log("a")[-2000:]
    finally:
        os.chdir(here)
    for name in ("a", "b"):
        said: Any = re.search(rf"version {ROUNDS}, (\d+) steps|version {ROUNDS}, loss", stage.log(name))
        assert said, stage.log(name)[-2000:]
        assert "farflung: samples" not in stage.log(name)
    one, other = weights_at(stage.folder)
    assert one
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
