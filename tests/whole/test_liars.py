"""P18: members that lie about the run's state, alone and in league up to all but one, take it from nobody.

Each seed draws how many lie and how (Scenario.of_liars).  At every event: no honest peer gives up what it calculated,
is banned, or has its digest refuted, and who lies is out within two rounds.  `python benchmarks/liars.py` runs more.
"""

from __future__ import annotations

import pytest

from farflung.peer.simulator.scenario import LIES, Scenario
from farflung.peer.simulator.world import World

SEEDS = 60


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_P18_honest_peers_keep_their_state_and_finish_whoever_lies(first: int) -> None:
    for seed in range(first, first + 10):
        world = World(seed, Scenario.of_liars(seed))
        report = world.run()
        honest = [peer for peer in world.peers.values() if peer.peer not in world.league.members]
        assert report.outcome == "finished", f"seed {seed}: {report.outcome}"
        assert {peer.exit_code for peer in honest} == {"finished"}, f"seed {seed}"


def test_the_seeds_have_every_way_to_lie_and_leagues_of_nearly_all() -> None:
    drawn = [Scenario.of_liars(seed) for seed in range(SEEDS)]
    assert {each.lies for each in drawn} == set(LIES)
    assert max(each.liars for each in drawn if each.peers == 10) == 9
