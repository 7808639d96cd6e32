"""A trainer that takes almost no computing time: for storms and chaos tests, where only the rounds matter.

    farflung join --script tests/rig/light_trainer.py URL

FARFLUNG_STEP_S: how long a step takes (0.02 s), spent asleep.  FARFLUNG_VALUES: the size of the model (65536).
FARFLUNG_STEP_TIMES: a folder, in which a file with the number of this process tells when each step ended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec
import torch

import farflung
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.errors import FarflungError
from farflung.protocol.process.exit_codes import OK, code_for

VALUES = 65536


class Light(torch.nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(values, generator=generator))
        self.register_buffer("goal", torch.randn(values, generator=generator), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return ((self.weight - self.goal) ** 2).mean() + 0.0 * batch.float().mean()


def write_schema(place: Path, chunk_kb: int) -> None:
    """What a peer with this model says of it at the door, for those who only pretend to have it (shams.py)."""
    model = Light(VALUES)
    place.write_bytes(msgspec.msgpack.encode(ModelLayout.of(model, chunk_kb * 256).model_schema(model)))


def main() -> int:
    torch.set_num_threads(1)
    model = Light(int(os.environ.get("FARFLUNG_VALUES", VALUES)))
    step_s = float(os.environ.get("FARFLUNG_STEP_S", "0.02"))
    folder = os.environ.get("FARFLUNG_STEP_TIMES")
    place = Path(folder, str(os.getpid())) if folder else Path(os.devnull)
    try:
        with (
            place.open("a", buffering=1) as times,
            farflung.join(None, model, torch.optim.SGD(model.parameters(), lr=0.1)) as run,
        ):
            for batch in run.batches(range(1_000_000), batch_size=4):
                loss = model(batch)
                loss.backward()
                time.sleep(step_s)  # the computing that is left out
                run.step(loss)
                times.write(f"{time.monotonic():.3f}\n")
    except FarflungError as error:
        print(f"light trainer: {error}", file=sys.stderr)
        return code_for(error)
    return OK


if __name__ == "__main__":
    sys.exit(main())
