"""One line that is far slower than the others: their rounds go on, its work counts, and no promise is broken."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from msgspec import structs

from farflung.coordinator.ledger.records import CommittedRound, from_bytes
from farflung.protocol.messages import Beat, FromMember, ProgressReport
from farflung.simulator.cut_lines import calm_slow_line, of_slow_line
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

ROUNDS = 20


def commits(world: World) -> list[CommittedRound]:
    records = [from_bytes(raw) for raw in world.journal]
    return [record for record in records if isinstance(record, CommittedRound)]


def world_of(seed: int, **changes: object) -> World:
    """Journals are not folded, so that every commit stands in it."""
    scenario = replace(calm_slow_line(seed, faults_until_s=0.0), rounds=ROUNDS, policy="mean", end_s=300.0)
    world = World(seed, replace(scenario, **changes))  # type: ignore[arg-type]
    assert world.run().outcome == "finished"
    return world


def test_the_others_do_not_wait() -> None:
    """With every codec: its chunks take a second or so each, and rounds of the others a third of one.  The median: a
    hash list that a report overtook is said again a second later, which a few rounds meet."""
    took, usual = (
        median(record.seconds for record in commits(world_of(0, **line))[1:])
        for line in ({}, {"slow_line_s": 0.0})
    )
    assert took <= 1.3 * usual


@pytest.mark.parametrize("seed", pieces([0, 1]))
def test_what_the_slow_one_learned_counts(seed: int) -> None:
    world = world_of(seed)
    slow = world.slow_line.peer
    included = [slow in record.commit.included for record in commits(world)]
    assert sum(included) >= 3 and not all(included)
    counted = sum(record.tokens_by.get(slow, 0) for record in commits(world))
    trainer = world.peers[slow].trainer
    assert trainer is not None and counted >= 0.6 * trainer.machine.all_tokens


class KeepsItOut(World):
    """The last peer owns chunks, and would have the slow one's work never counted."""

    lie = ""

    def _say(self, peer: str, message: FromMember, key: bytes) -> None:
        if peer == self.last.peer and isinstance(message, Beat):
            if self.lie == "knows no plan":
                told = tuple(structs.replace(each, sections=()) for each in message.fragments)
                message = structs.replace(message, fragments=told)
            elif self.lie == "comes and goes":
                message = structs.replace(message, leaving=bool(self.now // 3 % 2))
        if peer == self.last.peer and isinstance(message, ProgressReport) and self.lie == "has it never":
            held = {whose: hashes for whose, hashes in message.held.items() if whose != self.slow_line.peer}
            message = structs.replace(message, held=held)
        super()._say(peer, message, key)


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param("", marks=pytest.mark.hard),
        "knows no plan",
        pytest.param("comes and goes", marks=pytest.mark.hard),
        pytest.param("has it never", marks=pytest.mark.hard),
    ],
)
def test_P9_no_owner_keeps_the_work_of_a_slow_line_out(lie: str) -> None:
    calm = replace(calm_slow_line(1, faults_until_s=0.0), policy="mean", end_s=300.0)
    world = KeepsItOut(1, replace(calm, rounds=2 * ROUNDS, peers=6, chunks=5))
    world.lie = lie
    assert world.run().outcome == "finished"
    included = [world.slow_line.peer in record.commit.included for record in commits(world)]
    assert sum(included) >= 5, f"{sum(included)} of {len(included)}"


@pytest.mark.parametrize("batch", pieces(4))
def test_no_promise_is_broken_by_a_slow_line_in_a_bad_world(batch: int) -> None:
    outcomes, ahead = [], 0
    for seed in seeds(batch, 3):
        world = World(seed, of_slow_line(seed))
        try:
            outcomes.append(world.run().outcome)
        except Exception as error:
            error.add_note(f"python -m farflung.simulator.world {seed} slow_line")
            raise
        ahead += sum(number < 0 for _, number in world.invariants.contributions)
    assert outcomes.count("finished") >= 0.5 * len(outcomes), outcomes
    assert ahead > 0
