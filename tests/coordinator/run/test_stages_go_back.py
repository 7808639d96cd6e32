"""A model in stages whose newest state is lost in one of them: all stages go back together, or none does (P13)."""

from __future__ import annotations

import json
from typing import Any

from farflung.coordinator.ledger.records import RolledBack, WonBack
from farflung.protocol.digests import hash_bytes
from farflung.protocol.messages import Welcome
from farflung.protocol.orders import GoBack, Rewind
from rig.stage_hall import StageHall

RULES = "[checkpoint]\nevery_rounds = 1\ngo_back_after_s = 30.0"
PATIENCE_S = 80


def with_versions(count: int) -> StageHall:
    """Two peers of each of two stages; then all of stage 1 say good-bye."""
    hall = StageHall(2, RULES)
    hall.join("ann", "bob", "cyd", "dan")
    hall.found()
    for _ in range(count):
        hall.one_batch()
    assert [book.version for book in hall.machine.core.ledger.books] == [count] * 2
    return hall


def loses_stage_1(hall: StageHall) -> None:
    for name in ("bob", "dan"):
        hall.leaves(name)


def brings(hall: StageHall, name: str, version: int) -> None:
    """Of stage 1, out of a checkpoint."""
    digest = hash_bytes(str(version).encode(), bytes([1]))
    hall.hello(name, (1,), version, digest)
    peer = hall.peers[name]
    peer.version, peer.digest = version, digest


def status_of(hall: StageHall) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(hall.machine.status(hall.now))
    return status


def test_the_status_says_what_is_lost_who_may_bring_it_and_what_the_host_can_do() -> None:
    hall = with_versions(2)
    hall.peers["ann"].saved = 1
    hall.settle(1)
    before = status_of(hall)["reason"]
    gone = [hall.peers.pop(name).guest for name in ("bob", "dan")]
    for guest in gone:  # without a good-bye
        hall.machine.on_closed(guest.peer, guest.session, hall.now)
    assert "no living peer" not in status_of(hall)["reason"], "a moment later they may be here again"
    hall.settle(20)
    status = status_of(hall)
    lost = "no living peer holds version 2 of stage 1: waiting for "
    assert status["reason"].startswith(lost) and "no living peer" not in before
    assert all(hall.machine.core.name(guest.peer) in status["reason"] for guest in gone), "who may bring it"
    assert "or for one with a checkpoint (join --checkpoints)" in status["reason"]
    assert status["reason"].endswith("the host can found the run anew: farflung go-back --to 0 run.toml")
    assert status["stages"][1]["reason"] == status["reason"] != status["stages"][0]["reason"]
    brings(hall, "eve", 1)
    hall.settle(20)
    assert "of stage 1, the newest that all stages have is 1: waiting for " in status_of(hall)["reason"]


def test_the_status_says_so_too_where_everybody_is_gone() -> None:
    hall = with_versions(1)
    for name in ("ann", "bob", "cyd", "dan"):
        peer = hall.peers.pop(name)
        hall.machine.on_closed(peer.guest.peer, peer.guest.session, hall.now)
    hall.settle(20)
    told = status_of(hall)["reason"]
    assert told.startswith("no living peer holds version 1 of stage 0: waiting for ")
    assert told.endswith("; the same of stage 1")
    hall.start()
    assert "no living peer" not in status_of(hall)["reason"], (
        "they may be on their way to the new coordinator"
    )


def test_P13_all_stages_go_back_to_the_newest_version_that_each_of_them_has() -> None:
    hall = with_versions(3)
    hall.peers["ann"].saved = 1
    hall.settle(1)
    hall.peers["ann"].saved = 2
    hall.settle(1)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.peers["eve"].saved = 3  # so it says; it holds version 1
    hall.settle(PATIENCE_S)
    [record] = hall.written(RolledBack)
    assert isinstance(record, RolledBack) and record.versions == (1, 1)
    assert [book.version for book in hall.machine.core.ledger.books] == [1, 1]
    assert hall.machine.core.ledger.batches.cursor == (0, 8)
    for name, peer in hall.peers.items():
        peer.version, peer.digest = 1, hash_bytes(b"1", bytes([peer.stage]))
        peer.batch_version, peer.counted, peer.frozen = 1, set(), False
        assert name in ("ann", "cyd", "eve")
    hall.settle()
    hall.one_batch()
    assert [book.version for book in hall.machine.core.ledger.books] == [2, 2]


