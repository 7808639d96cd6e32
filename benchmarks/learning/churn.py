"""What churn costs: a model learned by peers of which many are killed in every round, beside an undisturbed run.

    python benchmarks/learning/churn.py [--rounds 50] [--peers 10] [--killed 0.3] [--fragments 1] [--seed 0]
        [--plot churn.svg]

The machines are the program's own, driven by its simulator: the coordinator (killed too, every ten rounds), the
peers' agents, the round, the outer step, the leases.  Time is virtual; the trainer is the demo's model in small, and
it learns for real.  Every promise is checked at every event, P7 to the sample.  Prints a row for the disturbed run, and
for undisturbed ones with as much data and with as many rounds, by how much its loss is above theirs.  With --plot it
draws the held-out loss over the samples that were learned.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tiny_gpt import GPTConfig, build, evaluate
from torch import Tensor

from farflung.collectives.round.effects import Seal
from farflung.compression.codec import codec_named
from farflung.console.history.curves import draw
from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.ledger.records import CommittedRound, Opened, Record
from farflung.optim.schedule import ScheduleRules
from farflung.peer.builtin.corpus import ByteWindows, load_corpus
from farflung.peer.data.sample_source import permuted_index
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.simulator.invariants import Invariants
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import Learned, TrainerSurroundings, VirtualTrainer
from farflung.simulator.world import COORDINATOR, World

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=32)
BATCH, STEPS, SAMPLES, SEED = 8, 10, 8000, 0
LOOKS = 10  # at the held-out loss, for the plot
# Values of a chunk: one that counts the steps, as the simulator's checks want it, and the model's.
CHUNK = 8192


class Learner(VirtualTrainer):
    """The simulator's trainer with a model: what falls in a step is what AdamW takes off."""

    samples_per_step, dataset_samples = BATCH, SAMPLES

    def __init__(self, host: VirtualPeer, world: TrainerSurroundings, rules: ScheduleRules) -> None:
        super().__init__(host, world, rules)
        self._model = build(CONFIG, SEED)
        self._layout = ModelLayout.of(self._model, CHUNK - 1)
        self._inner = torch.optim.AdamW(self._model.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.1)
        self._windows = ByteWindows(load_corpus().train, CONFIG.context)

    def first_values(self) -> Tensor:
        return self._as_vector(0.0)

    def learn(self, samples: Learned) -> None:
        counts = self._local.view(-1, CHUNK)[:, 0] - 1.0
        self._layout.load(self._model, self._local.view(-1, CHUNK)[:, 1:].reshape(-1))
        places = [permuted_index(SEED, epoch, SAMPLES, place) for epoch, place in samples]
        loss = self._model(torch.stack([self._windows[place] for place in places])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._inner.step()
        self._inner.zero_grad()
        self._local.copy_(self._as_vector(0.0))
        self._local.view(-1, CHUNK)[:, 0] = counts

    def _as_vector(self, count: float) -> Tensor:
        flat = torch.zeros(self._layout.total_elements)
        self._layout.write_anchor(self._model, flat)
        vector = torch.full((self._layout.chunk_count, CHUNK), count)
        vector[:, 1:] = flat.view(-1, CHUNK - 1)
        return vector.view(-1)


@dataclass(frozen=True)
class Churn:
    peers: int = 10
    rounds: int = 50
    killed: float = 0.3  # share of the peers that is killed in each round
    fragments: int = 1
    seed: int = 0


Curve = list[tuple[float, float]]  # (samples committed, held-out loss)


@dataclass(frozen=True)
class Outcome:
    kills: int
    virtual_s: float
    leases: Leases
    digests: set[bytes]  # of the last version, at every peer that sealed it
    loss: float
    curve: Curve


class Churning(World):
    """Some peers are killed at a moment of each round's inner steps or exchange, and come back a while later."""

    trainer_class = Learner

    def __init__(self, churn: Churn) -> None:
        noise = 0.01 if churn.killed else 0.0
        super().__init__(
            churn.seed,
            Scenario(
                peers=churn.peers, rounds=churn.rounds, fragments=churn.fragments, end_s=1e6, drop=noise,
                duplicate=noise, slow=noise, kill_per_effect=0.0, cut_per_s=0.0, trainer_crash_per_s=0.0,
            ),
        )  # fmt: skip
        layout = ModelLayout.of(build(CONFIG, SEED), CHUNK - 1)
        chunks = layout.chunk_count
        tensors = (TensorSpec("w", (chunks * CHUNK,), "float32", "param"),)
        self.model = ModelSchema(tensors, CHUNK, chunks, chunks, bytes(32))
        rules = {"sync_every": STEPS, "fragments": churn.fragments, "deadline_s": 8.0, "keep_results": 8}
        rules |= {"scatter_grace_s": 3.0, "codec": "fp32"}
        self.manifest = Manifest.model_validate(
            {
                "run": {"name": "churn", "rounds": churn.rounds, "min_peers": 2},
                "data": {"batch": BATCH, "lease_samples": BATCH * STEPS // 2},
                "round": rules,
                "net": {"heartbeat_s": 1.0, "dead_after_s": 3.0},
            }
        )
        self.invariants = Invariants(
            self.model, codec_named(self.manifest.round.gather_codec), churn.fragments
        )
        self.digests: set[bytes] = set()
        self.curve: Curve = []
        self._churn, self._seen = churn, 0
        self._doomed: list[str] = []  # to be killed within the next exchange

    @property
    def calm(self) -> bool:
        return not self._churn.killed or self.invariants.version >= self._churn.rounds - 1

    def _observe(self, what: str, details: object) -> None:
        super()._observe(what, details)
        if what == "sealed" and isinstance(details, tuple):
            peer, seal, digest, _ = details
            if isinstance(seal, Seal) and (seal.fragment, seal.version) == (0, self._churn.rounds):
                self.digests.add(digest)
            if isinstance(seal, Seal) and isinstance(peer, VirtualPeer) and not seal.fragment:
                self._look(peer, seal.version)

    def _look(self, peer: VirtualPeer, version: int) -> None:
        """The held-out loss of a version that somebody holds whole, now and then."""
        if self.coordinator is not None and version >= self._seen + max(1, self._churn.rounds // LOOKS):
            self._seen = version
            learned = self.coordinator.core.ledger.leases.committed_samples
            self.curve.append((learned, held_out_loss(peer.anchor)))

    def _write(self, record: Record) -> None:
        super()._write(record)
        if self.calm:
            return
        if isinstance(record, CommittedRound) and record.commit.fragment == 0:
            self._draw_lots(record.commit.version)
        elif isinstance(record, Opened):
            for party in self._doomed:
                self._kill_after(party, self.random.uniform(0.0, 0.5))
            self._doomed = []

    def _draw_lots(self, version: int) -> None:
        """Half of those who die do so in inner steps, half in the exchange."""
        lots = self.random.sample(sorted(self.peers), round(self._churn.killed * self._churn.peers))
        half = len(lots) // 2
        for party in lots[:half]:
            self._kill_after(party, self.random.uniform(0.0, 1.5))
        self._doomed = lots[half:] + ([COORDINATOR] if version % 10 == 0 else [])

    def _kill_after(self, party: str, delay_s: float) -> None:
        def strike() -> None:
            here = self.coordinator is not None if party == COORDINATOR else self.peers[party].alive
            if here and not self.calm:
                self._kill(party)

        self.after(delay_s, strike)


def run(churn: Churn) -> Outcome:
    world = Churning(churn)
    report = world.run()
    assert world.coordinator is not None and report.outcome == "finished", report.outcome
    newest = [
        peer
        for peer in world.peers.values()
        if peer.member.part is not None and peer.member.part.version == churn.rounds
    ]
    ledger = world.coordinator.core.ledger
    loss = held_out_loss(newest[0].anchor)
    return Outcome(report.kills, report.seconds, ledger.leases, world.digests, loss, world.curve)


def held_out_loss(anchor: Tensor) -> float:
    model = build(CONFIG, SEED)
    layout = ModelLayout.of(model, CHUNK - 1)
    layout.load(model, anchor.view(-1, CHUNK)[:, 1:].reshape(-1))
    return evaluate(model, load_corpus().held_out, windows=1000, batch=100)


def whole_epochs(leases: Leases) -> int:
    """Epochs of which every sample is committed; once, says the invariant that compared books and contributions."""
    missing = [each.epoch for each in leases.returned] + [each.epoch for each in leases.held.values()]
    return min([leases.epoch, *missing])


def row(name: str, out: Outcome, seconds: float, disturbed: float | None) -> str:
    """The last but one column: by how much the disturbed run's loss is above this one's."""
    a = out.leases
    change = f"{100 * (disturbed / out.loss - 1):+.2f} %" if disturbed else ""
    return (
        f"{name:<12} {out.kills:>5} {out.virtual_s:>8.0f} {a.leased_samples:>8} {a.committed_samples:>9} "
        f"{a.held_samples:>6} {a.returned_samples:>8} {whole_epochs(a):>6} {len(out.digests):>7} {out.loss:>7.4f} "
        f"{change:>8} {seconds:>6.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, kind in (("peers", int), ("rounds", int), ("killed", float), ("fragments", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Churn, name))
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    asked = vars(parser.parse_args())
    plot = asked.pop("plot")
    churn = Churn(**asked)
    torch.set_num_threads(1)
    print(
        f"{churn.peers} peers, {churn.rounds} rounds of {STEPS} steps, {SAMPLES} samples an epoch, seed {churn.seed}"
    )
    print(
        f"{'run':<12} {'kills':>5} {'virt. s':>8} {'leased':>8} {'committed':>9} {'held':>6} {'returned':>8} "
        f"{'epochs':>6} {'digests':>7} {'loss':>7} {'':>8} {'real s':>6}"
    )
    disturbed = show(f"{churn.killed:.0%} killed", churn, None)
    # The killed leave holes: their samples are learned by others, in later rounds.
    as_many = round(disturbed.leases.committed_samples / (churn.peers * STEPS * BATCH))
    alike = replace(churn, killed=0.0, rounds=max(1, as_many))
    same_data = show("as many data", alike, disturbed.loss)
    same_rounds = show("as many rnds", replace(churn, killed=0.0), disturbed.loss)
    if plot is not None:
        title = f"{churn.peers} peers, {churn.killed:.0%} killed in each round: held-out loss, nats per byte"
        rows = {"killed": disturbed, "undisturbed, as many data": same_data, "as many rounds": same_rounds}
        draw(plot, title, "samples learned", {name: each.curve for name, each in rows.items()})


def show(name: str, churn: Churn, other: float | None) -> Outcome:
    began = time.monotonic()
    out = run(churn)
    print(row(name, out, time.monotonic() - began, other), flush=True)
    return out


if __name__ == "__main__":
    main()
