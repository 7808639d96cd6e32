"""A LightningModule in a run: two lines more than without one.

Everybody runs this script in a run whose manifest asks for an own model (custom_run.toml will do):

farflung join --identity a.pem --script lightning_model.py "URL"   or: python lightning_model.py "URL" a.pem
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import farflung

try:
    import lightning
except ImportError:
    print("this example needs lightning: pip install lightning", file=sys.stderr)
    sys.exit(2)  # farflung join does not start a script again that ended so


class Sums(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        # `step` is the run's: see lightning_run.
        rate = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


def main(url: str | None = None, identity: str | None = None) -> None:
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(2))
    data = farflung.lightning_run(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), url, identity=identity
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=-1, callbacks=[data], **quiet)
    module = Sums()
    trainer.fit(module, data)
    torch.save(module.state_dict(), f"{data.run.name}.pt")
    print(f"{data.run.name}: version {data.run.version}, {trainer.global_step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
