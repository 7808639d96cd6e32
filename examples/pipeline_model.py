"""A model in parts, in a run whose updates are exact gradients of large batches: see examples/README.md.

python examples/pipeline_model.py "URL" [KEY_FILE]         this script is the trainer and starts its own agent
farflung join --script examples/pipeline_model.py "URL"    the agent starts this script, again if it crashes
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from custom_model import pictures
from torch import nn

import farflung


class Convolutions(nn.Sequential):
    def __init__(self, inside: int, outside: int) -> None:
        shrink = [
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside),
            nn.GELU(),
            nn.MaxPool2d(2),
        ]
        super().__init__(*shrink)


class Head(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(32 * 16, 4))


def main(url: str | None = None, key_file: str | None = None) -> None:
    torch.set_num_threads(1)
    # Each part is built under a seed of the run's and its number: the same first values at every peer.
    parts = [partial(Convolutions, 1, 16), partial(Convolutions, 16, 32), Head]
    model = farflung.pipeline(
        url,
        parts,
        data=partial(pictures, seed=2, count=16384),
        inputs=("x",),
        riders=("kind",),  # travels along to the loss
        loss=lambda logits, riders: F.cross_entropy(logits, riders["kind"]),
        identity=key_file,
    )  # returns when the run is over: the optimizer is the run's, so there is no loop here
    if len(list(model.children())) < len(parts):
        return  # of a model in several stages this peer has one: farflung checkpoint export joins them
    x, kind = (each.to(next(model.parameters()).device) for each in pictures(seed=3, count=2048).tensors)
    right = (model.eval()(x).argmax(1) == kind).float().mean()
    print(f"{right:.1%} right on new data")


if __name__ == "__main__":
    main(*sys.argv[1:])
