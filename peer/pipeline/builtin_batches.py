"""The built-in training in synchronous batches, of the whole model or of one that is cut into stages, as parts.

Found by peer/builtin/trainer.py where the run learns so.  The gradients are this peer's, the optimizer is the run's:
there is no step to take here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from farflung.peer.builtin.corpus import Windows, windows_of
from farflung.peer.builtin.tiny_gpt import VOCAB, AttentionBlock, GPTConfig, TinyGPT, build, fill_all
from farflung.peer.pipeline.api import TakesPart, hold_a_stage
from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.pipeline.summing_loop import BatchLoop
from farflung.peer.room import best_device
from farflung.peer.trainer.api import Connection, save_weights
from farflung.protocol.manifest import Manifest


def made(manifest: Manifest) -> Callable[[Connection, Path | None], None] | None:
    """What trains in such a run and writes the weights in the end; None: it is not one."""
    return _train if manifest.pipeline.batch else None


def _train(connection: Connection, out: Path | None) -> None:
    with TakesPart(connection):
        (_train_a_stage if connection.manifest.pipeline.stages > 1 else _train_whole)(connection, out)


class _WithLoss(nn.Module):
    """The whole model as the only part of its pipeline."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, window: Tensor) -> Tensor:
        loss: Tensor = self.model(window).loss
        return loss


def _train_whole(connection: Connection, out: Path | None) -> None:
    manifest, agent = connection.manifest, connection.agent
    model = build(GPTConfig.of_run(manifest), manifest.run.seed).to(best_device())
    samples = Samples(windows_of(manifest), inputs=("window",), riders=(), run_seed=manifest.run.seed)
    stage = StageLoop(Stage(0, [_WithLoss(model)]), manifest.run.seed, lambda loss, riders: loss)
    loop = BatchLoop(agent.channel, model, stage, samples, manifest, agent.problem)
    loop.run()
    if out is not None:
        save_weights(loop.layout, loop.shared, out)


def _train_a_stage(connection: Connection, out: Path | None) -> None:
    """Of a TinyGPT whose head is a matrix of its own: the ends of a cut model lie with different peers."""
    manifest = connection.manifest
    parts = untied_parts(GPTConfig.of_run(manifest))
    windows = NextBytes(windows_of(manifest))
    samples = Samples(windows, inputs=("ids",), riders=("labels",), run_seed=manifest.run.seed)
    loop = hold_a_stage(connection, parts, samples, next_byte_loss, None)
    if out is not None:
        save_weights(loop.held.layout, loop.held.shared, out)


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


class NextBytes(Dataset[dict[str, Tensor]]):
    """The same windows as what goes in and what is to come out: `ids` and `labels`, each [context] int64."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index]
        return {"ids": window[:-1], "labels": window[1:]}
