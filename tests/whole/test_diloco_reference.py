"""The bitwise reference: what N peers end with is what a single process computes, bit for bit (P1).

The run is the real protocol in virtual time without faults.  The peers do different amounts of work and weigh
accordingly; what each of them contributed, and with which weight, is taken down, and a few lines of plain
torch do the same maths over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from farflung.coordinator.ledger.records import CommittedRound, Genesis, Record
from farflung.peer.machine.effects import Encode
from farflung.peer.trainer.effects import Freeze
from farflung.simulator.trainer import VirtualTrainer, initial_values
from farflung.simulator.world import Scenario, World

LR, MOMENTUM = 0.7, 0.9
ROUNDS = 5
# Of a run with short periods at first, whose host chose no momentum.
LONG, START, START_MOMENTUM = 45, 18, 0.3


class UnequalTrainer(VirtualTrainer):
    """Each peer learns something of its own, and its steps are worth a number of tokens of its own."""

    def _freeze(self, freeze: Freeze) -> None:
        generator = torch.Generator().manual_seed(self._seed() + self.machine.step_count)
        cells = self.parts[freeze.fragment].cells
        learned = torch.randn(self._local.shape, generator=generator)
        learned[cells.start] = 0.0  # counts the steps, for the invariants
        self._local[cells] += learned[cells]
        super()._freeze(freeze)

    def _seed(self) -> int:
        return sum(self.host.peer.encode())

    @property
    def tokens_per_step(self) -> int:  # type: ignore[override]
        return 7 + self._seed() % 23


@dataclass
class Seen:
    """What a bystander who sees everything writes down."""

    initial: Tensor | None = None
    contributions: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    commits: list[CommittedRound] = field(default_factory=list)


class ObservedWorld(World):
    trainer_class = UnequalTrainer

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.seen = Seen()

    def _write(self, record: Record) -> None:
        super()._write(record)
        if isinstance(record, Genesis):
            elements = self.model.chunk_count * self.model.chunk_elements
            self.seen.initial = initial_values(record.peer, elements)
        elif isinstance(record, CommittedRound):
            self.seen.commits.append(record)

    def _observe(self, what: str, details: object) -> None:
        super()._observe(what, details)
        if what == "encoded":
            peer, encode, _ = details  # type: ignore[misc]
            assert isinstance(encode, Encode)
            delta = peer.state.part(peer.slots[encode.slot], encode.fragment)
            self.seen.contributions[encode.round_no, peer.peer] = delta.clone()


def run(peers: int, fragments: int = 1, schedule: str = "blocking", start: int = 0) -> ObservedWorld:
    calm = Scenario(
        policy="mean",
        peers=peers,
        fragments=fragments,
        schedule=schedule,
        mix=0.0 if schedule == "blocking" else 0.25,
        rounds=LONG if start else ROUNDS,
        step="auto" if start else "nesterov",
        sync_every=8 if start else 4,
        start_rounds=start,
        end_s=400.0,
        min_peers=peers,
        drop=0,
        duplicate=0,
        slow=0,
        kill_per_effect=0,
        cut_per_s=0,
        trainer_crash_per_s=0,
    )
    world = ObservedWorld(peers, calm)
    assert world.run().outcome == "finished"
    return world


def merged(record: CommittedRound, seen: Seen) -> Tensor:
    """The weighted mean of a commit, in member order."""
    commit = record.commit
    d = torch.zeros_like(seen.contributions[commit.round_no, commit.included[0]])
    for peer, weight in zip(commit.members, commit.weights, strict=True):
        if weight > 0:
            d = d + weight * seen.contributions[commit.round_no, peer]
    return d


def reference(world: ObservedWorld, later: float = MOMENTUM, start: int = 0) -> tuple[Tensor, Tensor]:
    """DiLoCo in a single process: Nesterov momentum on the merged pseudo-gradient, each fragment by its own commits.
    `start`: versions with little momentum; `later`: that of the others."""
    assert world.seen.initial is not None
    theta = world.seen.initial.clone()
    m = torch.zeros_like(theta)
    state = next(iter(world.peers.values())).state
    for record in world.seen.commits:
        d, here = merged(record, world.seen), record.commit.fragment
        m_here, theta_here = state.part(m, here), state.part(theta, here)
        mu = START_MOMENTUM if record.commit.version <= start else later
        m_here.copy_(mu * m_here + d)
        theta_here.copy_(theta_here - LR * (d + mu * m_here))
    return theta, m


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32).flatten()


SHAPES = [
    (1, 1, "blocking"),
    (2, 1, "blocking"),
    (3, 1, "blocking"),
    (5, 1, "blocking"),
    (1, 3, "blocking"),
    (3, 2, "blocking"),
    (3, 1, "overlap"),
    (3, 2, "overlap"),
    (3, 3, "streaming"),
]


@pytest.mark.parametrize(("peers", "fragments", "schedule"), SHAPES)
def test_every_peer_ends_bit_for_bit_where_a_single_process_ends(
    peers: int, fragments: int, schedule: str
) -> None:
    world = run(peers, fragments, schedule)
    theta, momentum = reference(world)
    assert len(world.seen.commits) >= ROUNDS * fragments and len(world.peers) == peers
    for peer in world.peers.values():
        assert torch.equal(bits(peer.anchor), bits(theta))
        assert torch.equal(bits(peer.state._parts[1]), bits(momentum))


@pytest.mark.parametrize(("fragments", "schedule"), [(1, "blocking"), (2, "overlap"), (3, "streaming")])
def test_a_start_of_short_periods_with_little_momentum_is_what_a_single_process_computes(
    fragments: int, schedule: str
) -> None:
    world = run(2, fragments, schedule, START)
    later = world.manifest.outer_numbers.momentum
    assert later > START_MOMENTUM
    theta, _ = reference(world, later, START)
    assert all(torch.equal(bits(peer.anchor), bits(theta)) for peer in world.peers.values())
    if schedule == "blocking":
        steps = {record.commit.version: record.steps for record in world.seen.commits}
        due = {version: 2 * world.manifest.periods.at(version - 1) for version in range(1, LONG + 1)}
        assert steps == due, "of both peers, by the version that they made"


@pytest.mark.parametrize("peers", [2, 3, 5])
def test_the_reference_run_weighs_its_peers_unequally_and_by_their_tokens(
    peers: int,
) -> None:
    """Otherwise the test above would prove less than it says."""
    world = run(peers)
    for record in world.seen.commits:
        weights = record.commit.weights
        assert len(set(weights)) > 1 and min(weights) > 0
        assert abs(sum(weights) - 1) < 1e-6
    vectors = [v for (number, _), v in world.seen.contributions.items() if number == 1]
    assert len({tuple(v.tolist()) for v in vectors}) == peers


@pytest.mark.parametrize("peers", [1, 3])
def test_the_outer_step_is_that_of_sgd_with_nesterov_momentum(
    peers: int,
) -> None:
    """Up to rounding only: SGD may fuse multiply and add."""
    world = run(peers)
    assert world.seen.initial is not None
    theta = torch.nn.Parameter(world.seen.initial.clone())
    sgd = torch.optim.SGD([theta], lr=LR, momentum=MOMENTUM, nesterov=True)
    for record in world.seen.commits:
        theta.grad = merged(record, world.seen)
        sgd.step()
    for peer in world.peers.values():
        assert torch.allclose(peer.anchor, theta.detach(), rtol=1e-5, atol=1e-6)
