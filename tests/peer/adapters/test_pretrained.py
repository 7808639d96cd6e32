"""`run.save_pretrained`: what leaves a run loads by `from_pretrained`, with no file added.  Needs transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from farflung.peer.island.sharded import is_sharded
from farflung.protocol.errors import UserError
from rig.pretrained_models import IDS, learn, lora, made, run_of, tokenizer


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16")]
)
def test_what_is_saved_loads_and_gives_the_runs_logits_bit_for_bit(
    tmp_path: Path, name: str, dtype: str
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = made(transformers, name).to(getattr(torch, dtype))
    run = run_of(tmp_path / "shared", model, takes=False)
    expected = model(IDS).logits
    learn(model)
    run.save_pretrained(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(loaded.dtype) == f"torch.{dtype}" and torch.equal(loaded(IDS).logits, expected)
    assert not torch.equal(model(IDS).logits, expected)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) == (name == "llama"), "GPT-2's is tied: once"  # noqa: SIM118
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    run.save_pretrained(tmp_path / "again")
    for file in names:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_shards_and_the_tokenizer_are_in_it_and_an_earlier_save_leaves_nothing(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model, out = made(transformers, "gpt2"), tmp_path / "out"
    run = run_of(tmp_path / "shared", model, takes=False)
    expected = model(IDS).logits
    run.save_pretrained(out, tokenizer(transformers), max_shard_size="10KB")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(out).eval()(IDS).logits, expected)
    assert transformers.AutoTokenizer.from_pretrained(out)("two")["input_ids"] == [2]
    run.save_pretrained(tmp_path / "again", tokenizer(transformers), max_shard_size="10KB")
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    run.save_pretrained(out)
    assert {path.name for path in out.glob("*.safetensors*")} == {"model.safetensors"}
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(out).eval()(IDS).logits, expected)


def test_of_a_lora_model_the_adapter_leaves_with_its_config_the_same_in_every_process(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    model = lora(transformers, peft, {})
    run = run_of(tmp_path / "shared", model, takes=False)
    expected = model(IDS).logits
    learn(model)
    run.save_pretrained(tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    loaded = peft.PeftModel.from_pretrained(made(transformers, "llama"), tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, expected)
    modules = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) == 7 and modules == sorted(modules)


@pytest.fixture
def sharded() -> Iterator[Any]:
    """FSDP2 over a group of one: every parameter is a DTensor."""
    distributed: Any = importlib.import_module("torch.distributed")
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        yield importlib.import_module("torch.distributed.fsdp").fully_shard
    finally:
        distributed.destroy_process_group()


def test_of_a_sharded_lora_model_the_adapter_leaves_without_its_base(tmp_path: Path, sharded: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    model = lora(transformers, peft, {})
    expected = model(IDS).logits
    for layer in model.get_base_model().model.layers:
        sharded(layer)
    sharded(model)
    assert all(is_sharded(each) for each in model.parameters())
    run_of(tmp_path / "shared", model).save_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(made(transformers, "llama"), tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, expected)
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 20_000


def test_a_sharded_model_leaves_whole_and_with_frozen_parts_it_says_why_not(
    tmp_path: Path, sharded: Any
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = made(transformers, "llama")
    expected = model(IDS).logits
    sharded(model)
    run_of(tmp_path / "shared", model).save_pretrained(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, expected)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    model.model.norm.weight.requires_grad = False
    with pytest.raises(UserError, match=r"frozen parameters lie on several ranks: .* run.save\(path\)"):
        run_of(tmp_path / "again", model).save_pretrained(tmp_path / "other")


class Wrapped(nn.Module):
    """A module inside torch.compile, which puts its own name before what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Linear(2, 2))
        self.written: dict[str, Any] = {}

    def save_pretrained(self, folder: Path, state_dict: Any, max_shard_size: object) -> None:
        self.written = state_dict


def test_the_runs_values_are_written_also_where_a_wrapper_renames_them(tmp_path: Path) -> None:
    model = Wrapped()
    assert "inner._orig_mod.weight" in model.state_dict()
    run = run_of(tmp_path / "shared", model, takes=False)
    weight = model.inner.weight.detach().clone()
    learn(model)
    run.save_pretrained(tmp_path / "out")
    assert model.written.keys() == {"inner.weight", "inner.bias"}
    assert torch.equal(model.written["inner.weight"], weight)


class Writes(nn.Linear):
    """As models of transformers do; and a tokenizer."""

    written: Any = None

    def save_pretrained(self, folder: Path, state_dict: Any = None, max_shard_size: object = None) -> None:
        type(self).written = state_dict if state_dict is not None else "tokenizer"


def test_the_model_is_given_the_runs_weights_and_its_own_frozen_ones(tmp_path: Path) -> None:
    model = Writes(2, 2)
    model.bias.requires_grad = False
    before = model.bias.clone()
    run = run_of(tmp_path / "shared", model, takes=False)
    weight = model.weight.detach().clone()
    learn(model)
    run.save_pretrained(tmp_path)
    assert torch.equal(Writes.written["weight"], weight) and torch.equal(Writes.written["bias"], before)
    run.save_pretrained(tmp_path, tokenizer=Writes(1, 1))
    assert Writes.written == "tokenizer"


def test_a_model_that_cannot_write_itself_is_told_what_can(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"Linear has no save_pretrained: write its weights with run.save\(path\)"
    ):
        run_of(tmp_path / "shared", nn.Linear(2, 2)).save_pretrained(tmp_path)
