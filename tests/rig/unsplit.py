"""What a pipeline is compared with: one process that holds all parts and knows nothing of stages.

For tests of peer/pipeline and benchmarks/pipeline.py.  The models and data are small and made here; the loop keeps its
graph, as anybody's training loop does, and shares no code with StageLoop but for the seeds of what is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.builtin.llama import parts_of
from farflung.peer.pipeline.parts import Part, Tensors, as_output, build, seed_of_chance
from farflung.peer.pipeline.stage_loop import MicroActivations
from farflung.protocol.manifest import ModelSection
from rig.local_pipeline import LocalPipeline

CONTEXT = 48
SAMPLES = 2  # in a microbatch
MICROS = 6  # in a batch
HF_CONFIG = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Task:
    """A model in parts and what it learns.  `batch` gives the microbatches of one version, always the same ones."""

    parts: Callable[[int], list[Part]]  # by seed
    loss: Callable[..., Tensor]
    sample: Callable[[torch.Generator], tuple[Tensor, Tensor]]  # one microbatch: input, labels

    def batch(
        self, seed: int, version: int, micros: int = MICROS
    ) -> Iterator[tuple[MicroActivations, Tensors]]:
        dice = torch.Generator().manual_seed(seed * 100_003 + version)
        for number in range(micros):
            given, labels = self.sample(dice)
            tokens = labels.numel()
            yield MicroActivations(version, number, tokens, {"labels": labels}), (given,)


def _windows(dice: torch.Generator) -> tuple[Tensor, Tensor]:
    text = load_corpus(200_000).train
    starts = torch.randint(len(text) - CONTEXT - 1, (SAMPLES,), generator=dice)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).to(torch.int64)
    return rows[:, :-1], rows[:, 1:]


def _bars(dice: torch.Generator) -> tuple[Tensor, Tensor]:
    kinds, places = (
        torch.randint(4, (8 * SAMPLES,), generator=dice),
        torch.randint(-4, 5, (8 * SAMPLES, 1, 1), generator=dice),
    )
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    away = torch.stack([y - 8, x - 8, x - y, x + y - 15])[kinds] - places
    noise = torch.randn(8 * SAMPLES, 16, 16, generator=dice)
    return ((away.abs() < 2) + noise).unsqueeze(1), kinds


def _sequential(seed: int) -> list[Part]:
    torch.manual_seed(seed)
    return list(
        nn.Sequential(
            nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
            ),
            nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.GELU()),
            nn.Dropout(0.1),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * 36, 4)),
        )
    )


def _llama(seed: int) -> list[Part]:
    import transformers

    import farflung

    return farflung.hf_parts(transformers.LlamaConfig(**HF_CONFIG))


def next_token(logits: Tensor, item: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), item["labels"].flatten())


def _kind(logits: Tensor, item: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits, item["labels"])


SIZES = ModelSection(layers=4, width=48, heads=4, context=CONTEXT, tied=False)
BUILT_IN = Task(lambda seed: parts_of(SIZES, seed), next_token, _windows)


def _loud(seed: int) -> list[Part]:
    first, *others = parts_of(SIZES, 0)
    return [lambda: Loud(first()), *others]


class Loud(nn.Module):
    """One channel of what it gives is far larger than all others, as in large language models."""

    CHANNEL, TIMES = 5, 100.0

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, ids: Tensor) -> Tensor:
        given: Tensor = self.part(ids)
        loud = torch.zeros_like(given)
        loud[..., self.CHANNEL] = self.TIMES * given.detach().std()
        return given + loud


LOUD = Task(_loud, next_token, _windows)
SEQUENTIAL = Task(_sequential, _kind, _bars)
LLAMA = Task(_llama, next_token, _windows)


@dataclass
class AdamW:
    """The plain formula, one rounding after the other, for tensors by name."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    eps: float = 1e-8
    step_count: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        self.step_count += 1
        (b1, b2), t = self.betas, self.step_count
        for name, gradient in gradients.items():
            g = gradient.float()
            first, second = self.moments.setdefault(name, (torch.zeros_like(g), torch.zeros_like(g)))
            first.mul_(b1).add_(g * (1 - b1))
            second.mul_(b2).add_((g * g) * (1 - b2))
            update = (first / (1 - b1**t)) / ((second / (1 - b2**t)).sqrt() + self.eps)
            theta = parameters[name]
            theta.copy_(theta.float() * (1 - self.lr * self.decay) - update * self.lr)


@dataclass
class Nesterov:
    """The outer step of what local steps have moved, one rounding after the other, for tensors by name."""

    lr: float
    momentum: float
    moments: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> None:
        for name, d in moved.items():
            m = self.moments.setdefault(name, torch.zeros_like(d))
            m.mul_(self.momentum).add_(d)
            parameters[name].sub_((m * self.momentum + d) * self.lr)


class Unsplit:
    """All parts in one process: a graph from the data to the loss, one microbatch after the other."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.modules = [build(part, number, seed) for number, part in enumerate(task.parts(seed))]

    def named_tensors(self) -> dict[str, Tensor]:
        whole = nn.ModuleList(self.modules)
        return dict(whole.named_parameters()) | dict(whole.named_buffers())

    def batch(self, version: int) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of a token, and its gradient by name."""
        named = dict(nn.ModuleList(self.modules).named_parameters())
        sums: dict[str, Tensor] = {}
        total, tokens = 0.0, 0
        for micro, given in self.task.batch(self.seed, version):
            x: object = given
            for number, module in enumerate(self.modules):
                torch.manual_seed(seed_of_chance(self.seed, version, micro.number, number))
                y = module(*x)
                x = y if isinstance(y, tuple) else (y,)
            loss = self.task.loss(as_output(x), micro.riders)
            (loss * micro.tokens).backward()
            for name, parameter in named.items():
                if parameter.requires_grad:
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    sums[name] = sums[name] + grad.float() if name in sums else grad.float()
                    parameter.grad = None
            total, tokens = total + loss.item() * micro.tokens, tokens + micro.tokens
        return total / tokens, {name: each / tokens for name, each in sums.items()}


def train_unsplit(task: Task, seed: int, updates: int) -> tuple[str, list[float]]:
    """The hash of the whole model after so many updates, and the loss of each."""
    model, optimizer, losses = Unsplit(task, seed), AdamW(), []
    for version in range(updates):
        loss, gradients = model.batch(version)
        optimizer.step(model.named_tensors(), gradients)
        losses.append(loss)
    return weights_hash(model.named_tensors()), losses


def train_pipeline(
    task: Task,
    seed: int,
    updates: int,
    cuts: list[int],
    codecs: tuple[str, str] = ("fp32", "fp32"),
) -> tuple[str, list[float], LocalPipeline]:
    pipeline = LocalPipeline(task.parts(seed), cuts, task.loss, seed, codecs)
    optimizer, losses = AdamW(), []
    for version in range(updates):
        done = pipeline.batch(task.batch(seed, version))
        optimizer.step(pipeline.named_tensors(), pipeline.gradients(done.tokens))
        pipeline.clear()
        losses.append(done.loss)
    return weights_hash(pipeline.named_tensors()), losses, pipeline


def weights_hash(named: Mapping[str, Tensor]) -> str:
    """SHA-256 of every parameter and buffer with its name."""
    hasher = hashlib.sha256()
    for name in sorted(named):
        hasher.update(name.encode())
        hasher.update(named[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
