"""An own model and own data in a farflung run.  examples/README.md tells how to run it in three terminals.

python examples/custom_model.py "URL" [KEY_FILE]         this script is the trainer and starts its own agent
farflung join --script examples/custom_model.py "URL"    the agent starts this script, again if it crashes
"""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import farflung

INPUTS, CLASSES = 16, 4


class Regions(Dataset):
    """Points and the region each lies in, drawn by a fixed random network: the same on every machine."""

    def __init__(self, seed: int, samples: int) -> None:
        fixed = torch.Generator().manual_seed(1)
        first, last = (torch.randn(size, generator=fixed) for size in ((INPUTS, 32), (32, CLASSES)))
        self.x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(seed))
        self.y = (torch.tanh(self.x @ first / 4) @ last).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def main(url: str | None = None, key_file: str | None = None) -> None:
    torch.set_num_threads(1)
    train, held_out = Regions(seed=2, samples=16384), Regions(seed=3, samples=2048)
    # First values need no common seed: the first peer's are the run's, and all others receive them.
    first, middle, last = nn.Linear(INPUTS, 128), nn.Linear(128, 128), nn.Linear(128, CLASSES)
    model = nn.Sequential(first, nn.BatchNorm1d(128), nn.GELU(), middle, nn.GELU(), last)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with farflung.join(url, model, inner, identity=key_file) as run:  # the run's state arrives here
        warmup = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.1, total_iters=20)
        for x, y in run.batches(train):  # leased samples, no overlap between peers
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            run.step(loss)  # the inner step; the outer round happens when it is due
            warmup.step()
        # The run's weights; `model` also holds a few steps that no round has used.
        run.save(out := f"{run.name}.safetensors")
        model.load_state_dict(load_file(out), strict=False)  # BatchNorm's integer counter is not in it
        right = (model.eval()(held_out.x).argmax(1) == held_out.y).float().mean()
        print(f"{run.name}: version {run.version}, {run.step_count} steps, {right:.1%} right on new data")


if __name__ == "__main__":
    main(*sys.argv[1:])
