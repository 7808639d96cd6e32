"""Going back by one version, and what a peer says it can bring."""

from __future__ import annotations

import pytest

from farflung.checkpoints.result_log import ResultLog
from farflung.peer.machine.checkpoint_policy import OTHERS_TOLD, OWN_TOLD, Shelf, Undoing
from farflung.peer.machine.disk_words import Undone
from farflung.peer.machine.effects import Undo
from farflung.peer.machine.held_fragment import Empty, Hashing, ReplicaState
from farflung.peer.machine.replicas import Replica
from farflung.protocol.limits import SHELVED_TOLD
from farflung.protocol.mode_words import Shelved
from farflung.protocol.model_schema import fragments_of


def digest(version: int) -> bytes:
    return bytes([version]) * 32


def shelved(version: int, stage: int = 0) -> Shelved:
    return Shelved.of(version, stage, [digest(version)])


# ---- going back --------------------------------------------------------------------------------------------------


def test_it_is_asked_for_once_and_not_while_the_trainer_reads() -> None:
    undoing = Undoing()
    assert undoing.begin({1: 4}, era=1) == frozenset()
    assert undoing.take_due(loading=True) == [], "the trainer reads the state"
    assert undoing.take_due(loading=False) == [Undo(1, 4)] and undoing.take_due(loading=False) == []
    assert undoing.on_undone(Undone(1, 4, 1, whole=True)) and not undoing.on_undone(
        Undone(1, 4, 1, whole=True)
    )


def test_P4_what_was_asked_for_in_an_era_that_is_over_ends_all_the_same() -> None:
    undoing = Undoing()
    undoing.begin({0: 4}, era=1)
    undoing.take_due(loading=False)
    assert undoing.begin({}, era=2) == frozenset(), "the shell is still at it"
    assert undoing.on_undone(Undone(0, 4, 1, whole=True))
    undoing.begin({0: 3}, era=3)
    assert undoing.begin({}, era=4) == {0}, "it had not been asked for yet"
    assert undoing.take_due(loading=False) == []


@pytest.mark.parametrize(("whole", "left"), [(True, Hashing), (False, Empty)])
def test_P4_nothing_is_put_among_what_is_gone_back_to_and_what_is_not_all_there_is_no_version(
    whole: bool, left: type[ReplicaState]
) -> None:
    replica = replica_of(0)
    replica.held.fill()
    replica.unfilled(touched=True)
    replica.held.fill()
    if whole:
        replica.filled(4)
    else:
        replica.unfilled(touched=True)
    assert isinstance(replica.held.stand, left)


def test_the_answer_of_a_stage_that_was_given_up_is_none_of_this_one() -> None:
    assert not Undoing().on_undone(Undone(0, 4, 1, whole=True))


# ---- what it can bring -------------------------------------------------------------------------------------------


def replica_of(stage: int) -> Replica:
    return Replica("ann", b"12345678", fragments_of(4, 4)[stage], ResultLog(3))


def test_a_beat_has_the_newest_of_my_own_stage_and_a_few_of_others() -> None:
    shelf = Shelf()
    shelf.put("checkpoints", [shelved(version, stage) for version in range(1, 40) for stage in range(4)])
    told = shelf.told([replica_of(2)])
    mine = [each.version for each in told if each.first == 2]
    assert mine == list(range(39, 39 - OWN_TOLD, -1))
    assert [each.version for each in told if each.first == 0] == [39, 38][:OTHERS_TOLD]
    assert len(told) <= SHELVED_TOLD


def test_what_is_found_anew_takes_the_place_of_what_was_there_and_of_no_other_place() -> None:
    shelf = Shelf()
    shelf.put("checkpoints", [shelved(1)])
    shelf.put("kept", [shelved(3)])
    shelf.put("checkpoints", [shelved(2)])
    assert [each.version for each in shelf.told([replica_of(0)])] == [3, 2]


def test_what_could_not_be_read_is_promised_no_more() -> None:
    shelf = Shelf()
    shelf.put("checkpoints", [shelved(2), shelved(3), shelved(3, stage=1)])
    shelf.strike(0, ((3, digest(3)), (2, b"of another era" + bytes(18))))
    told = shelf.told([replica_of(0)])
    assert [(each.version, each.first) for each in told] == [(2, 0), (3, 1)]


def test_a_tag_is_of_its_fragment_and_its_digest_alone() -> None:
    two = Shelved.of(4, 2, [digest(4), digest(5)])
    assert two.is_of(2, digest(4)) and two.is_of(3, digest(5))
    for fragment, other in ((1, digest(4)), (2, digest(5)), (4, digest(5)), (2, b""), (4, b"")):
        assert not two.is_of(fragment, other)
