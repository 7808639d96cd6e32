"""The built-in model: a decoder as Llama and Qwen 3 have it, whole, or any consecutive parts of it.

RMSNorm, rotary positions, grouped keys, SwiGLU, on request norms of queries and keys and a head of its own.  Tensors
have the names that transformers gives them, in a part too, so an exported folder needs no table of names.  First values
follow from the run's seed and a tensor's name alone: the same bits on every machine, and however the model is cut.
Called by the trainer, demo, examples and benchmarks.  Must not know rounds, or where its tokens come from.

Letters in shape comments: B batch, T tokens in a row, C width, H heads, K heads of keys, D width of a head, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farflung.protocol.errors import UserError
from farflung.protocol.manifest import Manifest, ModelSection
from farflung.protocol.model_schema import parts_of as parts_on_paper

INIT_STD = 0.02
# Rows of logits that are there at once.  Of 50,000 words in fp32 they would be the largest thing of a step by far.
LOGIT_ROWS = 2048
DRAWN_AT_ONCE = 1 << 20  # values, which fit a cache
_TO_RESIDUAL: Final = ("o_proj.weight", "down_proj.weight")


def sizes_of(manifest: Manifest) -> ModelSection:
    """UserError where the run's model, or its data, comes with a script."""
    if not manifest.model.kind or not manifest.data.source:
        raise UserError(
            f"run '{manifest.run.name}' brings its own model or data: join it with its training script, "
            "which calls farflung.join or farflung.pipeline"
        )
    return manifest.model


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        # Under autocast x is bf16 and the weight fp32, and for that mixture torch has no fused kernel.
        weight = self.weight
        assert weight is not None
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps)


