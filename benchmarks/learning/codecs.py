"""What a codec costs in loss: the demo's model, trained once per codec at the same tokens.

    python benchmarks/learning/codecs.py [--rounds 30] [--steps 20] [--peers 3] [--plot codecs.svg] [codec ...]

The peers live in one process and take turns, but everything that touches a pseudo-gradient is the program's own:
the layout, the codecs with their error feedback, the owner's merge, the exact outer step, the digests.
Prints one row per codec; fp32 is the row that the others are compared with.  With --plot it draws the held-out loss
over the rounds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tiny_gpt import GPTConfig, TinyGPT, build, evaluate

from farflung.collectives.round.effects import Merge, Roll
from farflung.compression.codec import codec_named, codec_names
from farflung.console.history.curves import draw
from farflung.optim.outer import Nesterov
from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.machine.effects import Encode
from farflung.peer.state.outer_state import OuterState
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.manifest import RoundSection

CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
BATCH, CHUNK_ELEMENTS, SEED = 8, 16384, 0
LOOKS = 10  # at the held-out loss, for the plot
Curve = list[tuple[float, float]]


class Peer:
    """A trainer and an agent's state, without the network between them."""

    def __init__(self, rules: RoundSection, outer: Nesterov) -> None:
        self.model: TinyGPT = build(CONFIG, SEED)
        self.layout = ModelLayout.of(self.model, CHUNK_ELEMENTS)
        self.anchor = torch.zeros(self.layout.total_elements)
        self.layout.write_anchor(self.model, self.anchor)
        self.state = OuterState(self.anchor, self.layout.model_schema(self.model), rules, outer)
        self.codec = rules.codec
        self.inner = torch.optim.AdamW(self.model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.1)
        self.slot = torch.zeros_like(self.anchor)

    def learn(self, data: ByteWindows, first: int, steps: int) -> list[bytes]:
        """Inner steps from the anchor; returns the encoded pseudo-gradient."""
        self.layout.load(self.model, self.anchor)
        loaded = self.layout.snapshot(self.model)
        for step in range(steps):
            start = (first + step * BATCH) % (len(data) - BATCH)
            batch = torch.stack([data[i] for i in permuted_range(SEED, 0, len(data), start, start + BATCH)])
            loss = self.model(batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.inner.step()
            self.inner.zero_grad()
        self.layout.write_delta(self.model, loaded, None, self.slot)
        payloads: list[bytes] = []
        asked = Encode(0, 0, self.codec, tuple(range(self.layout.chunk_count)))
        for made, problem in self.state.encode(self.slot, asked):
            assert not problem, problem
            payloads += [bytes(payload) for payload in made.values()]
        return payloads


def train(codec: str, rounds: int, steps: int, count: int) -> tuple[Curve, int, int]:
    """(round and held-out loss from time to time, bytes that one peer sent as contributions, bytes by the codec's
    formula)."""
    corpus = load_corpus()
    data = ByteWindows(corpus.train, CONFIG.context)
    # Results come back as int8, except where everything is to be exact: it costs about nothing.
    gather = "fp32" if codec == "fp32" else "int8"
    rules = RoundSection.model_validate({"codec": codec, "gather_codec": gather})
    outer = Nesterov(lr=0.7, momentum=0.6)
    peers = [Peer(rules, outer) for _ in range(count)]
    weights = (1.0 / count,) * count
    sent, curve = 0, []
    for number in range(rounds):
        first = number * count * steps * BATCH
        parts = [peer.learn(data, first + i * steps * BATCH, steps) for i, peer in enumerate(peers)]
        sent += sum(len(payload) for payload in parts[0])
        for chunk in range(peers[0].layout.chunk_count):
            merge = Merge(number, 1, chunk, tuple(part[chunk] for part in parts), weights)
            result = peers[chunk % count].state.merge(merge)
            for peer in peers:
                peer.state.roll(Roll(chunk, number + 1, result))
        for peer in peers:
            peer.state.resolve(peer.slot, used=True)
        assert len({peer.state.seal() for peer in peers}) == 1, "the peers' states differ"
        if (rounds - number - 1) % max(1, rounds // LOOKS) == 0:
            peers[0].layout.load(peers[0].model, peers[0].anchor)
            curve.append((number + 1, evaluate(peers[0].model, corpus.held_out, 128)))
    formula = rounds * peers[0].layout.chunk_count * codec_named(codec).payload_bytes(CHUNK_ELEMENTS)
    return curve, sent, formula


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codecs", nargs="*", default=["fp32", "int8", "int4", "int2", "topk"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    asked = parser.parse_args()
    unknown = sorted(set(asked.codecs) - set(codec_names()))
    if unknown:
        parser.error(f"unknown codec {unknown[0]!r}; there are: {', '.join(codec_names())}")
    torch.set_num_threads(1)
    print(
        f"{asked.peers} peers, {asked.rounds} rounds of {asked.steps} steps; held-out loss in nats per byte"
    )
    print(f"{'codec':6} {'loss':>7} {'vs first':>9} {'sent':>10} {'formula':>10} {'seconds':>8}")
    base: float | None = None
    curves: dict[str, Curve] = {}
    for name in asked.codecs:
        started = time.monotonic()
        curves[name], sent, formula = train(name, asked.rounds, asked.steps, asked.peers)
        loss = curves[name][-1][1]
        base = loss if base is None else base
        seconds = time.monotonic() - started
        print(
            f"{name:6} {loss:7.4f} {100 * (loss / base - 1):+8.2f}% {sent:10d} {formula:10d} {seconds:8.1f}",
            flush=True,
        )
    if asked.plot is not None:
        title = f"{asked.peers} peers, {asked.steps} steps between rounds: held-out loss, nats per byte"
        draw(asked.plot, title, "rounds", curves)


if __name__ == "__main__":
    main()
