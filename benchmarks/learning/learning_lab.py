"""A run that learns for real, over the real protocol, in virtual time: what learning.py is made of.

The coordinator, the peers' machines, the rounds, the codecs with their error feedback, the outer step, the leases
and the schedules are the program's own; only the network and the clock are the simulator's
(farflung.simulator.world), and of the trainer only the inner step is written here.  How long a step and a
transfer take is chosen by the experiment.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from optimizer_state import bytes_per_parameter
from tiny_gpt import GPTConfig, build, evaluate
from torch import Tensor

from farflung.collectives.round.effects import SendFrame
from farflung.compression.codec import codec_named
from farflung.coordinator.ledger.records import CommittedRound, Record
from farflung.optim.outer import Nesterov
from farflung.optim.recipes import inner_of, outer_of
from farflung.optim.schedule import rates_of, rules_of
from farflung.peer.builtin.corpus import load_corpus
from farflung.peer.data.sample_source import permuted_range
from farflung.peer.trainer import effects as do
from farflung.peer.trainer.layout import ModelLayout
from farflung.protocol.frames import Header, Kind
from farflung.protocol.manifest import Manifest, Periods
from farflung.protocol.model_schema import BOOKS_FRAGMENT
from farflung.simulator.invariants import Invariants
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import Learned, VirtualPart, VirtualTrainer
from farflung.simulator.world import World

CONFIG = GPTConfig(layers=2, width=32, heads=4, context=64)
CHUNK_KB, STEP_S, WARMUP = 32, 1.0, 50
HELD_OUT = 2048  # windows
CORPUS = load_corpus()
WINDOWS = (CORPUS.train.numel() - 1) // CONFIG.context


# Of `Setting.outer`: how a result is taken, which is no key of run.toml.
TAKING = ("overlap_steps", "mix")


@dataclass(frozen=True)
class Setting:
    """One row of a table."""

    name: str
    steps: int  # that each peer of full speed takes
    period: int = 20
    peers: int = 4
    lr: float = 6e-3
    batch: int = 4  # windows that a peer reads at each step
    seed: int = 0
    outer: dict[str, Any] = field(default_factory=dict)
    rounds: dict[str, Any] = field(default_factory=dict)  # keys of [round]
    inner: dict[str, Any] = field(default_factory=dict)
    merge: dict[str, Any] = field(default_factory=dict)
    layers: int = CONFIG.layers
    width: int = CONFIG.width
    start: int = 0  # rounds with shorter periods, at most two fifths of all
    slow: tuple[float, ...] = ()  # how many times as long the steps of the first peers take
    transfer: float = 0.0  # of a period: how long a round's bytes are on their way
    shards: bool = False  # each peer reads a region of the text of its own
    eager: str = ""  # another place to train on from: "stay", or "published": see `Learner._as_published`
    # A result is taken as https://arxiv.org/abs/2501.18512 does, with this alpha: see `Learner._load`.
    alpha: float | None = None
    learns: bool = True  # False: for experiments that are about time alone

    @property
    def manifest(self) -> Manifest:
        content = {
            "run": {
                "name": "learning",
                "min_peers": self.peers,
                "rounds": self.run_rounds,
                "seed": self.seed,
            },
            "data": {"batch": self.batch, "lease_samples": self.batch * self.period * 4},
            "inner": {"lr": self.lr, "betas": (0.9, 0.99), **self.inner},
            "outer": {key: value for key, value in self.outer.items() if key not in TAKING},
            "merge": self.merge,
            "round": {
                "sync_every": self.period,
                "start_rounds": self.begun(self.run_rounds).start,
                "chunk_kb": CHUNK_KB,
                "scatter_grace_s": 1e4,
                "deadline_s": 3600.0,
                **self.rounds,
            },
            "net": {"heartbeat_s": 2.0, "dead_after_s": 60.0},
        }
        return Manifest.model_validate(content)

    @property
    def run_rounds(self) -> int:
        """As many as there are in so many steps."""
        return next(n for n in range(self.steps + 1) if self.begun(n + 1).before(n + 1) > self.steps)

    def begun(self, rounds: int) -> Periods:
        return Periods(self.period, min(self.start, round(0.4 * rounds)))

    @property
    def config(self) -> GPTConfig:
        return replace(CONFIG, layers=self.layers, width=self.width)


@dataclass
class Row:
    name: str
    loss: float
    curve: list[tuple[int, float]]  # (steps, held-out loss of the anchor)
    tokens: int = 0
    sent_bytes: int = 0  # by one peer: contributions, and results of its chunks
    idle: float = 0.0  # of the fast peers' time: waiting for rounds
    tokens_per_s: float = 0.0  # of a fast peer, in virtual time
    seconds: float = 0.0  # that it took to compute
    state: float = 0.0  # bytes for each parameter that the inner optimizer of a peer keeps, at the end
    # Tokens that were merged, of those that all peers would have read in that time without rounds.
    used: float = 0.0


class Learner(VirtualTrainer):
    """TinyGPT, whose parameters lie in the virtual trainer's flat vector."""

    dataset_samples = WINDOWS

    def __init__(self, setting: Setting, number: int, *place: Any) -> None:
        self.samples_per_step = setting.batch
        host, world, _ = place
        taking = {key: setting.outer[key] for key in TAKING if key in setting.outer}
        super().__init__(host, world, replace(rules_of(host.manifest), **taking))
        self.setting, self.number = setting, number
        self.model = build(setting.config, setting.seed)
        layout = ModelLayout.of(self.model, host.model.chunk_elements)
        self._first = torch.zeros_like(self._local)
        layout.write_anchor(self.model, self._first)
        places = {entry.name: entry for entry in layout.entries}
        for name, parameter in self.model.named_parameters():
            at = places[name]
            parameter.data = self._local[at.offset : at.offset + at.numel].view(at.shape)
        self.inner = inner_of(host.manifest, self.model)
        self.own_momentum: dict[int, Tensor] = {}  # by fragment
        self.steps = 0
        self.began_at = self.ended_at = self.waited_before_s = 0.0

    def first_values(self) -> Tensor:
        return self._first

    def step_s(self) -> float:
        slow = self.setting.slow
        return STEP_S * (slow[self.number] if self.number < len(slow) else 1.0)

    def learn(self, samples: Learned) -> None:
        setting = self.setting
        if not self.steps:
            self.began_at, self.waited_before_s = self.world.now() - self.step_s(), self.waited_s
        self.steps += 1
        self.ended_at = self.world.now()
        if setting.learns:
            self._descend(setting, samples)

    def _train_on(self, part: VirtualPart, slot: int) -> None:
        if self.setting.eager == "published":
            self._as_published(part, slot)
        elif self.setting.eager != "stay":
            super()._train_on(part, slot)

    def _as_published(self, part: VirtualPart, slot: int) -> None:
        """Train on from where https://arxiv.org/abs/2502.12996 does, and not from where the peer stands.

        There each peer steps by G(r) = d(r)/N + (mean(r-1) - d(r-1)/N): the own part is new, the others' a round old.
        Nesterov's step is linear, and the sum of these differences is the anchor's way up to round r-1 plus the way of
        d/N alone.  So a peer trains on from the anchor, moved by its own d/N with a momentum of its own.
        """
        step = outer_of(self.host.manifest)
        assert isinstance(step, Nesterov), "the published correction is one for Nesterov's step"
        owed = self.host.slots[slot][part.cells].clone()
        own = self.own_momentum.get(part.number, torch.zeros_like(owed)) * step.momentum + owed
        self.own_momentum[part.number] = own
        moved = (owed + own * step.momentum) * (step.lr / self.setting.peers)
        part.carry = owed
        self._local[part.cells] = self._loaded[part.cells] = self.host.anchor[part.cells] - moved

    def _load(self, load: do.LoadAnchor) -> None:
        """With `alpha`, of what was learned while a round was under way only that share is left; else all of it is,
        wherever the peer then stands."""
        part, alpha = self.parts[load.fragment], self.setting.alpha
        stood = self._local[part.cells].clone()
        super()._load(load)
        if alpha is not None and load.keep == "rest":
            anchor = self.host.anchor[part.cells]
            values = torch.lerp(anchor, stood, alpha)
            part.carry = anchor - values
            self._local[part.cells] = self._loaded[part.cells] = values

    def _descend(self, setting: Setting, samples: Learned) -> None:
        rows = [self._window(setting.seed, epoch, sample) for epoch, sample in samples]
        loss = self.model(torch.stack(rows).long()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        # By the run's versions and not by own steps: a slow peer's rate falls with everybody's.
        part = self.host.member.part
        manifest = self.host.manifest
        done = manifest.periods.before(part.version) / manifest.total_steps if part is not None else 0.0
        rate = rate_at(setting.lr, self.steps, done)
        if "schedule" in setting.inner:  # as runs have it
            rate = setting.lr * rates_of(manifest).share(self.machine.run_step)
        for group in self.inner.param_groups:
            group["lr"] = rate
        self.inner.step()
        self.inner.zero_grad()

    def _window(self, seed: int, epoch: int, sample: int) -> Tensor:
        [index] = permuted_range(seed, epoch, WINDOWS, sample, sample + 1)
        region = WINDOWS // self.setting.peers
        return window(self.number * region + index % region if self.setting.shards else index)


def window(index: int) -> Tensor:
    return CORPUS.train[index * CONFIG.context : (index + 1) * CONFIG.context + 1]


def rate_at(lr: float, step: int, done: float) -> float:
    """Warm-up, then a cosine down to a tenth."""
    return lr * min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


class Unchecked(Invariants):
    """P1, P2 and P4 are checked as ever.  Steps can't be read off real gradients, and sums cost time."""

    def _saw_loaded(self, details: object) -> None:
        pass

    def _is_the_weighted_mean(self, commit: object) -> None:
        pass


class LearningWorld(World):
    trainer_class = Learner

    def __init__(self, setting: Setting) -> None:
        manifest = setting.manifest
        fragments = manifest.fragments
        calm = Scenario(
            peers=setting.peers,
            fragments=fragments,
            rounds=manifest.run.rounds,
            faults_until_s=0.0,
            end_s=100.0 * STEP_S * setting.steps,
        )
        super().__init__(setting.seed, calm)
        self.setting, self.manifest = setting, manifest
        self.evaluated = build(setting.config, setting.seed)
        self.layout = ModelLayout.of(self.evaluated, CHUNK_KB * 256)
        self.model = self.layout.model_schema(self.evaluated)
        self.invariants = Unchecked(self.model, codec_named(manifest.round.gather_codec), fragments)
        self.curve: list[tuple[int, float]] = []
        self.tokens = self.sent_bytes = self._commits = 0
        self._counted: set[tuple[str, str, Kind, int, int]] = set()
        self._every = max(1, manifest.run.rounds * fragments // 10)

    def learn(self) -> Row:
        began = time.monotonic()
        report = self.run()
        assert report.outcome == "finished", report.outcome
        self._look()
        learners = [p.trainer for p in self.peers.values() if isinstance(p.trainer, Learner)]
        fast = [each for each in learners if each.number >= len(self.setting.slow)]
        spans = [each.ended_at - each.began_at for each in fast]
        return Row(
            self.setting.name,
            self.curve[-1][1],
            self.curve,
            self.tokens,
            self.sent_bytes // self.setting.peers,
            sum(each.waited_s - each.waited_before_s for each in fast) / sum(spans),
            self.setting.batch * CONFIG.context * sum(each.steps for each in fast) / sum(spans),
            time.monotonic() - began,
            bytes_per_parameter(learners[0].inner),
            self.tokens / (max(spans) * self._tokens_per_s),
        )

    @property
    def _tokens_per_s(self) -> float:
        """Of all peers together, without rounds."""
        setting = self.setting
        speeds = sum(1.0 / slow for slow in setting.slow) + setting.peers - len(setting.slow)
        return setting.batch * CONFIG.context * speeds / STEP_S

    def start_peer(self, index: int) -> None:
        self.trainer_class = partial(Learner, self.setting, index)
        super().start_peer(index)

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, CommittedRound):
            self.tokens += (
                record.steps * self.setting.batch * CONFIG.context
                if record.commit.fragment == BOOKS_FRAGMENT
                else 0
            )
            self._commits += 1
            if self._commits % self._every == 0 and self.setting.learns:
                self._look()

    def _look(self) -> None:
        """The held-out loss of the anchor, after so many steps of a peer of full speed."""
        newest = max(self.peers.values(), key=lambda p: p.member.part.version if p.member.part else -1)
        self.layout.load(self.evaluated, newest.anchor)
        steps = self.manifest.periods.before(self._commits // self.manifest.fragments)
        self.curve.append((steps, evaluate(self.evaluated, CORPUS.held_out, HELD_OUT, 64)))

    # ---- the network: every message takes 10 ms, and a contribution or a result half of the transfer's time

    def _delays(self, source: str, target: str) -> list[float]:
        return [0.01]

    def _send_frame(self, source: str, effect: SendFrame) -> None:
        header, payload = effect.frame.header, bytes(effect.frame.payload)
        delay_s = 0.01
        if header.kind in (Kind.CONTRIBUTION, Kind.RESULT):
            delay_s += self.setting.transfer * self.setting.period * STEP_S / 2
            self._count(source, effect.to, header, len(payload))
        self.after(delay_s, lambda: self._frame_arrives(source, effect.to, header.pack(), payload))

    def _count(self, source: str, to: str, header: Header, size: int) -> None:
        """Each once: a long transfer makes peers ask again, which a real line would not need."""
        key = (source, to, header.kind, header.round_no, header.chunk)
        if key not in self._counted:
            self._counted.add(key)
            self.sent_bytes += size


def synchronous(setting: Setting, workers: int) -> Row:
    """The same model and data, the gradients of all workers averaged at every step: the usual way, in plain torch."""
    began = time.monotonic()
    model = build(setting.config, setting.seed)
    inner = inner_of(setting.manifest, model)
    batch, curve = setting.batch * workers, []
    for step in range(setting.steps):
        first = step * batch % (WINDOWS - batch)
        rows = [
            window(index)
            for index in permuted_range(setting.seed, step * batch // WINDOWS, WINDOWS, first, first + batch)
        ]
        loss = model(torch.stack(rows).long()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in inner.param_groups:
            group["lr"] = rate_at(setting.lr, step, step / setting.steps)
        inner.step()
        inner.zero_grad()
        if (step + 1) % max(1, setting.steps // 10) == 0:
            curve.append((step + 1, evaluate(model, CORPUS.held_out, HELD_OUT, 64)))
    tokens = setting.steps * batch * CONFIG.context
    # An all-reduce along a ring: the gradients in fp32, there and back.
    ring_bytes = 2 * (workers - 1) * 4 * sum(p.numel() for p in model.parameters()) // workers
    return Row(
        setting.name,
        curve[-1][1],
        curve,
        tokens,
        ring_bytes * setting.steps,
        seconds=time.monotonic() - began,
        state=bytes_per_parameter(inner),
    )
