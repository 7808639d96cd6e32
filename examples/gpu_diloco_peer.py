"""The training script of gpu_diloco.py: a byte-level Llama as a peer, or alone with the batches of all peers in one.

python examples/gpu_diloco_peer.py tiny|gpu OUT.json           alone
python examples/gpu_diloco_peer.py tiny|gpu OUT.json URL KEY   a peer
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import farflung
from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.builtin.llama import Llama, evaluate
from farflung.protocol.manifest import ModelSection

PEERS, EVERY = 4, 50
SHAPES = {
    "tiny": ModelSection(preset="tiny"),
    "gpu": ModelSection(preset="125M", vocab=256),
}  # 0.1 and 85 million parameters
ROUNDS, BATCH, RATE = {"tiny": 3, "gpu": 20}, {"tiny": 4, "gpu": 8}, {"tiny": 3e-3, "gpu": 6e-4}


def main(size: str, out: str, url: str | None = None, key: str | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    corpus, model = load_corpus(), Llama(SHAPES[size], seed=0).to(device)
    windows = ByteWindows(corpus.train, SHAPES[size].context)
    inner = torch.optim.AdamW(model.parameters(), RATE[size])
    losses = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(batch.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.detach())  # read at the end: nothing waits for the GPU
        return loss

    if url is None:
        all_of_them = DataLoader(windows, PEERS * BATCH[size], shuffle=True, drop_last=True)
        for _, batch in zip(range(ROUNDS[size] * EVERY), all_of_them, strict=False):
            step(batch)
            inner.step()
            inner.zero_grad()
    else:
        with farflung.join(url, model, inner, identity=key) as run:  # at the end the model is the run's
            for batch in run.batches(windows):
                run.step(step(batch))
    found = {"losses": torch.stack(losses).tolist(), "held_out": evaluate(model, corpus.held_out)}
    found["values"], found["device"] = sum(each.numel() for each in model.parameters()), device.type
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
