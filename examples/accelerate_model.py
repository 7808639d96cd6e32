"""A loop with accelerate in a run: accelerate prepares the model and the run's optimizer, and the run has the data.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script accelerate_model.py "URL"   or: python accelerate_model.py "URL" a.pem
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import farflung

try:
    from accelerate import Accelerator
except ImportError:
    print("this example needs accelerate: pip install accelerate", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so


def main(url: str | None = None, identity: str | None = None) -> None:
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with farflung.join(url, model, inner, identity=identity) as run:  # once the model is on its device
        optimizer = accelerator.prepare(run.optimizer)
        for inputs, wanted in run.batches(data):  # not prepared: accelerate's loaders read a batch ahead
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs.to(accelerator.device)), wanted.to(accelerator.device))
                accelerator.backward(loss)
                run.record(loss)
                optimizer.step()
                optimizer.zero_grad()
        run.save(f"{run.name}.safetensors")
        print(f"{run.name}: version {run.version}, {run.step_count} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
