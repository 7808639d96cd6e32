"""Does rounding of results keep small values from moving?  An embedding of 16 thousand rows, over many rounds.

    python benchmarks/learning/gather_bias.py [--rounds 40] [--steps 20] [--peers 2] [--width 128] [--untied]

A mean is rounded to nearest in blocks of 256 values, and nobody carries over what that leaves out.  In a block with one
very large value small ones would be rounded to zero round after round, and never move.  Rows of rare words beside those
of frequent ones are where that might happen: a small Llama learns words of the standard library's sources, and what is
merged is compared with what is learned, summed over all rounds.

Prints for each part of the model: the 99th percentile of peak / median within blocks; the error of the sum; how much
of the sum's way is missing; and the share of values that were rounded to zero each time, though their way is more than
a hundredth of the median way.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from farflung.compression.codec import codec_named
from farflung.optim.outer import Nesterov
from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.builtin.llama import Llama
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.manifest import ModelSection

WORDS, CONTEXT, BATCH, BLOCK = 16_384, 64, 16, 256
CHUNK = 1 << 18  # values
LR, DECAY = 3e-3, 0.1


def words() -> Tensor:
    """The text as the most frequent words, by rank; 0: any other."""
    text = bytes(load_corpus().train.numpy()).decode("utf-8", "replace")
    found = re.findall(r"\w+|\s+|[^\w\s]", text)
    ranks = {word: rank for rank, (word, _) in enumerate(Counter(found).most_common(WORDS - 1), 1)}
    return torch.tensor([ranks.get(word, 0) for word in found])


class Peer:
    def __init__(self, section: ModelSection, seed: int, text: Tensor) -> None:
        torch.manual_seed(0)
        self.model, self._text = Llama(section), text
        self._random = torch.Generator().manual_seed(seed)
        self._inner = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)

    def learn(self, steps: int) -> float:
        total = 0.0
        for _ in range(steps):
            starts = torch.randint(len(self._text) - CONTEXT - 1, (BATCH,), generator=self._random)
            rows = torch.stack([self._text[at : at + CONTEXT + 1] for at in starts.tolist()])
            loss = self.model.loss(rows)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self._inner.step()
            self._inner.zero_grad()
            total += float(loss.detach())
        return total / steps


class Sums:
    """Over all rounds: what was learned, what was merged, and which values a result ever moved."""

    def __init__(self, values: int) -> None:
        self.learned, self.merged = torch.zeros(values), torch.zeros(values)
        self.ever_moved = torch.zeros(values, dtype=torch.bool)
        self.peaks: list[Tensor] = []  # by round: of each block, peak / median

    def add(self, mean: Tensor, result: Tensor) -> None:
        self.learned += mean
        self.merged += result
        self.ever_moved |= result != 0
        blocks = mean.abs().view(-1, BLOCK)
        self.peaks.append(blocks.amax(1) / blocks.median(1).values.clamp(min=1e-12))

    def row(self, cells: slice) -> str:
        due, found = self.learned[cells], self.merged[cells]
        blocks = slice(cells.start // BLOCK, -(-cells.stop // BLOCK))
        peak = float(torch.cat([each[blocks] for each in self.peaks]).quantile(0.99))
        error = float((found - due).norm() / due.norm())
        missing = 1 - float((found * due).sum() / (due * due).sum())
        due_to_move = due.abs() > due.abs().median() / 100
        still = float((due_to_move & ~self.ever_moved[cells]).float().mean())
        return f"{cells.stop - cells.start:>10} {peak:>10.1f} {error:>9.2%} {missing:>+9.2%} {still:>9.3%}"


def cells_of(layout: ModelLayout, width: int) -> dict[str, slice]:
    [rows] = [each for each in layout.entries if each.name.endswith("embed_tokens.weight")]
    norms = [each for each in layout.entries if len(each.shape) == 1]
    matrices = [each for each in layout.entries if len(each.shape) == 2 and each is not rows]
    at = {rank: rows.offset + rank * width for rank in (0, 1024, 8192, WORDS)}
    return {
        "rows of the 1,024 most frequent words": slice(at[0], at[1024]),
        "rows of the next 7,168": slice(at[1024], at[8192]),
        "rows of the 8,192 rarest": slice(at[8192], at[WORDS]),
        f"a hidden matrix, {matrices[0].name}": slice(
            matrices[0].offset, matrices[0].offset + matrices[0].numel
        ),
        f"a norm, {norms[0].name}": slice(norms[0].offset, norms[0].offset + norms[0].numel),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--untied", action="store_true", help="a row changes only where its word is read, and decays"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"width": asked.width, "mlp_width": 3 * asked.width, "context": CONTEXT, "vocab": WORDS}
    section = ModelSection(**sizes, tied=not asked.untied)
    text, codec, outer = words(), codec_named("int8"), Nesterov(0.7, 0.6)
    peers = [Peer(section, seed, text) for seed in range(asked.peers)]
    layout = ModelLayout.of(peers[0].model, CHUNK)
    values = -(-layout.total_elements // CHUNK) * CHUNK
    anchor, momentum, sums = torch.zeros(values), torch.zeros(values), Sums(values)
    layout.write_anchor(peers[0].model, anchor)
    for number in range(1, asked.rounds + 1):
        mean, loss = torch.zeros(values), 0.0
        for peer in peers:
            layout.load(peer.model, anchor)
            loss += peer.learn(asked.steps) / len(peers)
            here = torch.zeros(values)
            layout.write_anchor(peer.model, here)
            mean += (anchor - here) / len(peers)
        chunks = [codec.decode(codec.encode(each), CHUNK) for each in mean.split(CHUNK)]
        result = torch.cat(chunks)
        sums.add(mean, result)
        outer.step(anchor, momentum, result)
        if number % 10 == 0:
            print(f"after {number} rounds: loss {loss:.3f}", flush=True)
    print(f"{'':44} {'values':>10} {'peak':>10} {'error':>9} {'missing':>9} {'unmoved':>9}")
    for name, cells in cells_of(layout, asked.width).items():
        print(f"{name:44} {sums.row(cells)}")


if __name__ == "__main__":
    main()
