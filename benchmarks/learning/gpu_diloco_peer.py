"""The training script of gpu_diloco.py: a byte-level Llama as a peer of a run, or alone with the batches of all peers.

python benchmarks/learning/gpu_diloco_peer.py tiny|gpu RUN.toml OUT.json           alone
python benchmarks/learning/gpu_diloco_peer.py tiny|gpu RUN.toml OUT.json URL KEY   a peer

After each round it appends a line to OUT.jsonl, so that what is known by then is kept, whenever it is stopped.
"""

import itertools
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import farflung
from farflung.optim.schedule import rates_of
from farflung.peer.builtin.corpus import ByteWindows, Corpus, load_corpus
from farflung.peer.builtin.llama import Llama, evaluate
from farflung.protocol.manifest import Manifest, ModelSection

SHAPES = {
    "tiny": ModelSection(preset="tiny"),
    "gpu": ModelSection(layers=8, width=384, heads=6, context=512),  # 14 million parameters
}
HELD_OUT = {"tiny": 32, "gpu": 512}  # windows


def text_of(size: str) -> Corpus:
    """Python sources: a few for the small one, so that it goes through them more than once; else all packages here."""
    return (
        load_corpus(100_000) if size == "tiny" else load_corpus(200_000_000, sysconfig.get_paths()["purelib"])
    )


def for_ever(windows: ByteWindows, batch: int) -> Iterator[torch.Tensor]:
    """Epoch after epoch, each in another order."""
    yield from itertools.chain.from_iterable(
        DataLoader(windows, batch, shuffle=True, drop_last=True) for _ in itertools.count()
    )


class Log:
    def __init__(self, path: Path, every: int) -> None:
        self._file, self._every = path.with_suffix(".jsonl").open("w"), every
        self._losses: list[torch.Tensor] = []
        self._began = time.perf_counter()
        self.rounds: list[float] = []

    def add(self, loss: torch.Tensor) -> None:
        """Read once a round: between them nothing waits for the GPU."""
        self._losses.append(loss.detach())
        if len(self._losses) == self._every:
            self.rounds.append(torch.stack(self._losses).mean().item())
            now, self._losses = time.perf_counter(), []
            told = {"round": len(self.rounds), "loss": self.rounds[-1], "seconds": now - self._began}
            print(json.dumps(told), file=self._file, flush=True)
            self._began = now


def main(size: str, toml: str, out: str, url: str | None = None, key: str | None = None) -> None:
    manifest = Manifest.from_toml(Path(toml).read_text(), toml)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # peers on one machine would wait for each other's threads
    torch.manual_seed(0)
    corpus, model = text_of(size), Llama(SHAPES[size], seed=0).to(device)
    windows = ByteWindows(corpus.train, SHAPES[size].context)
    inner = torch.optim.AdamW(model.parameters(), manifest.inner.lr, (0.9, 0.95), fused=device.type == "cuda")
    log = Log(Path(out), manifest.round.sync_every)

    def step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(batch.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        log.add(loss)
        return loss

    began = time.perf_counter()
    if url is None:
        rate = LambdaLR(inner, rates_of(manifest, manifest.total_steps).share)
        # The batch of a step is that of all peers together.
        batches = for_ever(windows, manifest.data.batch * manifest.run.min_peers)
        for batch in itertools.islice(batches, manifest.total_steps):
            step(batch)
            inner.step()
            inner.zero_grad()
            rate.step()
    else:
        with farflung.join(url, model, inner, identity=key) as run:  # at the end the model is the run's
            rate = LambdaLR(run.optimizer, run.lr_lambda())
            for batch in run.batches(windows):
                run.step(step(batch))
                rate.step()
    seconds = time.perf_counter() - began
    found = {"losses": log.rounds, "held_out": evaluate(model, corpus.held_out, HELD_OUT[size])}
    found |= {"values": sum(each.numel() for each in model.parameters()), "device": device.type}
    found |= {"seconds": seconds, "text_bytes": corpus.train.numel()}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
