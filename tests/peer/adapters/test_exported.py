"""`checkpoint export --hf`: what a checkpoint becomes loads on the first try, and is what `run.save_pretrained` writes.

Needs transformers, and for adapters peft.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rig.made_model import MadeRun
from rig.pretrained_models import IDS, learn, lora, made, run_of, tokenizer

transformers: Any = pytest.importorskip("transformers")
Say = Callable[..., tuple[int, str, str]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16")]
)
def test_a_whole_model_loads_with_the_runs_logits_and_has_the_bytes_that_every_peer_writes(
    tmp_path: Path, say: Say, name: str, dtype: str
) -> None:
    base, model = tmp_path / "base", made(transformers, name, getattr(torch, dtype))
    model.config.save_pretrained(base)
    model.generation_config.max_new_tokens = 7
    model.generation_config.save_pretrained(base)
    tokenizer(transformers).save_pretrained(base)
    run = run_of(tmp_path / "shared", model)
    expected = model(IDS).logits
    place = MadeRun(tmp_path)
    place.saves(model, 4)
    learn(model)
    code, out, err = say("checkpoint", "export", place.place, "--hf", base, "--out", tmp_path / "out")
    assert code == 0 and "wrote version 4 of little-llama" in out, err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(loaded.dtype) == f"torch.{dtype}" and torch.equal(loaded(IDS).logits, expected)
    assert transformers.AutoModel.from_pretrained(tmp_path / "out").config.model_type == name
    spoken = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert spoken("three one")["input_ids"] == [3, 1] and loaded.generation_config.max_new_tokens == 7
    run.save_pretrained(tmp_path / "saved", tokenizer(transformers))
    assert files(tmp_path / "out") == files(tmp_path / "saved")


def as_vllm_reads(folder: Path) -> dict[str, torch.Tensor]:
    """As vLLM's default loader does: all *.safetensors that the index names, where there is one; each tensor once.

    vLLM itself is not run: its packages bring a torch of their own, for CUDA.
    """
    found: dict[str, torch.Tensor] = {}
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    for path in sorted(folder.glob("*.safetensors")):
        assert named is None or path.name in named, path
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118
                assert name not in found, name
                found[name] = file.get_tensor(name)
    return found


def test_shards_have_an_index_and_a_smaller_model_leaves_none_of_them(tmp_path: Path, say: Say) -> None:
    base, model = tmp_path / "base", made(transformers, "llama")
    model.config.save_pretrained(base)
    place, out = MadeRun(tmp_path), tmp_path / "out"
    place.saves(model, 4)
    words = ["checkpoint", "export", place.place, "--hf", base, "--out", out]
    code, _, err = say(*words, "--max-shard-size", "5KB")
    assert code == 0, err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == {path.name for path in shards}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    read = as_vllm_reads(out)
    assert read.keys() == index["weight_map"].keys()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"} <= read.keys()
    (out / "notes.md").write_text("mine")
    assert "add --force" in say(*words)[2]
    assert say(*words, "--force")[0] == 0
    assert {path.name for path in out.glob("*.safetensors*")} == {"model.safetensors"}
    assert (out / "notes.md").read_text() == "mine"
    assert as_vllm_reads(out).keys() == read.keys()


def test_frozen_weights_come_from_the_base_and_only_from_the_one_that_the_run_had(
    tmp_path: Path, say: Say
) -> None:
    base, model = tmp_path / "base", made(transformers, "llama")
    model.save_pretrained(base)
    for parameter in model.model.parameters():
        parameter.requires_grad = False
    place = MadeRun(tmp_path)
    learn(model)
    place.saves(model, 4)
    words = ["checkpoint", "export", place.place, "--hf", base, "--out", tmp_path / "out"]
    code, _, err = say(*words)
    assert code == 0, err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    other = made(transformers, "llama")
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    other.save_pretrained(base)
    code, _, err = say(*words, "--force")
    assert code == 2 and "are not those of the run" in err and err.count("\n") == 1
    (base / "model.safetensors").unlink()
    code, _, err = say(*words, "--force")
    assert code == 2 and "not trained, so not in the checkpoint, and" in err and err.count("\n") == 1


def test_what_is_not_the_model_of_the_base_is_named_and_nothing_is_written(tmp_path: Path, say: Say) -> None:
    base, place = tmp_path / "base", MadeRun(tmp_path)
    place.saves(made(transformers, "llama"), 4)
    words = ["checkpoint", "export", place.place, "--hf", base, "--out", tmp_path / "out"]
    code, _, err = say(*words)
    assert code == 2 and "there is no such folder, and no such model" in err, err
    made(transformers, "gpt2").config.save_pretrained(base)
    code, _, err = say(*words)
    assert (
        code == 2
        and "its GPT2LMHeadModel has no lm_head.weight" not in err
        and "which the run trained" in err
    )
    small = made(transformers, "llama").config
    small.intermediate_size = 48
    small.save_pretrained(base)
    code, _, err = say(*words)
    assert code == 2 and "the run's model is another one" in err and err.count("\n") == 1
    bad = json.loads((base / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "mine.Config"},
        "model_type": "x",
    }
    (base / "config.json").write_text(json.dumps(bad))
    code, _, err = say(*words)
    assert code == 2 and "contains custom code" in err and err.count("\n") == 1, (
        "code that came with it is not run"
    )
    small = made(transformers, "llama").config
    small.tie_word_embeddings = True
    small.save_pretrained(base)
    code, _, err = say(*words)
    assert code == 2 and "ties" in err and "the run trained both" in err
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}])
def test_an_adapter_is_what_peft_writes_and_needs_only_its_config(
    tmp_path: Path, say: Say, more: dict[str, Any]
) -> None:
    peft: Any = pytest.importorskip("peft")
    model = lora(transformers, peft, more)
    model.save_pretrained(tmp_path / "base")
    run = run_of(tmp_path / "shared", model)
    expected = model(IDS).logits
    place = MadeRun(tmp_path)
    place.saves(model, 4)
    learn(model)
    code, _, err = say(
        "checkpoint", "export", place.place, "--hf", tmp_path / "base", "--out", tmp_path / "out"
    )
    assert code == 0, err
    run.save_pretrained(tmp_path / "saved")
    theirs, ours = files(tmp_path / "saved"), files(tmp_path / "out")
    assert ours["adapter_config.json"] == theirs["adapter_config.json"]
    mine = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "saved" / "adapter_model.safetensors").items():
        assert torch.equal(mine.pop(name), tensor), name
    assert not mine
    loaded = peft.PeftModel.from_pretrained(made(transformers, "llama"), tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, expected)


def test_an_adapter_is_not_mistaken_for_a_model(tmp_path: Path, say: Say) -> None:
    peft: Any = pytest.importorskip("peft")
    model = lora(transformers, peft, {})
    place = MadeRun(tmp_path)
    place.saves(model, 4)
    model.config.save_pretrained(tmp_path / "base")
    code, _, err = say(
        "checkpoint", "export", place.place, "--hf", tmp_path / "base", "--out", tmp_path / "out"
    )
    assert code == 2 and "this run trained an adapter of peft" in err and "adapter_config.json" in err
    # What trains and is no part of the adapter would be lost in a file of peft's.
    model.save_pretrained(tmp_path / "adapter")
    model.base_model.model.model.norm.weight.requires_grad = True
    place.saves(model, 8)
    code, _, err = say(
        "checkpoint", "export", place.place, "--hf", tmp_path / "adapter", "--out", tmp_path / "out"
    )
    assert code == 2 and "norm.weight is trained and belongs to no LoRA adapter" in err