def test_P13_the_run_does_not_go_back_to_what_another_stage_has_not() -> None:
    hall = with_versions(3)
    hall.peers["ann"].saved = 2
    hall.settle(1)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.settle(PATIENCE_S)
    assert not hall.written(RolledBack)
    told = (
        "no living peer holds version 3 of stage 1: waiting for one that does, or for one with a checkpoint"
    )
    assert any(note.startswith(told) for note in hall.notes)
    refused = hall.order(GoBack())
    assert "nobody here holds any version of the run, or has a checkpoint of one" in refused
    brings(hall, "fay", 2)
    hall.settle(PATIENCE_S)
    [record] = hall.written(RolledBack)
    assert isinstance(record, RolledBack) and record.versions == (2, 2)


def test_the_host_rewinds_to_a_version_that_every_stage_has_a_checkpoint_of() -> None:
    hall = with_versions(3)
    hall.peers["ann"].saved = hall.peers["cyd"].saved = 2
    hall.settle(1)
    assert "nobody here is known to hold version 2" in hall.order(Rewind(to=2))
    hall.peers["dan"].saved = 2
    hall.settle(1)
    assert "Rewinding to version 2, 2 undoes" in hall.order(Rewind(to=2))


def test_P13_a_stage_does_not_win_back_what_the_others_do_not_have() -> None:
    hall = with_versions(3)
    hall.peers["ann"].saved = 1
    hall.settle(1)
    bob = hall.peers["bob"]
    state = bob.version, bob.digest
    for name in ("bob", "dan"):
        peer = hall.peers.pop(name)
        hall.machine.on_closed(peer.guest.peer, peer.guest.session, hall.now)
    brings(hall, "eve", 1)
    hall.settle(PATIENCE_S)
    assert not hall.written(RolledBack), "bob may hold version 3"
    hall.order(GoBack(sure=True))
    [record] = hall.written(RolledBack)
    assert isinstance(record, RolledBack) and record.versions == (1, 1)
    hall.peers["bob"] = bob
    hall.hello("bob", (1,), *state)
    bob.era = 0
    hall.beats("bob")  # nobody of stage 0 has said that it holds version 3 of the era before
    assert not hall.written(WonBack)


def test_P4_whoever_brings_the_newest_state_of_a_stage_serves_it_though_another_stage_is_empty() -> None:
    """Else the run would go back behind what is there."""
    hall = with_versions(2)
    state = hall.peers["bob"].version, hall.peers["bob"].digest
    for name in ("ann", "bob", "cyd", "dan"):
        hall.leaves(name)
    answer = hall.hello("eve", (1, 0), *state)
    assert isinstance(answer, Welcome) and answer.fragments == (1,)
    hall.peers["eve"].version, hall.peers["eve"].digest = state
    hall.beats("eve")
    again = hall.hello("fay", (1, 0), *state)
    assert isinstance(again, Welcome) and again.fragments == (0,), "eve holds it already"
    hall.leaves("fay")
    made_up = hall.hello("gil", (1, 0), 7, bytes(32))
    assert isinstance(made_up, Welcome) and made_up.fragments == (0,)


def test_what_a_peer_has_a_checkpoint_of_is_of_the_stage_in_which_it_wrote_it() -> None:
    hall = with_versions(3)
    hall.peers["bob"].saved = 2
    hall.settle(1)
    back, [first, second] = hall.machine.going_back, hall.machine.conductors
    assert back.saved_of(second) == {2} and not back.saved_of(first)
    bob = hall.peers["bob"]
    hall.leaves("bob")
    hall.peers["bob"], bob.saved = bob, -1
    assert isinstance(hall.hello("bob", (0,)), Welcome)
    assert not back.saved_of(first) and not back.saved_of(second)
    assert back.saved_by(1) == {bob.guest.peer}, "it may read it there again"