class Past:
    """Of one row of ids: what those so far gave each layer, for the next ones to attend to."""

    def __init__(self, sizes: ModelSection, count: int, device: torch.device) -> None:
        """`count`: so many ids it has room for."""
        shape = (sizes.layers, 2, 1, sizes.kv_heads, count, sizes.head_dim)
        self.count, self._kept = 0, torch.empty(shape, device=device)

    def attend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all ids so far [1, K, count + T, D], with these of the next T."""
        stop = self.count + k.shape[2]
        kept = self._kept[layer, :, :, :, :stop]
        kept[0, :, :, self.count :], kept[1, :, :, self.count :] = k, v
        return kept[0], kept[1]


class Attention(nn.Module):
    def __init__(self, sizes: ModelSection) -> None:
        super().__init__()
        self.head_dim, self.is_grouped = sizes.head_dim, sizes.heads != sizes.kv_heads
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, queries, bias=False)
        self.k_proj = nn.Linear(sizes.width, keys, bias=False)
        self.v_proj = nn.Linear(sizes.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)
        self.q_norm = Norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else nn.Identity()
        self.k_norm = Norm(sizes.head_dim, sizes.norm_eps) if sizes.qk_norm else nn.Identity()

    def forward(self, x: Tensor, turns: Tensor, past: Past | None = None, layer: int = 0) -> Tensor:
        """`past`: of a row that is made id by id; all of it so far at first, and then one id at a time."""
        q = turned(self.q_norm(self._heads(self.q_proj(x))), turns)  # [B, H, T, D]
        k = turned(self.k_norm(self._heads(self.k_proj(x))), turns)  # [B, K, T, D]
        v = self._heads(self.v_proj(x))
        if past is not None:
            assert past.count == 0 or x.shape[1] == 1
            k, v = past.attend(layer, k, v)
        is_causal = past is None or past.count == 0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=self.is_grouped)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, sizes: ModelSection) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_width, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, sizes: ModelSection) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), Mlp(sizes)
        self.input_layernorm = Norm(sizes.width, sizes.norm_eps)
        self.post_attention_layernorm = Norm(sizes.width, sizes.norm_eps)

    def forward(self, x: Tensor, turns: Tensor, past: Past | None = None, layer: int = 0) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns, past, layer)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Body(nn.Module):
    """`model.` in the names of tensors."""

    def __init__(self, sizes: ModelSection, parts: range) -> None:
        super().__init__()
        if 0 in parts:
            self.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
        numbers = [part - 1 for part in parts if 0 < part <= sizes.layers]
        self.layers = nn.ModuleDict({str(number): Layer(sizes) for number in numbers})
        if sizes.layers + 1 in parts:
            self.norm = Norm(sizes.width, sizes.norm_eps)


class Llama(nn.Module):
    """Parts [first, stop) of the model: 0 is the embedding, then come the layers, then the norm with the head.

    In go token ids [B, T], or what the part before gave [B, T, C]; out come logits [B, T, V] where the head is.
    """

    def __init__(self, sizes: ModelSection, seed: int = 0, first: int = 0, stop: int | None = None) -> None:
        super().__init__()
        last = parts_on_paper(sizes) - 1
        self.sizes = sizes
        self.recompute = False  # layers, in the backward pass: of each its input alone is kept
        self.parts = range(first, last + 1 if stop is None else stop)
        with torch.random.fork_rng(devices=[]):  # torch's own layers draw values, which are replaced below
            self.model = _Body(sizes, self.parts)
            if last in self.parts:
                self.lm_head = nn.Linear(sizes.width, sizes.vocab, bias=False)
                if sizes.tied:
                    self.lm_head.weight = self.model.embed_tokens.weight
        fill(self, seed, sizes.layers)

    @property
    def module(self) -> nn.Module:
        """What the run exchanges."""
        return self

    @property
    def has_head(self) -> bool:
        return self.parts.stop == parts_on_paper(self.sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        return self.lm_head(x) if self.has_head else x

    def hidden(self, x: Tensor, past: Past | None = None) -> Tensor:
        """Before the head."""
        if 0 in self.parts:
            x = self.model.embed_tokens(x)
        before = past.count if past is not None else 0
        turns = rotation(self.sizes, before + x.shape[1], x.device)[:, before:]
        again = self.recompute and torch.is_grad_enabled()
        for number, layer in self.model.layers.items():
            if past is not None:
                x = layer(x, turns, past, int(number))
            else:
                x = checkpoint(layer, x, turns, use_reentrant=False) if again else layer(x, turns)
        if past is not None:
            past.count += x.shape[1]
        return self.model.norm(x) if self.has_head else x

    def next_logits(self, ids: Tensor, past: Past) -> Tensor:
        """Of the id after the last of these [V], in fp32.  ids [1, T]: those that are not in `past` yet."""
        logits: Tensor = self.lm_head(self.hidden(ids, past)[0, -1])
        return logits.float()

    def loss(self, window: Tensor) -> Tensor:
        """window [B, T + 1] int64: each token is to predict the one after it.  Mean nats a token, in fp32."""
        if window.shape[1] > self.sizes.context + 1:
            raise ValueError(
                f"{window.shape[1] - 1} tokens in a row do not fit the model's context of {self.sizes.context}"
            )
        return nats_a_token(self.lm_head, self.hidden(window[:, :-1]), window[:, 1:])

    def losses(self, window: Tensor) -> Tensor:
        """The same of each row by itself [B]."""
        return nats_by_row(self.lm_head, self.hidden(window[:, :-1]), window[:, 1:])

    def past_of(self, count: int, device: torch.device) -> Past:
        return Past(self.sizes, count, device)


def nats_a_token(head: nn.Module, x: Tensor, due: Tensor) -> Tensor:
    """x [B, T, C] before the head; due [B, T]."""
    rows, words = x.flatten(0, 1), due.flatten()

    def nats(piece: Tensor, due_here: Tensor) -> Tensor:
        # fp32, because a bf16 log-sum-exp over so many values loses the digits that the last epochs improve.
        return F.cross_entropy(head(piece).float(), due_here, reduction="sum")

    sums = partial(checkpoint, nats, use_reentrant=False)
    take = sums if torch.is_grad_enabled() and len(rows) > LOGIT_ROWS else nats
    pieces = zip(torch.split(rows, LOGIT_ROWS), torch.split(words, LOGIT_ROWS), strict=True)
    return torch.stack([take(piece, due_here) for piece, due_here in pieces]).sum() / len(words)


def nats_by_row(head: nn.Module, x: Tensor, due: Tensor) -> Tensor:
    rows = range(len(x))
    return torch.stack([nats_a_token(head, x[row : row + 1], due[row : row + 1]) for row in rows])


def rotation(sizes: ModelSection, count: int, device: torch.device) -> Tensor:
    """Cosines and sines [2, T, D] of each place, in fp32.  No buffer: there is nothing to exchange, or to copy."""
    steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device) / sizes.head_dim
    places = torch.arange(count, device=device, dtype=torch.float32)
    angles = torch.outer(places, 1.0 / sizes.rope_theta**steps).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Pairs are a head's two halves, as in transformers; files of Meta's have them side by side."""
    here = turns.to(x.dtype)
    near, far = torch.chunk(x, 2, -1)
    return x * here[0] + torch.cat((-far, near), -1) * here[1]


