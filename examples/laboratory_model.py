"""A model of 50 thousand parameters that says the next byte of Python's own sources, for `farflung simulate`.

farflung simulate laboratory_run.toml --script laboratory_model.py                 four peers, on this machine
farflung simulate laboratory_run.toml --script laboratory_model.py -- muon 0.02    with Muon inside, at that rate
"""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farflung

BEFORE, HELD_OUT = 8, 131_072  # bytes that it sees; of the text, those that nobody learns from


class Text(torch.utils.data.Dataset):
    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.all = torch.frombuffer(
            bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.all) - HELD_OUT - BEFORE

    def __getitem__(self, place: int) -> Tensor:
        return self.all[place : place + BEFORE + 1].long()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.first, self.second, self.head = nn.Linear(16 * BEFORE, 96), nn.Linear(96, 96), nn.Linear(96, 256)

    def loss(self, rows: Tensor) -> Tensor:
        x = F.gelu(self.first(self.embed(rows[:, :-1]).flatten(1)))
        return F.cross_entropy(self.head(x + F.gelu(self.second(x))), rows[:, -1])


torch.set_num_threads(1)
torch.manual_seed(0)
inner, lr = sys.argv[1:] or ("adamw", "0.01")
model, text = Model(), Text()
optimizer = farflung.inner_optimizer(inner, model, lr=float(lr), betas=(0.9, 0.99), weight_decay=0.0)
with farflung.join(None, model, optimizer) as run:
    rate = torch.optim.lr_scheduler.LambdaLR(run.optimizer, run.lr_lambda())  # [inner] schedule
    for rows in run.batches(text):
        loss = model.loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.step(loss)
        rate.step()
    held_out = text.all[-HELD_OUT:].unfold(0, BEFORE + 1, 1).long()
    run.log("held_out", run.evaluate(lambda: float(model.loss(held_out))))
