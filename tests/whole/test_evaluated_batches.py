"""The held-out loss of runs of batches, in one piece and in stages, in bad worlds: each figure is that of its version
(the invariants compare them), and nothing of a held-out batch is ever learned (P7, P11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.coordinator.batches.batch_book import BatchBegun, HeldOutEnded
from farflung.coordinator.ledger.records import Record, from_bytes, tag_of
from farflung.simulator.batches.stage_invariants import BatchInvariants
from farflung.simulator.world import Scenario, World
from rig.pieces import pieces, seeds

pytestmark = [pytest.mark.mode("batches"), pytest.mark.mode("evaluation")]


def run(seed: int, stages: bool, **changes: object) -> tuple[list[Record], int]:
    """What was written, and how many versions were evaluated."""
    world = World(seed, replace(Scenario.of_evaluated(seed, stages), **changes))  # type: ignore[arg-type]
    try:
        world.run()
    except Exception as error:
        error.add_note(f"evaluated {'stages' if stages else 'batches'} of seed {seed}")
        raise
    assert isinstance(world.invariants, BatchInvariants)
    return [from_bytes(raw) for raw in world.journal], world.invariants.evaluated


@pytest.mark.parametrize("stages", [False, True], ids=["one piece", "stages"])
@pytest.mark.parametrize("piece", pieces(3))
def test_P12_what_is_written_is_the_loss_of_its_version(piece: int, stages: bool) -> None:
    found = 0
    for seed in seeds(piece, 6):
        written, evaluated = run(seed, stages)
        begun = sum(isinstance(each, BatchBegun) and each.held_out for each in written)
        ended = sum(isinstance(each, HeldOutEnded) for each in written)
        assert evaluated <= ended <= begun, seed
        found += evaluated
    assert found >= 6


@pytest.mark.parametrize("stages", [False, True], ids=["one piece", "stages"])
def test_in_a_calm_world_each_version_that_is_due_is_evaluated_and_so_is_the_last(stages: bool) -> None:
    for seed in (3, 7, 11):  # those are calm
        written, _ = run(seed, stages, rounds=6, poison_every=0)
        found = [each for each in written if tag_of(each) == "evaluated"]
        assert [each.version for each in found] == [5, 6], seed  # type: ignore[attr-defined]
        assert all(each.windows == each.of == 16 for each in found)  # type: ignore[attr-defined]


def test_P11_stages_that_take_steps_of_their_own_take_none_on_what_is_held_out() -> None:
    for seed in (2, 3, 5):
        world = Scenario.of_local_stages(seed)
        _, evaluated = run(
            seed, True, step=world.step, local_micros=world.local_micros, clip=0.0, poison_every=0
        )
        assert evaluated, seed
