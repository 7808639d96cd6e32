"""A model of transformers that a run names: built by its table, and trained as the built-in one is."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.peer.builtin import named_model
from farflung.peer.builtin.llama import Llama, continued
from farflung.peer.builtin.named_model import HfModel, MicroBatches, hf_config_of, model_of, with_values
from farflung.peer.builtin.sizes import StepShape
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import UserError
from farflung.protocol.hf_config import ARCHITECTURES, KEYS
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import values_by_part, values_of
from rig.hf_run import hf_run

needs_hf = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
KINDS = pytest.mark.parametrize("kind", ARCHITECTURES)


def made(kind: str, config: str = "") -> tuple[Manifest, HfModel]:
    manifest = Manifest.from_toml(hf_run(kind, config), "run.toml")
    model = model_of(manifest)
    assert isinstance(model, HfModel)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(3.0 if each.dim() > 1 else 1.1)  # larger than at first, where little differs
    return manifest, model


def window(rows: int = 3) -> Tensor:
    return torch.randint(0, 256, (rows, 33), generator=torch.Generator().manual_seed(1))


def gradients(model: HfModel) -> list[Tensor]:
    found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return found


MORE = {
    "attention_bias": "attention_bias = true",
    "head_dim": "head_dim = 32",
    "num_key_value_heads": "num_key_value_heads = 2",
    "tie_word_embeddings": "tie_word_embeddings = false",
}


@needs_hf
@KINDS
@pytest.mark.parametrize("key", MORE)
def test_hf_values_are_those_on_paper_whatever_a_table_says(kind: str, key: str) -> None:
    if key not in KEYS[kind]:
        pytest.skip(f"{kind} has no {key}")
    manifest, model = made(kind, MORE[key])
    assert sum(each.numel() for each in model.parameters()) == values_of(manifest.model)
    assert not [name for name, each in model.named_buffers() if each.numel() > 64], (
        "nothing that nobody counted"
    )


# What a config of transformers has beside the table, and that makes no other model of it here.
HARMLESS = {
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward", "dtype", "id2label",
    "label2id", "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    "transformers_version", "use_cache", "attention_dropout", "mlp_bias", "pretraining_tp", "rope_parameters",
    "layer_types", "use_sliding_window", "max_window_layers", "clip_qkv", "use_bidirectional_attention",
    "add_cross_attention", "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_inner", "reorder_and_upcast_attn",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "model_type", "sliding_window", "head_dim",
    "n_ctx", "n_embd", "n_head", "n_layer", "n_positions", "_name_or_path", "num_labels", "tokenizer_class",
    "use_return_dict", "finetuning_task", "torchscript", "prefix",
}  # fmt: skip


@needs_hf
@KINDS
def test_hf_config_has_nothing_that_neither_the_table_says_nor_we_know(kind: str) -> None:
    manifest, _ = made(kind)
    built = hf_config_of(manifest.model)
    assert set(built.to_dict()) - set(manifest.model.config) - HARMLESS == set()
    assert all(
        getattr(built, key) == value for key, value in manifest.model.config.items() if key != "rope_theta"
    )
    if "rope_theta" in manifest.model.config:
        assert built.rope_parameters["rope_theta"] == manifest.model.config["rope_theta"]


@needs_hf
def test_hf_weights_of_another_model_are_told_in_a_line() -> None:
    manifest, model = made("qwen3")
    tensors = {name: each.detach() for name, each in model.module.named_parameters()}
    for odd in ({"model.norm.weight": torch.ones(3)}, {"more": torch.ones(3)}):
        with pytest.raises(UserError, match="these are no weights of the run's model: ") as told:
            with_values(manifest.model, tensors | odd)
        assert "\n" not in str(told.value)
    del tensors["model.norm.weight"]
    with pytest.raises(UserError, match="no weights of the run's model: model.norm.weight"):
        with_values(manifest.model, tensors)


@needs_hf
@KINDS
def test_hf_values_are_those_on_paper_and_names_those_of_a_folder(kind: str) -> None:
    manifest, model = made(kind)
    assert sum(each.numel() for each in model.parameters()) == values_of(manifest.model)
    exchanged = {each.name for each in ModelLayout.of(model.module, 256).specs if each.kind != "alias"}
    assert exchanged == {name for name, _ in model.module.named_parameters()}
    torch.manual_seed(5)
    assert all(
        torch.equal(one, other)
        for one, other in zip(model_of(manifest).parameters(), model_of(manifest).parameters(), strict=True)
    )


@needs_hf
@KINDS
def test_hf_loss_is_that_of_the_whole_model_in_pieces_and_again(kind: str) -> None:
    _, model = made(kind)
    rows = window()
    logits = model.module(input_ids=rows[:, :-1]).logits
    due = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    torch.testing.assert_close(model.loss(rows), due)
    torch.testing.assert_close(model.losses(rows).mean(), due)
    model.loss(rows).backward()
    whole = gradients(model)
    said: list[str] = []
    for shape in (StepShape(1), StepShape(2, recompute=True), StepShape(3)):
        micros = MicroBatches(model, shape, nullcontext, said.append)
        torch.testing.assert_close(micros.backward(rows), due)
        assert (
            any(getattr(each, "gradient_checkpointing", False) for each in model.modules()) == shape.recompute
        )
        torch.testing.assert_close(gradients(model), whole, rtol=1e-4, atol=1e-5)


@needs_hf
@KINDS
def test_hf_text_is_what_the_whole_model_finds_likeliest(kind: str) -> None:
    manifest, model = made(kind)
    tensors = {name: each.detach() for name, each in model.module.named_parameters()}
    again = with_values(manifest.model, tensors)
    ids = [3, 1, 4]
    found = list(continued(again.eval(), ids, 12, 0.0, 0))
    for _ in found:
        logits = model.eval().module(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.argmax()))
    assert ids[3:] == found


@needs_hf
@pytest.mark.mode("batches")
@KINDS
def test_hf_in_parts_has_the_values_on_paper(kind: str) -> None:
    from farflung.peer.pipeline.hf import hf_parts

    manifest, _ = made(kind, "tie_word_embeddings = false")
    with torch.device("meta"):
        built = [part() for part in hf_parts(hf_config_of(manifest.model))]
    assert [sum(v.numel() for v in part.parameters()) for part in built] == [*values_by_part(manifest.model)]


@needs_hf
def test_hf_is_built_without_a_word_to_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody was called")

    monkeypatch.setattr("socket.socket.connect", no)
    monkeypatch.setattr("socket.getaddrinfo", no)
    made("qwen3")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            ModuleNotFoundError("no", name="transformers"),
            r'not installed here: pip install "transformers>=5.23"$',
        ),
        (
            ModuleNotFoundError("No module named 'regex'", name="regex"),
            "loaded here: No module named 'regex'$",
        ),
        (
            ImportError("tokenizers>=0.22 is required\nbut"),
            "can't be loaded here: tokenizers>=0.22 is required$",
        ),
        (SimpleNamespace(__version__="5.0.0"), "of which 5.0.0 is installed here: pip install"),
    ],
)
def test_who_has_no_transformers_of_use_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, found: Any, told: str
) -> None:
    def imported(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(named_model.importlib, "import_module", imported)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # put back in the end
    with pytest.raises(UserError, match=told):
        model_of(Manifest.from_toml(hf_run("llama"), "run.toml"))
    assert isinstance(model_of(Manifest()), Llama)
