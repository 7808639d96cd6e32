"""Parts of decoders from transformers, against the models they are made of.  Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import farflung
from farflung.checkpoints.export import Exported, TrainedTensors, write_hf_folder
from farflung.peer.pipeline.hf import hf_names
from farflung.peer.pipeline.parts import Stage, run_part, survey_parts
from farflung.protocol.errors import UserError
from farflung.protocol.model_schema import ModelSchema

transformers: Any = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
}
IDS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))


def config_of(kind: str, tied: bool) -> Any:
    if kind == "gpt2":
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        return transformers.GPT2Config(**sizes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0)
    name, more = CONFIGS[kind]
    return getattr(transformers, name)(**SIZES, **more, tie_word_embeddings=tied)


def logits_of(parts: list[Any]) -> Tensor:
    stage = Stage.build(parts, 0, len(parts), 3).eval()
    x: tuple[Tensor, ...] = (IDS,)
    with torch.no_grad():
        for number, module in stage.numbered():
            x = run_part(number, module, x, {})
    return x[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [*CONFIGS, "gpt2"])
def test_parts_with_pretrained_tensors_compute_what_the_model_computes(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    config = config_of(kind, tied)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # norms that begin at one would hide which norm is which
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    parts = farflung.hf_parts(tmp_path, untie=tied, weights=tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits
    torch.testing.assert_close(logits_of(parts), expected, atol=2e-5, rtol=2e-5)
    # And back: what a run exports of these parts is what from_pretrained loads.
    tensors = Stage.build(parts, 0, len(parts), 3).state_dict()
    there, schema = tmp_path / "exported", ModelSchema((), 1, 1, 1, bytes(32))
    exported = Exported(tensors, {}, ())
    trained = TrainedTensors(schema, exported, hf_names(tmp_path, tensors), untied=True)
    write_hf_folder(trained, tmp_path, there, "5GB")
    again, told = transformers.AutoModelForCausalLM.from_pretrained(
        there, attn_implementation="eager", output_loading_info=True
    )
    assert not any(told.values()), "each tensor has its place, and each place its tensor"
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, expected)


def test_names_that_are_no_part_s_are_refused() -> None:
    config = config_of("llama", tied=False)
    for name in ("4.layer.mlp.up_proj.weight", "0.weight", "1.other.weight", "x.embed.weight", "3.norm"):
        with pytest.raises(UserError, match=f"{name}: no tensor of the parts"):
            hf_names(config, [name])


@pytest.mark.parametrize("kind", [*CONFIGS, "gpt2"])
def test_parts_can_be_surveyed_without_memory(kind: str) -> None:
    parts = farflung.hf_parts(config_of(kind, tied=False))
    item = {"ids": IDS[0], "labels": IDS[0]}
    facts = survey_parts(parts, item, ("ids",), lambda logits, item: logits.float().mean())
    assert len(facts) == 4 and facts[1].flops > 0 and facts[0].gives[0].shape == (12, 32)


def test_first_values_are_those_that_transformers_draws_and_the_same_for_every_cut() -> None:
    parts = farflung.hf_parts(config_of("gpt2", tied=False))
    whole, tail = Stage.build(parts, 0, 4, 3), Stage.build(parts, 2, 4, 3)
    named = dict(whole.named_parameters())
    assert all(torch.equal(parameter, named[name]) for name, parameter in tail.named_parameters())
    assert float(named["1.layer.attn.c_attn.weight"].detach().std()) == pytest.approx(0.02, rel=0.1)
    # By depth.
    assert float(named["1.layer.mlp.c_proj.weight"].detach().std()) == pytest.approx(0.01, rel=0.1)


def test_a_tied_head_is_refused_unless_it_is_untied() -> None:
    with pytest.raises(
        UserError, match="tied to its embedding, and they are different parts: pass untie=True"
    ):
        farflung.hf_parts(config_of("llama", tied=True))
    assert len(farflung.hf_parts(config_of("llama", tied=True), untie=True)) == 4


def test_other_models_are_refused() -> None:
    with pytest.raises(
        UserError, match="hf_parts knows no model of type 'bert'; it knows gemma, gpt2, llama, mistral"
    ):
        farflung.hf_parts(transformers.BertConfig())


def test_files_that_do_not_fit_are_told(tmp_path: Path) -> None:
    parts = farflung.hf_parts(config_of("llama", tied=False), weights=tmp_path)
    with pytest.raises(UserError, match="holds no \\*.safetensors"):
        Stage.build(parts, 0, 1, 3)
    other = transformers.AutoModelForCausalLM.from_config(config_of("gpt2", tied=False))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tensor model.embed_tokens.weight in its"):
        Stage.build(parts, 0, 1, 3)
