"""The built-in training in synchronous batches, of the whole model or of one that is cut into stages, as parts.

Found by peer/builtin/trainer.py where the run learns so.  The gradients are this peer's, the optimizer is the run's:
there is no step to take here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset

from farflung.peer.builtin.corpus import Windows, held_out_rows, windows_of
from farflung.peer.builtin.llama import next_token_loss, parts_of, sizes_of
from farflung.peer.builtin.named_model import NamedModel, hf_config_of, model_of
from farflung.peer.pipeline.api import TakesPart, hold_a_stage
from farflung.peer.pipeline.hf import hf_parts
from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.pipeline.summing_loop import BatchLoop
from farflung.peer.room import best_device
from farflung.peer.settings import own_config
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

    def __init__(self, model: NamedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, window: Tensor) -> Tensor:
        loss: Tensor = self.model.loss(window)
        return loss


def _train_whole(connection: Connection, out: Path | None) -> None:
    manifest, agent = connection.manifest, connection.agent
    model = model_of(manifest).to(best_device())
    windows, held_out = windows_of(manifest), _held_out(manifest)
    samples = Samples(windows, ("window",), (), manifest.run.seed, held_out)
    stage = StageLoop(Stage(0, [_WithLoss(model)]), manifest.run.seed, lambda loss, riders: loss)
    loop = BatchLoop(agent.channel, model.module, stage, samples, manifest, agent.problem)
    loop.run()
    if out is not None:
        save_weights(loop.layout, loop.shared, out)


def _train_a_stage(connection: Connection, out: Path | None) -> None:
    manifest = connection.manifest
    sizes = sizes_of(manifest)
    parts = hf_parts(hf_config_of(sizes)) if sizes.config else parts_of(sizes, manifest.run.seed)
    windows, held_out = NextTokens(windows_of(manifest)), _held_out(manifest)
    rows = (lambda: NextTokens(held_out())) if held_out is not None else None
    samples = Samples(windows, ("ids",), ("labels",), manifest.run.seed, rows)
    loop = hold_a_stage(connection, parts, samples, next_token_loss)
    if out is not None:
        save_weights(loop.held.layout, loop.held.shared, out)


def _held_out(manifest: Manifest) -> Callable[[], Windows] | None:
    """Opened when it is asked for: what can't be read is no reason to stop training."""
    return partial(held_out_rows, manifest, own_config({}).data) if manifest.eval.source else None


class NextTokens(Dataset[dict[str, Tensor]]):
    """The same windows as what goes in and what is to come out: `ids` and `labels`, each [context] int64."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index]
        return {"ids": window[:-1], "labels": window[1:]}
