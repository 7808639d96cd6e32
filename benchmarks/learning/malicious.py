"""What one malicious peer of eight costs in loss, with the plain mean and with robust merging.

    python benchmarks/learning/malicious.py [--rounds 12] [--steps 8] [--peers 8] [--codec fp32]
        [--clip 1.0 1.5 2.0] [--plot malicious.svg] [attack ...]

Attacks: none, 1000x (its pseudo-gradient times 1000), flip (times -1), nan.  The peers live in one process and take
turns, but the rounds are the program's own: the members' and the coordinator's state machines with all their reports,
the codecs, the dot products, the merge, the exact outer step, the digests.  Prints one row for each attack and
policy; the first row, without an attack and with the plain mean, is what the others are compared with.  With --plot it
draws the held-out loss over the rounds; a row whose loss is above what a model knows that has learned nothing is left
out there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import torch
from tiny_gpt import GPTConfig, TinyGPT, build, evaluate

from farflung.collectives.round.effects import DataEffect, Merge, Roll, SendFrame, Weigh
from farflung.collectives.round.member import MemberRound
from farflung.compression.codec import codec_named
from farflung.console.history.curves import draw
from farflung.coordinator.ledger.ledger import FragmentBook
from farflung.coordinator.rounds import shares
from farflung.coordinator.rounds.round import Round
from farflung.coordinator.rounds.round_policy import Done, OwnersMoved, RoundCommitted
from farflung.coordinator.rounds.round_rules import CLIP, rules_for
from farflung.coordinator.run.digest_agreement import FAR_TOO_LONG
from farflung.optim.outer import Nesterov
from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.machine.effects import Encode
from farflung.peer.machine.heartbeat import HeartbeatBuilder
from farflung.peer.state.outer_state import OuterState
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.digests import mask_from_bytes
from farflung.protocol.errors import FrameError
from farflung.protocol.frames import Kind, Payload
from farflung.protocol.manifest import Manifest, MergeSection, RoundSection
from farflung.protocol.messages import ProgressReport, Sent
from farflung.protocol.round_words import Commit, Plan
from farflung.simulator.bad_peers import forged

CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
BATCH, CHUNK_ELEMENTS, SEED = 8, 8192, 0
SESSION, RUN_TAG = bytes(16), bytes(8)
ATTACKS = ("none", "1000x", "flip", "nan")
LOOKS = 6  # at the held-out loss, for the plot
Curve = list[tuple[float, float]]


class Peer:
    """A trainer, and an agent's state, without the network between them."""

    def __init__(self, name: str, manifest: Manifest, attack: str) -> None:
        self.name, self.attack = name, attack
        self.model: TinyGPT = build(CONFIG, SEED)
        self.layout = ModelLayout.of(self.model, CHUNK_ELEMENTS)
        self.anchor = torch.zeros(self.layout.total_elements)
        self.layout.write_anchor(self.model, self.anchor)
        outer = Nesterov(manifest.outer.lr, manifest.outer.momentum)
        self.state = OuterState(self.anchor, self.layout.model_schema(self.model), manifest.round, outer)
        self.codec = codec_named(manifest.round.codec)
        self.inner = torch.optim.AdamW(self.model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.1)
        self.slot = torch.zeros_like(self.anchor)

    def learn(self, data: ByteWindows, first: int, steps: int) -> dict[int, Payload]:
        """Inner steps from the anchor; returns what is contributed."""
        self.layout.load(self.model, self.anchor)
        loaded = self.layout.snapshot(self.model)
        for step in range(steps):
            start = (first + step * BATCH) % (len(data) - BATCH)
            batch = torch.stack([data[i] for i in permuted_range(SEED, 0, len(data), start, start + BATCH)])
            self.model(batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.inner.step()
            self.inner.zero_grad()
        self.layout.write_delta(self.model, loaded, None, self.slot)
        asked = Encode(0, 0, self.codec.name, tuple(range(self.layout.chunk_count)))
        payloads: dict[int, Payload] = {}
        for made, problem in self.state.encode(self.slot, asked):
            assert not problem, problem
            payloads |= made
        return payloads if self.attack == "none" else forged(payloads, CHUNK_ELEMENTS, self.attack)


class WatchedRound:
    """One round in one room: what a member sends arrives at once, what it reports too."""

    def __init__(
        self, number: int, peers: list[Peer], manifest: Manifest, book: FragmentBook, clip: float
    ) -> None:
        names = [peer.name for peer in peers]
        chunks = peers[0].layout.chunk_count
        owners = shares.assign(chunks, names, set(names))
        plan = Plan(number, 1, book.version, tuple(names), owners, (manifest.round.codec,) * len(names))
        robust = manifest.merge.policy == "robust"
        self.peers = {peer.name: peer for peer in peers}
        self.members = {name: MemberRound(name, plan, RUN_TAG, 1.0, 0.0, compare=robust) for name in names}
        self.reporters = {name: HeartbeatBuilder(lambda said: bytes(64)) for name in names}
        rules = rules_for(manifest, book, names)
        self.flight = Round(plan, replace(rules, merge=replace(rules.merge, clip=clip)), 0.0)
        self.reported_s = 0.0
        self.todo: deque[tuple[str, DataEffect]] = deque()
        for reporter in self.reporters.values():
            reporter.begin_round(0)

    def run(self, payloads: dict[str, dict[int, Payload]], tokens: int) -> tuple[Done, RoundCommitted]:
        for name, parts in payloads.items():
            self.do([(name, self.members[name].on_encoded(parts))])
            hashes = self.members[name].pieces.hashes()
            sent = Sent(
                seat=0, counted=b"",
                session=SESSION, seq=1, round_no=self.flight.plan.round_no, hashes=hashes, tokens=tokens, steps=1,
                loss=None, used=(), signature=bytes(64),
            )  # fmt: skip
            self.flight.on_sent(name, sent)
        settled: RoundCommitted | None = None
        everybody = set(self.members)
        for _ in range(100):
            self.report()
            step = self.flight.next_step(0.0, everybody, everybody)
            match step:
                case OwnersMoved(plan=plan):
                    self.do([(name, member.on_plan(plan, 0.0)) for name, member in self.members.items()])
                case RoundCommitted(decision=decision):
                    settled = step
                    self.do(
                        [(name, member.on_decision(decision, 0.0)) for name, member in self.members.items()]
                    )
                case Done() if settled is not None:
                    return step, settled
            for member in self.members.values():
                member.owner.weighing.on_asked(mask_from_bytes(self.flight.comparing.asked_of(member.me)))
            self.do([(name, member.on_timer(0.0)) for name, member in self.members.items()])
        raise AssertionError(f"the round does not end: {step}")

    def report(self) -> None:
        self.reported_s += 1.0  # so far apart that nothing is held back
        for name, member in self.members.items():
            for said in self.reporters[name].maybe_progress(member, self.reported_s):
                assert isinstance(said.message, ProgressReport)
                self.flight.on_progress(name, said.message)

    def do(self, asked: list[tuple[str, list[DataEffect]]]) -> None:
        self.todo += [(name, effect) for name, effects in asked for effect in effects]
        while self.todo:
            who, effect = self.todo.popleft()
            match effect:
                case SendFrame(to=to, frame=frame):
                    if frame.header.kind == Kind.CONTRIBUTION:
                        try:
                            self.peers[to].codec.check(frame.payload, CHUNK_ELEMENTS)
                        except FrameError as error:
                            self.members[to].refuse(who, error.verdict)
                            continue
                    _, more = self.members[to].on_frame(who, frame, 0.0)
                    self.todo += [(to, each) for each in more]
                case Merge() | Weigh():
                    made = self.peers[who].state.calculate(effect)
                    self.todo += [(who, each) for each in self.members[who].owner.on_calculated(effect, made)]


def train(
    attack: str, merge: MergeSection, clip: float, asked: argparse.Namespace
) -> tuple[Curve, RoundCommitted]:
    """(round, held-out loss) from time to time, the last decision"""
    corpus = load_corpus()
    data = ByteWindows(corpus.train, CONFIG.context)
    manifest = Manifest(
        round=RoundSection.model_validate({"codec": asked.codec, "gather_codec": "fp32"}),
        merge=merge,
        outer={"lr": 0.7, "momentum": 0.6},  # type: ignore[arg-type]
    )
    peers = [
        Peer(f"peer{i:02}", manifest, attack if i == asked.peers - 1 else "none") for i in range(asked.peers)
    ]
    book = FragmentBook()
    per_peer, curve = asked.steps * BATCH, []
    for number in range(asked.rounds):
        first = number * len(peers) * per_peer
        payloads = {
            peer.name: peer.learn(data, first + i * per_peer, asked.steps) for i, peer in enumerate(peers)
        }
        round_ = WatchedRound(number + 1, peers, manifest, book, clip)
        done, settled = round_.run(payloads, per_peer * CONFIG.context)
        apply(done.commit, round_)
        remember(done, round_, book)
        if (asked.rounds - number - 1) % max(1, asked.rounds // LOOKS) == 0:
            peers[0].layout.load(peers[0].model, peers[0].anchor)
            curve.append((number + 1, evaluate(peers[0].model, corpus.held_out, 128)))
    return curve, settled


def remember(done: Done, round_: WatchedRound, book: FragmentBook) -> None:
    """As the ledger does with a commit."""
    book.version = done.commit.version
    book.trust.update(done.commit.included)
    screening = round_.flight.screening
    for suspect in screening.suspects(FAR_TOO_LONG) if screening is not None else ():
        book.trust[suspect] = 0
    if done.norm is not None:
        tokens = [said.tokens for said in round_.flight.scatter.sent.values()]
        book.figures.norms[done.commit.version] = (done.norm, sum(tokens) / len(tokens))


def apply(commit: Commit, round_: WatchedRound) -> None:
    for name, peer in round_.peers.items():
        for chunk, piece in round_.members[name].pieces.results.items():
            peer.state.roll(Roll(chunk, commit.version, piece.payload))
        peer.state.resolve(peer.slot, used=name in commit.included)
    assert len({peer.state.seal() for peer in round_.peers.values()}) == 1, "the peers' states differ"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", default=list(ATTACKS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--clip", nargs="+", type=float, default=[CLIP], help="of the robust policy")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.attacks) - set(ATTACKS)):
        parser.error(f"unknown attack {unknown[0]!r}; there are: {', '.join(ATTACKS)}")
    torch.set_num_threads(1)
    print(
        f"{asked.peers} peers, the last one malicious; {asked.rounds} rounds of {asked.steps} steps, "
        f"{asked.codec}; held-out loss in nats per byte"
    )
    print(f"{'attack':7} {'policy':11} {'loss':>9} {'vs first':>10} {'seconds':>8}  the last round")
    base: float | None = None
    curves: dict[str, Curve] = {}
    robust = MergeSection(policy="robust")
    policies = {"mean": (MergeSection(policy="mean"), CLIP)}
    policies |= {f"robust {clip:g}": (robust, clip) for clip in asked.clip}
    for attack in asked.attacks:
        for policy, (merge, clip) in policies.items():
            started = time.monotonic()
            curve, last = train(attack, merge, clip, asked)
            loss = curve[-1][1]
            if max(each for _, each in curve) <= math.log(256):
                curves[f"{attack}, {policy}"] = curve
            base = loss if base is None else base
            change = f"{100 * (loss / base - 1):+9.2f}%" if math.isfinite(loss) else "      lost"
            reasons = "; ".join(last.decision.reasons.values())
            told = f"{last.merged or 'plain mean'}{f' ({reasons})' if reasons else ''}"
            seconds = time.monotonic() - started
            print(f"{attack:7} {policy:11} {loss:9.4f} {change} {seconds:8.1f}  {told}", flush=True)
    if asked.plot is not None:
        title = f"{asked.peers} peers, the last one malicious: held-out loss, nats per byte"
        draw(asked.plot, title, "rounds", curves)


if __name__ == "__main__":
    main()
