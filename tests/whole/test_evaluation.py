"""The held-out loss of a run, through kills, bad lines and liars: what is written is that of the version it names."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor

from farflung.collectives.round.effects import Seal
from farflung.coordinator.evaluation.evaluation import Evaluated
from farflung.coordinator.ledger.records import RolledBack, from_bytes
from farflung.protocol.messages import Beat, FromMember
from farflung.protocol.mode_words import ScoreBeat
from farflung.simulator.peer import VirtualPeer
from farflung.simulator.scenario import Scenario
from farflung.simulator.trainer import virtual_loss, virtual_text
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

WINDOWS = 16


class WatchedWorld(World):
    """It remembers the values of each version."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        super().__init__(seed, scenario)
        self.values: dict[tuple[int, int, int], Tensor] = {}  # by (era, fragment, version)

    def _observe(self, what: str, details: object) -> None:
        super()._observe(what, details)
        if what == "sealed" and isinstance(details, tuple):
            peer, seal, _, era = details
            assert isinstance(peer, VirtualPeer) and isinstance(seal, Seal)
            held, size = peer.fragments[seal.fragment], peer.model.chunk_elements
            cells = slice(held.first * size, (held.first + held.count) * size)
            self.values.setdefault((era, seal.fragment, seal.version), peer.anchor[cells].clone())

    def values_of(self, era: int, versions: tuple[int, ...]) -> Tensor:
        """A version that was not made anew in this era is of an older one."""
        parts = []
        for fragment, version in enumerate(versions):
            made_in = max(e for e, f, v in self.values if (f, v) == (fragment, version) and e <= era)
            parts.append(self.values[made_in, fragment, version])
        return torch.cat(parts)

    def losses_of(self, era: int, versions: tuple[int, ...]) -> list[float]:
        """The true ones."""
        return [virtual_loss(self.values_of(era, versions), window) for window in range(WINDOWS)]

    def evaluated(self) -> list[tuple[int, Evaluated]]:
        """With the era of each."""
        era, found = 0, []
        for raw in self.journal:
            record = from_bytes(raw)
            era += isinstance(record, RolledBack)
            if isinstance(record, Evaluated):
                found.append((era, record))
        return found


def run(seed: int, **changes: object) -> WatchedWorld:
    world = WatchedWorld(seed, replace(Scenario.of_evaluation(seed), **changes))  # type: ignore[arg-type]
    world.run()
    return world


@pytest.mark.parametrize("piece", pieces(6))
def test_what_is_written_is_the_loss_of_its_version(piece: int) -> None:
    written = whole = texts = 0
    for seed in seeds(piece, 10):
        world = run(seed)
        for era, record in world.evaluated():
            true = world.losses_of(era, record.versions)
            assert record.loss is not None and not record.outvoted, (seed, record)
            written += 1
            if record.text:
                texts += 1
                assert record.text == virtual_text(world.values_of(era, record.versions)), (seed, record)
            if record.windows == record.of:
                whole += 1
                assert record.loss == pytest.approx(sum(true) / WINDOWS, abs=1e-5), (seed, record)
            assert all(min(true) - 1e-5 <= each <= max(true) + 1e-5 for each in record.means.values()), (
                seed,
                record,
            )
    assert whole >= written / 2 > 4 and texts >= written / 4


def test_in_a_calm_world_each_version_that_is_due_is_evaluated_by_all_and_so_is_the_last() -> None:
    for seed in (3, 7, 11):
        world = run(seed, rounds=5, min_peers=2, schedule="blocking", audit=0.0)
        found = [record for _, record in world.evaluated()]
        assert [each.version for each in found] == [2, 4, 5], seed
        assert all(each.windows == WINDOWS for each in found)


class LyingWorld(WatchedWorld):
    """The last so many peers say other losses, and all of them the same."""

    liars_count = 1

    def _say(self, peer: str, message: FromMember, key: bytes) -> None:
        if peer in list(self.peers)[-self.liars_count :] and isinstance(message, Beat):
            message = structs.replace(message, sections=tuple(map(_lied, message.sections)))
        super()._say(peer, message, key)


def _lied(section: object) -> object:
    if not isinstance(section, ScoreBeat):
        return section
    said = struct.unpack(f"<{len(section.nats) // 4}f", section.nats)
    halved = struct.pack(f"<{len(said)}f", *(each / 2 for each in said))
    return structs.replace(section, nats=halved, text=section.text and (1, 2, 6, 6, 6))


@pytest.mark.parametrize(("peers", "liars"), [(3, 1), (4, 1), (5, 1), (8, 2)])
def test_a_minority_of_liars_is_outvoted_and_named(peers: int, liars: int) -> None:
    scenario = replace(Scenario.of_evaluation(3), peers=peers, undialable=0, helpers=0, schedule="blocking")
    world = LyingWorld(3, replace(scenario, evaluates=True, min_peers=peers, audit=0.0, rounds=2))
    world.liars_count = liars
    world.run()
    for era, record in world.evaluated():
        assert record.loss == pytest.approx(sum(world.losses_of(era, record.versions)) / WINDOWS, abs=1e-5)
        assert set(record.outvoted) == set(list(world.peers)[-liars:])
        if record.text:
            true = virtual_text(world.values_of(era, record.versions))
            assert record.text == true[: len(record.text)], "or as far as a majority goes"
    assert world.evaluated()


def test_of_two_that_contradict_each_other_neither_is_believed() -> None:
    scenario = replace(Scenario.of_evaluation(3), peers=2, undialable=0, helpers=0, schedule="blocking")
    world = LyingWorld(3, replace(scenario, evaluates=True, min_peers=2, audit=0.0, rounds=2))
    world.run()
    [(_, record)] = world.evaluated()
    assert record.loss is None and len(record.means) == 2 and not record.outvoted
    assert record.text == (1, 2), "as far as they agree"
