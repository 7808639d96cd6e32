"""A model in stages at the coordinator: who serves which stage, and one record that moves them all."""

from __future__ import annotations

from farflung.coordinator.ledger.records import Genesis
from rig.stage_hall import StageHall


def test_P2_P13_a_calm_run_commits_all_stages_at_once() -> None:
    hall = StageHall(3)
    hall.join("ann", "bob", "cyd", "dan", "eve", "fay")
    assert [peer.stage for peer in hall.peers.values()] == [0, 1, 2, 0, 1, 2]
    hall.found()
    [genesis] = hall.written(Genesis)
    assert len(genesis.digests) == 3
    hall.one_batch()
    hall.one_batch()
    assert [[each.commit.version for each in record.rounds] for record in hall.commits] == [[1] * 3, [2] * 3]
    assert hall.machine.core.ledger.version == 2 and hall.machine.core.ledger.loss == 2.0
