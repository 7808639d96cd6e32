"""The built-in trainer: `python -m farflung.peer.builtin.trainer [--out FILE]`.

Called by the command line, which starts it beside an agent.  It uses the public API and nothing else of the
run, so it is also the longest example of a training script.  Must not know the agent, rounds or leases.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from farflung.optim.recipes import inner_of
from farflung.peer.builtin.corpus import ByteTokens, ByteWindows, NextBytes, Windows, load_corpus
from farflung.peer.builtin.sizes import refuse_too_large
from farflung.peer.builtin.tiny_gpt import GPTConfig, TinyGPT, build, next_byte_loss, untied_parts
from farflung.peer.data.token_shards import TokenShards
from farflung.peer.pipeline.api import TakesPart, best_device, hold_a_stage
from farflung.peer.pipeline.batch_loop import BatchLoop
from farflung.peer.pipeline.parts import Stage
from farflung.peer.pipeline.samples import Samples
from farflung.peer.pipeline.stage_loop import StageLoop
from farflung.peer.room import room_on, rules_here
from farflung.peer.settings import own_config
from farflung.peer.trainer.api import Connection, connect, save_weights
from farflung.protocol.errors import FarflungError, Refused, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.process.exit_codes import OK, code_for

THREADS_VARIABLE = "FARFLUNG_THREADS"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m farflung.peer.builtin.trainer", description="the built-in trainer"
    )
    parser.add_argument("--out", type=Path, help="write the weights to this safetensors file at the end")
    options = parser.parse_args(arguments)
    try:
        torch.set_num_threads(_threads())
        train(options.out)
    except KeyboardInterrupt:
        return OK  # the run was left cleanly on the way out
    except FarflungError as error:
        code = code_for(error)
        if code != OK and not (isinstance(error, Refused) and error.said):
            text = error.reason if isinstance(error, Refused) else str(error)
            print(f"farflung: {text}", file=sys.stderr)
        return code
    return OK


def train(out: Path | None) -> None:
    connection = connect()
    _refuse_too_large(connection)
    if connection.manifest.pipeline.batch:
        train_in_batches(connection, out)
        return
    device = best_device()
    try:
        model = _model(connection.manifest).to(device)
        data = _windows(connection.manifest)
        optimizer = inner_of(connection.manifest, model)
    except UserError:
        connection.abandon()  # the agent ends with our exit code, and not as if we had left in good order
        raise
    inner = connection.manifest.inner
    with connection.join(model, optimizer) as run:
        rate = LambdaLR(run.optimizer, run.lr_lambda())
        for batch in run.batches(data):
            loss = model(batch.to(device)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            run.step(loss)
            rate.step()
        if out is not None:
            run.save(out)


def _refuse_too_large(connection: Connection) -> None:
    """Before anything is made, or read: the numbers are those of a stranger."""
    manifest = connection.manifest
    if manifest.model.builtin != "tiny-gpt":
        return  # told below
    try:
        refuse_too_large(manifest, rules_here(manifest), room_on(best_device()))
    except UserError:
        connection.abandon()
        raise


class _WithLoss(nn.Module):
    """The whole model as the only part of its pipeline."""

    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, window: Tensor) -> Tensor:
        loss: Tensor = self.model(window).loss
        return loss


def train_in_batches(connection: Connection, out: Path | None) -> None:
    """The gradients are this peer's, the optimizer is the run's: there is no step to take here."""
    manifest, agent = connection.manifest, connection.agent
    with TakesPart(connection):
        if manifest.pipeline.stages > 1:
            train_a_stage(connection, out)
            return
        model = _model(manifest).to(best_device())
        samples = Samples(_windows(manifest), inputs=("window",), riders=(), run_seed=manifest.run.seed)
        stage = StageLoop(Stage(0, [_WithLoss(model)]), manifest.run.seed, lambda loss, riders: loss)
        loop = BatchLoop(agent.channel, model, stage, samples, manifest, agent.problem)
        loop.run()
        if out is not None:
            save_weights(loop.layout, loop.shared, out)


def train_a_stage(connection: Connection, out: Path | None) -> None:
    """Of a TinyGPT whose head is a matrix of its own: the ends of a cut model lie with different peers."""
    manifest = connection.manifest
    parts = untied_parts(_shape(manifest))
    windows = NextBytes(_windows(manifest))
    samples = Samples(windows, inputs=("ids",), riders=("labels",), run_seed=manifest.run.seed)
    loop = hold_a_stage(connection, parts, samples, next_byte_loss, None)
    if out is not None:
        save_weights(loop.held.layout, loop.held.shared, out)


def _model(manifest: Manifest) -> TinyGPT:
    return build(_shape(manifest), manifest.run.seed)


def _shape(manifest: Manifest) -> GPTConfig:
    shape = manifest.model
    if shape.builtin != "tiny-gpt" or not manifest.data.source:
        raise UserError(
            f"run '{manifest.run.name}' brings its own model or data: join it with its training script, "
            "which calls farflung.join or farflung.pipeline"
        )
    return GPTConfig(shape.layers, shape.width, shape.heads, shape.context)


def _windows(manifest: Manifest) -> Windows:
    """[context + 1] bytes each, or as long as [data] length says."""
    if manifest.data.source == "python-stdlib":
        return ByteWindows(load_corpus().train, manifest.model.context)
    return ByteTokens(TokenShards.of_run(manifest, own_config({}).data))


def _threads() -> int:
    # One by default: more would take the cores from the agent, and from other peers on this machine.
    text = os.environ.get(THREADS_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{THREADS_VARIABLE} must be a whole number from 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
