"""P19 in the simulator: what archiving peers keep of others' contributions, in calm runs and in hostile ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farflung.peer.simulator.scenario import Scenario
from farflung.peer.simulator.world import World
from rig.pieces import pieces

CALM = Scenario(
    peers=4, chunks=4, rounds=6, every_rounds=1, archivers=1, fragments=2, audit=0.5, period_s=2.0,
    drop=0, duplicate=0, slow=0, kill_per_effect=0, cut_per_s=0, trainer_crash_per_s=0, store_fails=0,
)  # fmt: skip


def whole(world: World) -> set[tuple[int, int]]:
    """(fragment, version) of which an archiver has all that was merged."""
    commits = world.invariants.commits
    return {
        (fragment, version)
        for (_, fragment, version), authors in world.invariants.archived.items()
        if (commit := commits.get((fragment, version))) is not None
        and all(authors.get(author) for author in commit.included)
    }


def test_in_a_calm_run_all_that_was_merged_is_kept_but_for_the_last_two_versions() -> None:
    """At the end the authors leave with their bytes, as an audit finds them gone."""
    for seed in (0, 1, 2, 3, 7):  # in seed 4 an author joins in the very round that is asked for
        world = World(seed, CALM)
        assert world.run().outcome == "finished"
        due = {(fragment, version) for fragment in range(2) for version in range(1, CALM.rounds - 1)}
        assert due <= set(world.invariants.commits) and due <= whole(world), seed


def test_what_a_run_does_not_keep_is_not_asked_for() -> None:
    for nothing in ({"audit": 0.0}, {"every_rounds": 0}):
        world = World(1, replace(CALM, **nothing))
        assert world.run().outcome == "finished" and not world.invariants.archived


@pytest.mark.parametrize("batch", pieces(4))
def test_in_a_hostile_world_what_is_kept_is_what_was_sent(batch: int) -> None:
    """Kills, lost and late messages, runs that go back: less is kept, and none of it is wrong."""
    some = 0
    for seed in range(batch * 6, batch * 6 + 6):
        world = World(seed, replace(Scenario.of(seed), every_rounds=1, archivers=2))
        world.run()
        some += len(world.invariants.archived)
    assert some
