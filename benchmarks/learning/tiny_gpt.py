"""A byte-level GPT that a laptop's CPU can train: the model on which the tables of docs/learning.md rest.

Owns: the network, its initial values and how it is evaluated.  Must not know: rounds, where its bytes come from.

Pre-norm blocks, learned positions, GELU, no biases, one matrix for embedding and head.  Letters in shape
comments: B batch, T bytes in a row, C width, H heads, V = 256 byte values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.protocol.errors import UserError

VOCAB = 256
_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"model {name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise UserError(f"model width {self.width} must be a multiple of heads {self.heads}")


class GPTOutput(NamedTuple):
    logits: Tensor  # [B, T, V]
    loss: Tensor | None  # scalar mean cross-entropy in nats per byte; None if nothing was there to predict


class TinyGPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.bytes = nn.Embedding(VOCAB, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(AttentionBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> GPTOutput:
        """tokens [B, T] int64; targets [B, T] int64, or None: each byte is to predict the one after it.

        Without targets one more byte than the context may be passed: the last is then only predicted, so that
        `model(window).loss` is the loss of a whole window of `ByteWindows`.
        """
        context = self.config.context
        longest = context if targets is not None else context + 1
        if tokens.shape[1] > longest:
            raise ValueError(f"{tokens.shape[1]} bytes in a row do not fit the model's context of {context}")
        inputs = tokens[:, :context]
        places = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.bytes(inputs) + self.positions(places)  # [B, T, C]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # [B, T, V]
        if targets is None:
            targets = tokens[:, 1:]
        predicted = logits[:, : targets.shape[1]]
        if predicted.numel() == 0:
            return GPTOutput(logits, None)
        # fp32, because a bf16 log-sum-exp over 256 values loses the digits that the last epochs improve.
        return GPTOutput(logits, F.cross_entropy(predicted.float().flatten(0, 1), targets.flatten()))


class AttentionBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_mix = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.mixed = nn.Linear(config.width, config.width, bias=False)
        self.norm_think = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_mix(x))
        x = x + self.down(F.gelu(self.up(self.norm_think(x))))
        return x

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, T, C/H]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.mixed(y.transpose(1, 2).reshape(batch, length, width))  # [B, T, C]
        return mixed


def build(config: GPTConfig, seed: int) -> TinyGPT:
    """First values depend on `config` and `seed` alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):  # the layers' own constructors draw from it
        model = TinyGPT(config)
    fill_all(model, config.layers, torch.Generator().manual_seed(seed))
    return model


def fill_all(module: nn.Module, layers: int, generator: torch.Generator | None = None) -> None:
    # Each block adds to the residual stream twice; scaled down so that its variance does not grow with depth.
    residual_std = _INIT_STD / math.sqrt(2 * layers)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("mixed.weight", "down.weight"))
                _fill(parameter, residual_std if is_residual else _INIT_STD, generator)


def _fill(parameter: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Uniform values of the given deviation, with the same bits on every machine.

    Torch's normal_ takes different paths on different CPUs.  Integers are exact, and so is centring them; the
    one rounding is the last multiplication.
    """
    steps = torch.randint(0, 2**24, parameter.shape, generator=generator).to(torch.float32)
    parameter.copy_((steps - 2.0**23) * (std * math.sqrt(12.0) / 2**24))


@torch.no_grad()
def evaluate(model: TinyGPT, data: Tensor, windows: int = 32, batch: int = 8) -> float:
    """Mean loss in nats per byte over `windows` fixed windows, spread evenly over `data` [N] uint8.

    The same data gives the same windows at every call and on every peer, so that losses can be compared.
    """
    length = model.config.context + 1
    last_start = data.numel() - length
    if last_start < 0 or windows < 1:
        raise UserError(f"cannot cut {windows} windows of {length} bytes out of {data.numel()} bytes")
    starts = [last_start * i // max(1, windows - 1) for i in range(windows)]
    device = model.bytes.weight.device
    was_training = model.training
    model.eval()
    try:
        total = 0.0
        for first in range(0, windows, batch):
            some = starts[first : first + batch]
            tokens = torch.stack([data[start : start + length] for start in some]).to(device, torch.int64)
            loss = model(tokens).loss
            total += float(loss) * len(some)
        return total / windows
    finally:
        model.train(was_training)


# ---- the model in parts ------------------------------------------------------------------------------------


class Embed(nn.Module):
    """The first part of an untied TinyGPT: [B, T] int64 -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCAB, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        fill_all(self, config.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Block(AttentionBlock):
    """A part between them, drawn from torch's own generator, which whoever builds parts has seeded."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        fill_all(self, config.layers)


class OutputHead(nn.Module):
    """The last part: [B, T, C] -> logits [B, T, V], by a matrix of its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        fill_all(self, config.layers)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(logits: Tensor, riders: Mapping[str, Tensor]) -> Tensor:
    """Of what the last part gives; fp32 as in TinyGPT itself."""
    return F.cross_entropy(logits.float().flatten(0, 1), riders["labels"].flatten())


def untied_parts(config: GPTConfig) -> list[Callable[[], nn.Module]]:
    """A TinyGPT whose head has a matrix of its own, as parts for a pipeline: layers + 2 of them."""
    return [
        partial(Embed, config),
        *(partial(Block, config) for _ in range(config.layers)),
        partial(OutputHead, config),
    ]
