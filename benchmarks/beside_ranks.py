"""One process of benchmarks/beside.py: a rank of torch.distributed.pipelining, or the script of one of our peers.

    farflung join --script benchmarks/beside_ranks.py URL ours SHAPE
    python benchmarks/beside_ranks.py theirs SHAPE RANK STORE

Both hold the same layers with the same first values, take the same microbatches in the same order and step by AdamW, so
that the losses can be compared.  `SHAPE` is JSON.  A rank prints one JSON line for each batch.  This file imports
nothing that lies beside it: our agents run it from anywhere.  Must not know what is done with the figures.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import farflung
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.pipeline.parts import build

SEED, KINDS, DISTINCT = 0, 16, 32
LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1
SCHEDULES = {"GPipe": "ScheduleGPipe", "1F1B": "Schedule1F1B"}


@dataclass(frozen=True)
class Shape:
    stages: int
    layers: int  # of a stage
    width: int
    tokens: int  # of a microbatch, which is one sample
    micros: int  # of a batch
    batches: int
    schedule: str = "GPipe"  # of theirs
    again: bool = False  # theirs keeps nothing of the way there, and goes it again on the way back, as ours
    pause_ms: float = 0.0  # that a stage waits on each way there, as if something else computed

    @property
    def parts(self) -> list[partial[nn.Module]]:
        pauses_s = [self.pause_ms / 1000, *[0.0] * (self.layers - 1)] * self.stages
        blocks = [partial(Block, self.width, pause_s) for pause_s in pauses_s]
        return [*blocks, partial(nn.Linear, self.width, KINDS)]

    @property
    def cuts(self) -> list[int]:
        """At which parts stages 1, 2, ... begin."""
        return [self.layers * stage for stage in range(1, self.stages)]


class Block(nn.Module):
    def __init__(self, width: int, pause_s: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self._pause_s = pause_s

    def forward(self, x: Tensor) -> Tensor:
        if self._pause_s:
            time.sleep(self._pause_s)
        return x + self.down(F.gelu(self.up(x)))


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A few samples over and over, so that a long run needs no memory; no epoch ends within a run."""

    def __init__(self, shape: Shape) -> None:
        dice = torch.Generator().manual_seed(9)
        self._x = torch.randn(DISTINCT, shape.tokens, shape.width, generator=dice)
        self._kinds = torch.randint(KINDS, (DISTINCT, shape.tokens), generator=dice)
        self._length = shape.micros * (shape.batches + 1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self._x[place % DISTINCT], self._kinds[place % DISTINCT]


def loss_of(logits: Tensor, kinds: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), kinds.flatten())


def ours(shape: Shape) -> None:
    farflung.pipeline(
        None,
        shape.parts,
        data=Data(shape),
        inputs=("x",),
        riders=("kinds",),
        loss=lambda logits, riders: loss_of(logits, riders["kinds"]),
    )


class Again(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._module, x, use_reentrant=False)


def stage_of(shape: Shape, rank: int) -> nn.Module:
    bounds = [0, *shape.cuts, len(shape.parts)]
    module = nn.Sequential(
        *(build(shape.parts[number], number, SEED) for number in range(bounds[rank], bounds[rank + 1]))
    )
    # Ours goes the way there once in the last stage, too.
    return Again(module) if shape.again and rank < shape.stages - 1 else module


def theirs(shape: Shape, rank: int, store: str) -> None:
    # Here: our peers would spend seconds on importing what they have no use for.
    from torch import distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=shape.stages)
    module, last = stage_of(shape, rank), rank == shape.stages - 1
    given = torch.empty(1, shape.tokens, shape.width, requires_grad=rank > 0)
    made = torch.empty(1, shape.tokens, KINDS if last else shape.width, requires_grad=True)
    # With both said, nothing is sent to find them out.
    stage = pipelining.PipelineStage(module, rank, shape.stages, torch.device("cpu"), (given,), (made,))
    schedule = getattr(pipelining, SCHEDULES[shape.schedule])(stage, shape.micros, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), LR, BETAS, weight_decay=WEIGHT_DECAY)
    data = Data(shape)
    for version in range(shape.batches):
        first = version * shape.micros
        places = permuted_range(SEED, 0, len(data), first, first + shape.micros)
        x, kinds = (torch.stack(column) for column in zip(*(data[place] for place in places), strict=True))
        losses: list[Tensor] = []
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        elif last:
            schedule.step(target=kinds, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        loss = float(torch.stack(losses).detach().mean()) if losses else None
        print(json.dumps({"seconds": time.perf_counter() - began, "loss": loss}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        ours(Shape(**json.loads(sys.argv[2])))
    else:
        theirs(Shape(**json.loads(sys.argv[2])), int(sys.argv[3]), sys.argv[4])
