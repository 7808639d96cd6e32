"""A small vision model of your own in a farflung run.  examples/README.md tells how to run it in three terminals.

python examples/custom_model.py "URL" [KEY_FILE]         this script is the trainer and starts its own agent
farflung join --script examples/custom_model.py "URL"    the agent starts this script, again if it crashes
"""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import farflung


def pictures(seed: int, count: int) -> TensorDataset:
    """Noise with a bar in it that lies, stands, falls or rises: the same on every machine."""
    dice = torch.Generator().manual_seed(seed)
    kinds, places = (
        torch.randint(4, (count,), generator=dice),
        torch.randint(-4, 5, (count, 1, 1), generator=dice),
    )
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    away = torch.stack([y - 8, x - 8, x - y, x + y - 15])[kinds] - places  # from the middle of the bar
    return TensorDataset(((away.abs() < 2) + torch.randn(count, 16, 16, generator=dice)).unsqueeze(1), kinds)


def main(url: str | None = None, key_file: str | None = None) -> None:
    torch.set_num_threads(1)
    # First values need no common seed: the first peer's are the run's, and all others receive them.
    first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.MaxPool2d(2))
    model = nn.Sequential(first, nn.Conv2d(16, 32, 3), nn.GELU(), nn.Flatten(), nn.Linear(32 * 36, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with farflung.join(url, model, inner, identity=key_file) as run:  # the run's state arrives here
        for x, kind in run.batches(pictures(seed=2, count=16384)):  # leased samples, no overlap between peers
            loss = F.cross_entropy(model(x), kind)
            loss.backward()
            run.step(loss)  # the inner step; the outer round happens when it is due
        # The run's weights; `model` also holds a few steps that no round has used.
        run.save(out := f"{run.name}.safetensors")
        model.load_state_dict(load_file(out), strict=False)  # BatchNorm's integer counter is not in it
        x, kind = pictures(seed=3, count=2048).tensors
        right = (model.eval()(x).argmax(1) == kind).float().mean()
        print(f"{run.name}: version {run.version}, {run.step_count} steps, {right:.1%} right on new data")


if __name__ == "__main__":
    main(*sys.argv[1:])
