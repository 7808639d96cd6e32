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
from rig.hf_run import hf_run

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


def two_peers_run(stage: Any, script: str) -> None:
    text = (EXAMPLES / "custom_run.toml").read_text()
    for key, value in (("rounds", ROUNDS), ("sync_every", STEPS), ("batch", 8), ("lease_samples", 100)):
        text = re.sub(rf"^{key} = \d+", f"{key} = {value}", text, flags=re.M)
    assert Manifest.from_toml(text, "run.toml").total_steps == ROUNDS * STEPS
    (stage.folder / "run.toml").write_text(text)
    stage.coordinate("--exit-when-done")
    stage.environ = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    here = os.getcwd()
    os.chdir(stage.folder)
    try:
        for name in ("a", "b"):
            stage.run_python(name, [script, stage.url, f"{name}.pem"])
        assert [stage.wait(name) for name in ("a", "b")] == [0, 0], stage.log("a")[-2000:]
    finally:
        os.chdir(here)


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("finetune_trainer.py", "transformers"),
        ("finetune_hf.py", "transformers"),
        ("finetune_sft.py", "trl"),
        ("finetune_lora.py", "peft"),
        ("lightning_model.py", "lightning"),
        ("titan_model.py", "torchtitan"),
        ("accelerate_model.py", "accelerate"),
    ],
)
def test_the_example_runs_and_ends_with_the_runs_weights(stage: Any, example: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    shutil.copy(EXAMPLES / example, stage.folder)
    two_peers_run(stage, example)
    for name in ("a", "b"):
        said: Any = re.search(rf"version {ROUNDS}, (\d+) steps|version {ROUNDS}, loss", stage.log(name))
        assert said, stage.log(name)[-2000:]
        assert "farflung: samples" not in stage.log(name)
    one, other = weights_at(stage.folder)
    assert one
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


WHOLE = """[eval]
source = "python-stdlib"
windows = 16
[round]
sync_every = 4
codec = "int8"
"""
IN_STAGES = """[pipeline]
stages = 2
batch = 8
[outer]
step = "adamw"
[merge]
policy = "mean"
"""


@pytest.mark.parametrize(
    ("kind", "rest"),
    [("qwen3", WHOLE), ("gpt2", WHOLE), ("qwen2", IN_STAGES)],
    ids=["qwen3", "gpt2", "qwen2 in stages"],
)
def test_hf_model_that_a_run_names_needs_join_alone(stage: Any, kind: str, rest: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install transformers")
    run = f"[run]\nrounds = {ROUNDS}\nmin_peers = 2\n[checkpoint]\nevery_rounds = 1\n"
    stage.write_run(hf_run(kind, after=run + rest))
    stage.coordinate("--exit-when-done")
    kept = stage.folder / "kept"
    for name in ("a", "b"):
        stage.join(name, "--checkpoints", str(kept))
    assert [stage.wait(name) for name in ("a", "b", "coordinator")] == [0, 0, 0], stage.log("a")[-2000:]
    out = stage.folder / "folder"
    stage.start("export", ["checkpoint", "export", str(kept), "--hf", "run", "--out", str(out)])
    assert stage.wait("export") == 0, stage.log("export")
    import transformers

    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert model.config.model_type == kind and not told["missing_keys"] and not told["unexpected_keys"]
    if rest == WHOLE:
        trained = load_file(stage.model("a"))
        assert all(torch.equal(each, trained[name]) for name, each in model.state_dict().items())


@pytest.mark.hard
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_compiled_model_takes_one_line_and_ends_as_the_others_do(stage: Any) -> None:
    text = (EXAMPLES / "custom_model.py").read_text()
    before = "    inner = torch.optim.AdamW("
    assert text.count(before) == 1
    compiled = text.replace(before, f"    model = torch.compile(model)\n{before}")
    (stage.folder / "compiled.py").write_text(compiled)
    two_peers_run(stage, "compiled.py")
    one, other = weights_at(stage.folder)
    assert one and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


SAVES_ALL = """
import sys, torch, farflung, finetune_lora

trainer = finetune_lora.trainer_of_adapter()
if sys.argv[2] == "a.pem":
    finetune_lora.trainer_of_adapter().model.unload().save_pretrained("base")
with farflung.hf_join(trainer, sys.argv[1], identity=sys.argv[2]) as run:
    trainer.train()
    run.save_pretrained(f"{run.name}-saved")
trainer.save_model(f"{run.name}-model")
with torch.no_grad():
    logits = trainer.model.eval()(torch.arange(12).reshape(1, 12)).logits
torch.save({"name": run.name, "logits": logits}, sys.argv[2] + ".pt")
"""


def test_the_adapter_of_a_run_of_sft_loads_onto_its_base_with_the_runs_logits_bit_for_bit(stage: Any) -> None:
    for package in ("trl", "peft"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    transformers, peft = (importlib.import_module(name) for name in ("transformers", "peft"))
    shutil.copy(EXAMPLES / "finetune_lora.py", stage.folder)
    (stage.folder / "saves.py").write_text(SAVES_ALL)
    two_peers_run(stage, "saves.py")
    made = [torch.load(stage.folder / f"{name}.pem.pt", weights_only=True) for name in ("a", "b")]
    assert torch.equal(made[0]["logits"], made[1]["logits"])
    for each in made:
        for kind in ("model", "saved"):
            folder = stage.folder / f"{each['name']}-{kind}"
            base = transformers.AutoModelForCausalLM.from_pretrained(stage.folder / "base")
            plain = base.eval()(torch.arange(12).reshape(1, 12)).logits
            assert not torch.equal(plain, each["logits"]), "something was learned"
            loaded = peft.PeftModel.from_pretrained(base, folder).eval()
            assert torch.equal(loaded(torch.arange(12).reshape(1, 12)).logits, each["logits"]), folder
