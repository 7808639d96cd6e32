"""A script as a researcher writes one, which takes down what it read: `parity_script.py URL IDENTITY MODEL_OUT inner`.

tests/real/test_parity.py computes the same in one process.  Around each step stands which version of each fragment the
model held.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import farflung

SAMPLES, WORDS, CONTEXT, WIDTH = 1 << 17, 64, 24, 48
CLIP = 1.0


class Net(nn.Module):
    """Each word is foretold from the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        seen = self.words(rows).cumsum(1) / torch.arange(1, rows.shape[1] + 1).view(1, -1, 1)
        hidden = seen + self.narrow(F.gelu(self.wide(self.before(seen))))
        made: Tensor = self.head(self.after(hidden))
        return made


def model() -> Net:
    torch.manual_seed(7)
    return Net()


class Rows(Dataset[Tensor]):
    """Each word follows one of two others; before a row stands its number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        follows = torch.randint(WORDS, (WORDS, 2), generator=generator)
        columns = [torch.randint(WORDS, (SAMPLES,), generator=generator)]
        for _ in range(CONTEXT):
            which = torch.randint(2, (SAMPLES,), generator=generator)
            columns.append(follows[columns[-1], which])
        self.rows = torch.stack([torch.arange(SAMPLES), *columns], 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def inner(net: nn.Module, word: str) -> torch.optim.Optimizer:
    if word == "muon":
        return farflung.muon(net, lr=3e-3)
    return torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def gradient(net: nn.Module, rows: Tensor) -> Tensor:
    words = rows[:, 1:]
    loss = F.cross_entropy(net(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    return loss


def main(url: str, identity: str, out: str, word: str) -> None:
    torch.set_num_threads(1)
    net = model()
    optimizer = inner(net, word)
    steps: list[dict[str, list[int]]] = []
    with farflung.join(url, net, optimizer, identity=identity) as run:

        def held() -> list[int]:
            return [account.version for account in run._loop.machine.accounts]

        for rows in run.batches(Rows()):
            step = {"before": held(), "rows": rows[:, 0].tolist()}
            run.step(gradient(net, rows))
            steps.append({**step, "after": held()})
        run.save(out)
    Path(out).with_suffix(".json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
