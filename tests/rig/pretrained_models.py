"""Tiny models of transformers, made from configs, and runs of them without an agent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from farflung.peer.local.memory import SharedState
from farflung.peer.local.words import LoadState
from farflung.peer.trainer.api import Run
from farflung.peer.trainer.inner_loop import InnerLoop
from farflung.peer.trainer.run_optimizer import RunSteps
from farflung.protocol.manifest import Manifest

IDS = torch.arange(12).reshape(1, 12)
WORDS = ("zero", "one", "two", "three", "four")


def run_of(folder: Path, model: nn.Module, takes: bool = True) -> Run:
    """`takes`: the run's state is the model's, as it is now; else it is another one, which the model is given."""
    folder.mkdir()
    words: list[Any] = []
    channel: Any = SimpleNamespace(send=lambda word: None, recv=lambda timeout_s: words.pop(0))
    loop = InnerLoop(channel, model, Manifest())
    shared = SharedState.create(folder, loop.layout.total_elements)
    if takes:
        loop.layout.write_anchor(model, shared.anchor)
    else:
        draw = torch.Generator().manual_seed(3)
        shared.anchor.copy_(torch.randn(shared.elements, generator=draw) * 0.05)
    words += [shared.as_message(), LoadState(version=4, keep="drop", slot=0, tokens=0, steps=0, spare=0)]
    loop.attach()
    return Run(SimpleNamespace(), loop, RunSteps(torch.optim.SGD(model.parameters()), print), "me")  # type: ignore[arg-type]


def learn(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)


def made(transformers: Any, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """In this dtype as `from_pretrained` makes it: the frequencies of a rotary embedding stay float32, which
    `.to(dtype)` would round."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    torch.manual_seed(1)
    if name == "gpt2":
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(**sizes, **ends)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, max_position_embeddings=32)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def lora(transformers: Any, peft: Any, more: dict[str, Any]) -> Any:
    """Every value of it differs from what peft begins with: its B is zero."""
    modules = ["q_proj", "v_proj", "k_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    options = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(made(transformers, "llama"), options).eval()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model


def tokenizer(transformers: Any) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    inner = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="zero"))
    inner.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="zero")
