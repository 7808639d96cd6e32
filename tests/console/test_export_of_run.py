"""`farflung checkpoint export --hf run`: a model that a run names becomes a folder of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from farflung.checkpoints.checkpoint_manifest import CheckpointManifest
from farflung.peer.builtin.llama import Llama
from farflung.peer.builtin.named_model import hf_config_of, model_of
from farflung.protocol.hf_config import ARCHITECTURES
from farflung.protocol.manifest import Manifest, ModelSection
from rig.hf_run import hf_run
from rig.made_model import MadeRun

TOML = "[model]\nlayers = 2\nwidth = 32\nheads = 4\nkv_heads = 2\nqk_norm = true\n"


Say = Callable[..., tuple[int, str, str]]  # (exit code, stdout, stderr)


def export(say: Say, run: MadeRun, out: Path, *words: str) -> tuple[int, str]:
    code, _, err = say("checkpoint", "export", run.place, "--hf", "run", "--out", out, *words)
    return code, err


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_folder_has_the_runs_values_under_transformers_names_and_a_config_of_its_sizes(
    tmp_path: Path, say: Say, tied: str
) -> None:
    manifest, run = Manifest.from_toml(f"{TOML}tied = {tied}", "run.toml"), MadeRun(tmp_path / "run")
    model = Llama(manifest.model, 7)
    run.saves(model, 4, manifest.canonical())
    assert export(say, run, tmp_path / "out") == (0, "")
    found, values = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert found.keys() | {"lm_head.weight"} == values.keys()
    assert ("lm_head.weight" in found) == (tied == "false"), (
        "a tied weight lies there once, as transformers has it"
    )
    assert all(torch.equal(each, values[name]) for name, each in found.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"]) == ("qwen3", 2)
    assert config["tie_word_embeddings"] == (tied == "true")


def test_a_large_model_lies_in_several_files_and_an_index(tmp_path: Path, say: Say) -> None:
    manifest, run = Manifest.from_toml(TOML, "run.toml"), MadeRun(tmp_path / "run")
    model = Llama(manifest.model, 7)
    run.saves(model, 4, manifest.canonical())
    assert export(say, run, tmp_path / "out", "--max-shard-size", "0.05 MB") == (0, "")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    assert index["metadata"]["total_size"] == 4 * sum(each.numel() for each in model.parameters())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], model.state_dict()[name])


def test_a_model_in_stages_gets_the_names_of_the_whole(tmp_path: Path, say: Say) -> None:
    manifest, run = Manifest.from_toml(f"{TOML}tied = false", "run.toml"), MadeRun(tmp_path / "run")
    whole = Llama(manifest.model, 7)
    parts = nn.ModuleList([Llama(manifest.model, 7, number, number + 1) for number in range(4)])
    run.saves(parts, 4, manifest.canonical())
    assert export(say, run, tmp_path / "out") == (0, "")
    found, values = load_file(tmp_path / "out" / "model.safetensors"), whole.state_dict()
    assert found.keys() == values.keys() and all(torch.equal(each, values[n]) for n, each in found.items())


@pytest.mark.parametrize("in_stages", [False, pytest.param(True, marks=pytest.mark.mode("batches"))])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_of_transformers_is_loaded_by_it_with_no_name_missing_or_left_over(
    kind: str, in_stages: bool, tmp_path: Path, say: Say
) -> None:
    transformers = pytest.importorskip("transformers")
    untied = "tie_word_embeddings = false" if in_stages else ""
    manifest, run = Manifest.from_toml(hf_run(kind, untied), "run.toml"), MadeRun(tmp_path / "run")
    whole = model_of(manifest).eval().module
    parts = nn.ModuleList()
    if in_stages:
        from farflung.peer.pipeline.hf import hf_parts

        parts += [part() for part in hf_parts(hf_config_of(manifest.model))]
    run.saves(parts if in_stages else whole, 4, manifest.canonical())
    assert export(say, run, tmp_path / "out") == (0, "")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert type(again).__name__ == ARCHITECTURES[kind] and again.config.pad_token_id is None
    ids = torch.arange(8)[None]
    logits = nn.Sequential(*parts)(ids) if in_stages else whole(ids).logits
    torch.testing.assert_close(again(ids).logits, logits)


def test_what_is_no_model_of_a_run_is_told_in_a_line_and_nothing_is_written(tmp_path: Path, say: Say) -> None:
    manifest, script = (
        Manifest.from_toml(TOML, "run.toml"),
        Manifest.from_toml("[model]\nkind = ''", "run.toml"),
    )
    of_hf = Manifest.from_toml(hf_run("qwen2"), "run.toml")
    cases = {
        "another one": (of_hf.canonical(), b"", "trained the model of a script"),
        "old": (b"", b"", "trained the model of a script"),
        "script": (script.canonical(), b"", "trained the model of a script"),
        "forged": (
            manifest.canonical(),
            b"other terms",
            "the terms in its manifest are not those of its run",
        ),
    }
    for number, other in enumerate(
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Llama(ModelSection(layers=1), 7))
    ):
        run = MadeRun(tmp_path / f"other {number}")
        run.saves(other, 4, manifest.canonical())
        code, said = export(say, run, tmp_path / "out")
        assert code == 2 and "trained the model of a script" in said, "a script may join any run"
    for name, (terms, of, told) in cases.items():
        run = MadeRun(tmp_path / name)
        run.saves(Llama(manifest.model, 7), 4, terms, of)
        code, said = export(say, run, tmp_path / "out")
        assert code != 0 and told in said and said.count("\n") == 1, said
        assert not (tmp_path / "out").exists()
    run = MadeRun(tmp_path / "right")
    run.saves(Llama(manifest.model, 7), 4, manifest.canonical())
    code, said = export(say, run, tmp_path / "out", "--max-shard-size", "big")
    assert code == 2 and "--max-shard-size: expected a size" in said


def test_the_terms_of_a_checkpoint_are_those_that_its_run_was_begun_with(tmp_path: Path) -> None:
    manifest, run = Manifest.from_toml(TOML, "run.toml"), MadeRun(tmp_path / "run")
    saved: CheckpointManifest = run.saves(Llama(manifest.model, 7), 4, manifest.canonical()).manifest
    assert saved.run_terms == manifest and bytes.fromhex(saved.manifest) == manifest.digest
