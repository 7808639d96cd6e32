"""Synchronous batches in bad worlds: P11, P15 and all that holds for other runs; and proof that a broken rule shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from farflung.coordinator.batches.batch_book import BookedSeat
from farflung.coordinator.batches.batches import Batches
from farflung.peer.batches.batch_work import BatchWork
from farflung.peer.local.words import LoadState
from farflung.peer.pipeline.machines.summing_machine import BatchMachine, DropSums, SumsEffect
from farflung.protocol.messages import Beat, FromMember
from farflung.protocol.mode_words import BatchBeat, BatchTick
from farflung.protocol.round_words import section
from farflung.simulator.cut_lines import ask_to_leave
from farflung.simulator.invariants import Broken
from farflung.simulator.world import Scenario, SimulationReport, World
from rig.pieces import pieces, seeds

EACH = 6  # seeds of one test
MUTANT_SEEDS = 100
LEAVES_AT_S = 6.0


def run_seed(seed: int) -> SimulationReport:
    try:
        return World(seed, Scenario.of_batches(seed)).run()
    except Exception as error:
        error.add_note(f"batches of seed {seed}")
        raise


# A batch that was skipped to its last microbatch, and whose stale masks made the next one of the same version look
# skipped as well; the end of an epoch within a run.
REGRESSIONS = (249, 311, 484)


@pytest.mark.parametrize("seed", pieces(REGRESSIONS))
def test_what_broke_a_promise_once_does_not_again(seed: int) -> None:
    run_seed(seed)


@pytest.mark.parametrize("part", pieces(5))
def test_P11_every_microbatch_counts_once_whoever_dies(part: int) -> None:
    reports = [run_seed(seed) for seed in seeds(part, EACH)]
    finished = sum(report.outcome == "finished" for report in reports)
    assert finished >= 0.8 * len(reports), f"only {finished} of {len(reports)} runs came to their end"
    assert sum(report.kills for report in reports) > len(reports), "nobody died: this shows nothing"


def test_P15_in_calm_every_batch_commits() -> None:
    for seed in range(3, 63, 12):
        report = run_seed(seed)
        assert report.outcome == "finished" and report.kills == 0


@pytest.mark.parametrize("seed", [11, 15, 31])
def test_P14_who_leaves_gives_the_sums_it_has_and_is_waited_for_no_longer(seed: int) -> None:
    """Asked while it has counted something: the batch it is in takes that, and nobody computes it again."""
    world = World(seed, Scenario.of_batches(seed))
    told: list[float] = []
    asked: list[str] = []

    def ask() -> None:
        for peer in world.peers.values():
            if peer.alive and peer.member.training.owes:
                asked.append(peer.peer)
                ask_to_leave(world, peer)
                return look()
        world.after(0.1, ask)

    def look() -> None:
        if world.peers[asked[0]].exit_code:
            told.append(world.now)
        else:
            world.after(0.1, look)

    world.after(LEAVES_AT_S, ask)
    assert world.run().outcome == "finished"
    assert told and told[0] < LEAVES_AT_S + 4.0, f"it was there for {told[0] - LEAVES_AT_S:.1f} s more"


class SaysThatItWorks(World):
    """The last peer sits down and counts nothing, and says of itself what would excuse that."""

    made = 0

    def _say(self, peer: str, message: FromMember, key: bytes) -> None:
        if peer == self.last.peer and isinstance(message, Beat) and message.sections:
            self.made += 1
            lie = replace(section(BatchBeat, message.sections), counted=b"", **self.words())
            message = replace(message, sections=(lie,))
        super()._say(peer, message, key)

    def words(self) -> dict[str, float]:
        return {"unit_s": 1e9}


class SaysThatItMakes(SaysThatItWorks):
    def words(self) -> dict[str, float]:
        return {"made": self.made}


@pytest.mark.parametrize("world", [SaysThatItWorks, SaysThatItMakes])
def test_P11_a_seat_that_counts_nothing_is_given_up_whatever_it_says(world: type[World]) -> None:
    drawn = Scenario.of_batches(3)
    size: dict[str, Any] = {"peers": 4, "min_peers": 1, "rounds": 12, "batch": 24, "end_s": 300.0}
    calm: dict[str, Any] = {"faults_until_s": 0.0, "leave_per_s": 0.0, "blackout_at_s": 0.0, "undialable": 0}
    assert world(3, dataclasses.replace(drawn, every_rounds=0, **size, **calm)).run().outcome == "finished"


# ---- mutations that must be seen ---------------------------------------------------------------------------------


def seeds_that_see_it(soonest: int = 0) -> Iterator[int]:
    for seed in (soonest, *range(MUTANT_SEEDS)):
        try:
            World(seed, Scenario.of_batches(seed)).run()
        except (Broken, ValueError):  # the ledger itself refuses a commit that is not its batch
            yield seed


def test_a_gone_seats_work_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    unseat, counted = Batches._unseat, Batches.counted
    assert isinstance(counted, property) and counted.fget is not None
    real, ghosts = counted.fget, {}

    def keep(self: Batches, seat: BookedSeat, why: str) -> None:
        version = self.book.batch.version if self.book.batch is not None else -1
        ghosts[id(self), version] = ghosts.get((id(self), version), 0) | self._of(seat.number).counted
        unseat(self, seat, why)

    def with_ghosts(self: Batches) -> int:
        version = self.book.batch.version if self.book.batch is not None else -1
        return int(real(self)) | ghosts.get((id(self), version), 0)

    monkeypatch.setattr(Batches, "_unseat", keep)
    monkeypatch.setattr(Batches, "counted", property(with_ghosts))
    assert next(seeds_that_see_it(), None) is not None


def test_sums_that_a_returning_seat_does_not_drop_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: BatchWork, due: BatchTick | None) -> bool:
        if due is not None:
            self._due, self.seat = due, due.seat
        return False

    monkeypatch.setattr(BatchWork, "on_tick", keep)
    assert next(seeds_that_see_it(soonest=55), None) is not None


def test_sums_that_a_trainer_does_not_drop_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    load = BatchMachine._load

    def keep(self: BatchMachine, word: LoadState) -> list[SumsEffect]:
        return [effect for effect in load(self, word) if not isinstance(effect, DropSums)]

    monkeypatch.setattr(BatchMachine, "_load", keep)
    assert next(seeds_that_see_it(), None) is not None