# ---- first values ------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(module: nn.Module, seed: int, layers: int) -> None:
    """Uniform values of a deviation, with the same bits on every machine.

    torch's normal_ takes other paths on other CPUs.  Integers are exact, and so is centring them; the one rounding is
    the last multiplication.  A model on the meta device is left as it is.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            continue
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        # Each layer adds to the residual stream twice: scaled so that its variance does not grow with depth.
        std = INIT_STD / math.sqrt(2 * layers) if name.endswith(_TO_RESIDUAL) else INIT_STD
        said = blake3(f"farflung.llama.1:{seed}:{name}".encode()).digest(length=7)
        generator = torch.Generator().manual_seed(int.from_bytes(said, "little"))
        for piece in torch.split(parameter.view(-1), DRAWN_AT_ONCE):
            steps = torch.randint(0, 2**24, piece.shape, generator=generator, dtype=torch.int32)
            piece.copy_((steps.to(torch.float32) - 2.0**23) * (std * math.sqrt(12.0) / 2**24))


# ---- in parts, for a pipeline ------------------------------------------------------------------------------


def parts_of(sizes: ModelSection, seed: int) -> list[Callable[[], nn.Module]]:
    """Each builds one part of a model that is not tied."""
    count = parts_on_paper(sizes)
    return [partial(Llama, sizes, seed, number, number + 1) for number in range(count)]


def next_token_loss(logits: Tensor, riders: Mapping[str, Tensor]) -> Tensor:
    """Of what the last part gives."""
    return F.cross_entropy(logits.float().flatten(0, 1), riders["labels"].flatten())


# ---- text --------------------------------------------------------------------------------------------------


class WritesText(Protocol):
    """A model that goes on with a text."""

    def parameters(self) -> Iterator[nn.Parameter]: ...
    def past_of(self, count: int, device: torch.device) -> Any:
        """Nothing so far, with room for so many ids."""
        ...

    def next_logits(self, ids: Tensor, past: Any) -> Tensor: ...


@torch.no_grad()
def continued(
    model: WritesText,
    ids: list[int],
    most: int,
    temperature: float,
    seed: int,
    ends: frozenset[int] = frozenset(),
    words: int | None = None,
) -> Iterator[int]:
    """At most so many ids that come after these, one by one, until one that ends a document.  0: the likeliest ones.
    `words`: only so many of the vocabulary are in use.

    Drawn on the CPU: one seed makes one text, as far as devices compute the same.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    past = model.past_of(len(ids) + most, device)
    news = torch.tensor([ids], device=device)
    for _ in range(most):
        logits = model.next_logits(news, past).cpu()[:words]
        if temperature:
            drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            drawn = logits.argmax(keepdim=True)
        if int(drawn) in ends:
            return
        yield int(drawn)
        news = drawn[None].to(device)


# ---- held-out loss -----------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: Llama, data: Tensor, windows: int = 32, batch: int = 8) -> float:
    """Mean loss in nats per token over `windows` fixed windows, spread evenly over `data` [N].

    The same data gives the same windows at every call and on every peer, so that losses can be compared.
    """
    length = model.sizes.context + 1
    last_start = data.numel() - length
    if last_start < 0 or windows < 1:
        raise UserError(f"cannot cut {windows} windows of {length} tokens out of {data.numel()}")
    starts = [last_start * i // max(1, windows - 1) for i in range(windows)]
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        total = 0.0
        for first in range(0, windows, batch):
            some = starts[first : first + batch]
            tokens = torch.stack([data[start : start + length] for start in some]).to(device, torch.int64)
            total += float(model.loss(tokens)) * len(some)
        return total / windows
    finally:
        model.train(was_training)
