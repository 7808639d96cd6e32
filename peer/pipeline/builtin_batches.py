"""The built-in training in synchronous batches, of a whole model or of one that is cut into stages.

Found by peer/builtin/trainer.py where the run learns so.  The gradients are this peer's, the optimizer is the run's:
there is no step to take here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from farflung.peer.builtin.corpus import NextBytes, windows_of
from farflung.peer.builtin.tiny_gpt import GPTConfig, TinyGPT, build, next_byte_loss, untied_parts
from farflung.peer.pipeline.api import TakesPart, hold_a_stage
from farflung.peer.pipeline.batch_loop import BatchLoop
from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
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
