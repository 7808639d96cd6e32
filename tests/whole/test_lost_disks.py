"""Seeded runs whose coordinator loses its disk at any moment of a round, and comes back with its key alone or on an old
copy: P1 to P7 hold, and no committed round is lost that somebody living could prove (P21).

More seeds: `python benchmarks/seeds.py lost_disks`.  A failing seed replays with
`python -m farflung.simulator.world SEED lost disks`.
"""

from __future__ import annotations

import pytest

from farflung.coordinator.restoring import kept_books
from farflung.coordinator.restoring.kept_books import kept_leases
from farflung.simulator.scenario import Scenario
from farflung.simulator.world import World
from rig.pieces import pieces, seeds

EACH = 4  # seeds of one test


def run(seed: int) -> World:
    world = World(seed, Scenario.of_lost_disks(seed))
    try:
        report = world.run()
    except Exception as error:
        error.add_note(f"seed {seed}; replay: python -m farflung.simulator.world {seed} lost disks")
        raise
    assert report.outcome == "finished" or seed % 3 == 0, "where nobody else dies, the run comes to its end"
    return world


@pytest.mark.parametrize("batch", pieces(3))
def test_no_promise_is_broken_where_the_coordinators_disk_is_lost(batch: int) -> None:
    restored = [world.lost_disk.versions for world in map(run, seeds(batch, EACH))]
    assert 3 * sum(versions is not None for versions in restored) >= 2 * len(restored), "most lose their disk"


@pytest.mark.parametrize("seed", pieces([1, 2, 4, 5, 7, 8], 2))
def test_P21_in_a_large_run_some_keep_the_books_and_these_may_be_too_long_for_leases(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than two members two keep the books, and in the books nobody holds a lease."""
    monkeypatch.setattr(kept_books, "WHOLE_ROSTER", 2)
    monkeypatch.setattr(kept_books, "KEEPERS", 2)
    monkeypatch.setattr(kept_books, "kept_leases", lambda leases, most_bytes: kept_leases(leases, 0))
    run(seed)
