"""The built-in trainer: `python -m farflung.peer.builtin.trainer [--out FILE]`.

Called by the command line, which starts it beside an agent.  It uses the public API and nothing else of the
run, so it is also the longest example of a training script.  Must not know the agent, rounds or leases.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from farflung.optim.recipes import inner_of
from farflung.peer.builtin.corpus import windows_of
from farflung.peer.builtin.llama import continued
from farflung.peer.builtin.named_model import MicroBatches, model_of
from farflung.peer.builtin.sizes import StepShape, shape_here
from farflung.peer.room import best_device, room_on, rules_here
from farflung.peer.trainer.api import Connection, connect
from farflung.protocol.errors import FarflungError, Refused, UserError
from farflung.protocol.process.exit_codes import OK, code_for
from farflung.protocol.process.log_lines import Teller
from farflung.protocol.process.mode_folders import made_by_first

THREADS_VARIABLE = "FARFLUNG_THREADS"
TEMPERATURE = 0.8  # of the texts that people see
# Modules of modes whose runs learn in another way than the loop below: `made(manifest)` is what trains then.
OTHER_WAYS: Final = ("farflung.peer.pipeline.builtin_batches",)


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
    shape = _shape_here(connection)
    manifest = connection.manifest
    if (train_otherwise := made_by_first(OTHER_WAYS, manifest)) is not None:
        train_otherwise(connection, out)
        return
    device = best_device()
    try:
        model = model_of(manifest).to(device)
        data = windows_of(manifest)
        optimizer = inner_of(manifest, model.module)
    except UserError:
        connection.abandon()  # the agent ends with our exit code, and not as if we had left in good order
        raise
    inner = manifest.inner
    precise = partial(torch.autocast, device.type, torch.bfloat16, enabled=inner.precision == "bf16")

    def losses(rows: Tensor) -> Tensor:
        with precise():
            return model.losses(rows.to(device))

    def writes(ids: list[int], most: int) -> Iterator[int]:
        # In fp32, whatever it is trained in: so machines of more kinds write the same.
        return continued(model, ids, most, TEMPERATURE, seed=0)

    micros = MicroBatches(model, shape, precise, Teller.from_environment("trainer"))
    micros.tell(manifest.data.batch)
    with connection.join(model.module, optimizer, losses, writes) as run:
        rate = LambdaLR(run.optimizer, run.lr_lambda())
        for batch in run.batches(data, pin=device.type == "cuda"):
            loss = micros.backward(batch.to(device, non_blocking=True))
            nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            run.step(loss)
            rate.step()
        if out is not None:
            run.save(out)


def _shape_here(connection: Connection) -> StepShape:
    """How a batch is computed.  UserError before anything is made, or read: the numbers are those of a stranger."""
    manifest = connection.manifest
    if not manifest.model.kind:
        return StepShape(manifest.data.batch)  # told below
    try:
        return shape_here(manifest, rules_here(manifest), room_on(best_device()))
    except UserError:
        connection.abandon()
        raise


def _threads() -> int:
    # One by default: more would take the cores from the agent, and from other peers on this machine.
    text = os.environ.get(THREADS_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{THREADS_VARIABLE} must be a whole number from 1, found {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
