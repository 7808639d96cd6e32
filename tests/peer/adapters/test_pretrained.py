"""`run.save_pretrained`: what leaves a run loads by `from_pretrained`, with no file added.  Needs transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import Load
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunOptimizer
from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest

IDS = torch.arange(12).reshape(1, 12)


def run_of(folder: Path, model: nn.Module) -> Run:
    """A run whose state differs from what this peer has learned since."""
    folder.mkdir()
    words: list[Any] = []
    channel: Any = SimpleNamespace(send=lambda word: None, recv=lambda timeout_s: words.pop(0))
    loop = InnerLoop(channel, model, Manifest())
    shared = SharedState.create(folder, loop.layout.total_elements)
    shared.anchor.copy_(torch.randn(shared.elements, generator=torch.Generator().manual_seed(3)) * 0.05)
    words += [shared.as_message(), Load(version=4, keep="drop", slot=0, tokens=0, steps=0, spare=0)]
    loop.attach()
    return Run(SimpleNamespace(), loop, RunOptimizer(torch.optim.SGD(model.parameters()), print), "me")  # type: ignore[arg-type]


def learn(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)


def made(transformers: Any, name: str) -> Any:
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    torch.manual_seed(1)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "dtype"), [("gpt2", "float32"), ("llama", "float32"), ("llama", "bfloat16")]
)
def test_what_is_saved_loads_and_gives_the_runs_logits_bit_for_bit(
    tmp_path: Path, name: str, dtype: str
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    model = made(transformers, name).to(getattr(torch, dtype))
    run = run_of(tmp_path / "shared", model)
    expected = model(IDS).logits
    learn(model)
    run.save_pretrained(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert str(loaded.dtype) == f"torch.{dtype}" and torch.equal(loaded(IDS).logits, expected)
    assert not torch.equal(model(IDS).logits, expected)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    run.save_pretrained(tmp_path / "again")
    for file in names:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_of_a_lora_model_the_adapter_leaves_with_its_config(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    peft: Any = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(made(transformers, "llama"), options).eval()
    run = run_of(tmp_path / "shared", model)
    expected = model(IDS).logits
    learn(model)
    run.save_pretrained(tmp_path / "out")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    loaded = peft.PeftModel.from_pretrained(made(transformers, "llama"), tmp_path / "out").eval()
    assert torch.equal(loaded(IDS).logits, expected)


class Writes(nn.Linear):
    """As models of transformers do; and a tokenizer."""

    written: Any = None

    def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
        type(self).written = state_dict if state_dict is not None else "tokenizer"


def test_the_model_is_given_the_runs_weights_and_its_own_frozen_ones(tmp_path: Path) -> None:
    model = Writes(2, 2)
    model.bias.requires_grad = False
    before = model.bias.clone()
    run = run_of(tmp_path / "shared", model)
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
