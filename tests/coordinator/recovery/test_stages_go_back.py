"""A model in stages whose newest state is lost in one of them: all stages go back together, or none does (P13)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from farflung.coordinator.batches.batch_book import BatchBook
from farflung.coordinator.ledger.records import RolledBack
from farflung.coordinator.recovery.recovery import SOON_S
from farflung.protocol.messages import GoBack, Rewind, Welcome
from rig.stage_hall import StageHall, digest_at

PATIENCE_S, DEAD_AFTER_S = 60.0, 5.0
RULES = f"[checkpoint]\nevery_rounds = 1\ngo_back_after_s = {PATIENCE_S}"
SOON = DEAD_AFTER_S + SOON_S + 1.0
LATE = PATIENCE_S + 3 * DEAD_AFTER_S


def with_versions(count: int) -> StageHall:
    """Two peers of each of two stages."""
    hall = StageHall(2, RULES)
    hall.join("ann", "bob", "cyd", "dan")
    hall.found()
    for _ in range(count):
        hall.one_batch()
    assert [book.version for book in hall.machine.core.ledger.books] == [count] * 2
    return hall


def loses_stage_1(hall: StageHall) -> None:
    for name in ("bob", "dan"):
        dies(hall, name)


def dies(hall: StageHall, name: str) -> None:
    """Without a good-bye: it may be alive behind a connection that is cut."""
    guest = hall.peers.pop(name).guest
    hall.machine.on_closed(guest.peer, guest.session, hall.now)


def brings(hall: StageHall, name: str, version: int, *shelf: int) -> None:
    """Of stage 1: it has read it out of a checkpoint, or says so."""
    hall.hello(name, (1,), version, digest_at(1, version))
    peer = hall.peers[name]
    peer.version, peer.digest, peer.shelf = version, digest_at(1, version), shelf


def status_of(hall: StageHall) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(hall.machine.status(hall.now))
    return status


def went_back_to(hall: StageHall) -> list[tuple[int, ...]]:
    return [record.versions for record in hall.written(RolledBack) if isinstance(record, RolledBack)]


def says_it_can_bring(hall: StageHall, *versions: int) -> None:
    """Both peers of stage 0."""
    hall.peers["ann"].shelf = hall.peers["cyd"].shelf = versions
    hall.settle(1)


# ---- by itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye", [True, False])
def test_P13_one_version_is_given_up_within_seconds_though_the_dead_one_may_be_alive(goodbye: bool) -> None:
    """What stage 0 had before its last round is enough: no checkpoint, no host."""
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    for name in ("bob", "dan"):
        hall.leaves(name) if goodbye else dies(hall, name)
    brings(hall, "eve", 2)
    hall.settle(2)
    assert not went_back_to(hall), "they may be here again in a moment"
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]
    assert [book.version for book in hall.machine.core.ledger.books] == [2, 2]
    assert BatchBook.of(hall.machine.core.ledger).cursor == (0, 16)
    for name, peer in hall.peers.items():
        peer.version, peer.digest, peer.era = 2, digest_at(peer.stage, 2), 1
        peer.batch_version, peer.counted, peer.frozen = 2, set(), False
        assert name in ("ann", "cyd", "eve")
    hall.settle()
    hall.one_batch()
    assert [book.version for book in hall.machine.core.ledger.books] == [3, 3]


def test_P13_several_stages_that_lose_their_holders_at_once_go_back_together() -> None:
    hall = with_versions(3)
    for name in ("ann", "bob", "cyd", "dan"):
        dies(hall, name)
    brings(hall, "eve", 2)
    hall.hello("fay", (0,), 2, digest_at(0, 2))
    hall.peers["fay"].version, hall.peers["fay"].digest = 2, digest_at(0, 2)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]


def test_P13_more_than_one_version_is_given_up_after_the_runs_own_patience_and_without_the_host() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2, 1)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.settle(int(PATIENCE_S) - 5)
    assert not went_back_to(hall), "bob and dan may come back, and it would cost two batches"
    hall.settle(int(LATE) - int(PATIENCE_S) + 5)
    assert went_back_to(hall) == [(1, 1)]


def test_P13_what_a_second_one_can_bring_a_moment_later_is_waited_for() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2, 1)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.settle(30)
    brings(hall, "fay", 2)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]


def test_P4_whoever_says_that_it_can_bring_the_newest_is_waited_for_and_not_for_ever() -> None:
    """It may be reading it: some gigabytes.  Or it lies: then the run goes on without."""
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    loses_stage_1(hall)
    brings(hall, "eve", 2, 3)
    hall.settle(int(SOON) + 20)
    assert not went_back_to(hall)
    hall.settle(int(LATE))
    assert went_back_to(hall) == [(2, 2)]


def test_P4_after_a_version_that_a_liar_could_not_bring_comes_the_next_one_that_somebody_can() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2, 1)
    loses_stage_1(hall)
    hall.hello("eve", (1,))
    hall.peers["eve"].shelf = (2,)  # a lie
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]
    for name in ("ann", "cyd"):
        peer = hall.peers[name]
        peer.version, peer.digest, peer.era = 2, digest_at(0, 2), 1
    hall.peers["eve"].era = 1
    brings(hall, "fay", 1)
    hall.peers["fay"].era = 1
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)], "it would be two batches that the run has had"
    hall.settle(int(LATE))
    assert went_back_to(hall) == [(2, 2), (1, 1)]


def test_P13_the_run_does_not_go_back_to_what_another_stage_has_not() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.settle(int(LATE))
    assert not went_back_to(hall)
    told = "nobody online has version 3 of stage 1: waiting for "
    assert any(note.startswith(told) for note in hall.notes)
    refused = hall.order(GoBack())
    assert "nobody online has any version of the run that all stages have in common" in refused
    assert "(stage 0 has 2, 3, stage 1 has 1)" in refused
    brings(hall, "fay", 2)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]


def test_P3_a_second_loss_before_the_run_has_come_as_far_again_is_not_given_up_in_a_hurry() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    loses_stage_1(hall)
    brings(hall, "eve", 2)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]
    for name in ("ann", "cyd", "eve"):
        hall.peers[name].era, hall.peers[name].shelf = 1, (1,)
        hall.beats(name)
    dies(hall, "eve")
    brings(hall, "fay", 1)
    hall.settle(int(2 * SOON))
    assert went_back_to(hall) == [(2, 2)], "version 3 was lost before: whoever has version 2 is waited for"
    hall.settle(int(LATE))
    assert went_back_to(hall) == [(2, 2), (1, 1)]


def test_P5_a_coordinator_that_has_just_begun_gives_nothing_up_before_all_can_be_back() -> None:
    hall = with_versions(3)
    hall.start()
    hall.peers.clear()
    hall.hello("ann", (0,), 3, digest_at(0, 3))
    hall.peers["ann"].version, hall.peers["ann"].digest, hall.peers["ann"].shelf = 3, digest_at(0, 3), (2,)
    brings(hall, "eve", 2)
    hall.settle(int(SOON) + 2)
    assert not went_back_to(hall)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]


def test_P13_go_back_after_s_of_zero_leaves_it_to_the_host() -> None:
    hall = StageHall(2, "[checkpoint]\nevery_rounds = 1\ngo_back_after_s = 0")
    hall.join("ann", "bob", "cyd", "dan")
    hall.found()
    for _ in range(2):
        hall.one_batch()
    says_it_can_bring(hall, 1)
    loses_stage_1(hall)
    brings(hall, "eve", 1)
    hall.settle(int(LATE))
    assert not went_back_to(hall) and "the host can go back: farflung rewind" in status_of(hall)["reason"]
    told = hall.order(GoBack())
    assert "Going back to version 1 discards 1 round " in told, "one round moved both stages"
    assert hall.order(GoBack(sure=True)) == "the run is at version 1, era 1"


def test_P13_a_stage_that_comes_back_with_what_the_others_do_not_have_takes_the_runs_version() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    bob = hall.peers["bob"]
    state = bob.version, bob.digest
    loses_stage_1(hall)
    brings(hall, "eve", 2)
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]
    hall.peers["bob"] = bob
    hall.hello("bob", (1,), *state)
    bob.era = 0
    hall.beats("bob")  # nobody of stage 0 has said that it holds version 3 of the era before
    assert went_back_to(hall) == [(2, 2)] and hall.peers["bob"].tick.era == 1


def test_P3_one_that_hears_late_of_the_new_era_does_not_hold_up_the_stages_that_went_back() -> None:
    """Ann and cyd hold version 3 of the era before.  Cyd hears of the new one; ann, over a bad line, does not."""
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    loses_stage_1(hall)
    brings(hall, "eve", 2)
    hall.peers["eve"].era = 1
    hall.settle(int(SOON))
    assert went_back_to(hall) == [(2, 2)]
    cyd = hall.peers["cyd"]
    cyd.version, cyd.digest, cyd.era = 2, digest_at(0, 2), 1
    for name in ("eve", "cyd"):
        hall.beats(name)
    hall.peers["ann"].era = 0
    hall.beats("ann")
    told = hall.peers["ann"].tick
    assert told is not None and told.era == 1, "version 3 is given up"


# ---- what people are told ----------------------------------------------------------------------------------------


def test_the_status_says_what_is_lost_and_who_may_bring_it() -> None:
    hall = with_versions(2)
    before = status_of(hall)["reason"]
    gone = [hall.peers[name].guest for name in ("bob", "dan")]
    loses_stage_1(hall)
    assert "nobody online" not in status_of(hall)["reason"], "a moment later they may be here again"
    hall.settle(20)
    status = status_of(hall)
    lost = "nobody online has version 2 of stage 1: waiting for "
    assert status["reason"].startswith(lost) and "nobody online" not in before
    assert all(hall.machine.core.name(guest.peer) in status["reason"] for guest in gone), "who may bring it"
    assert status["reason"].endswith(
        ", which may have it or an older one on disk, or for a peer with a checkpoint (join --checkpoints)"
    )
    assert status["stages"][1]["reason"] == status["reason"] != status["stages"][0]["reason"]
    says_it_can_bring(hall, 1)
    brings(hall, "eve", 1)
    hall.settle(2)
    told = "of stage 1: the run goes back to version 1 unless a peer brings it within 10 s"
    assert told in hall.machine.modes["recovery"].rollback.reason(hall.machine.drivers[1])


def test_to_restart_from_scratch_is_named_to_nobody_while_a_disk_may_have_it() -> None:
    """Whoever has left in good order has its disk still; the peer that is here says what lies on its own."""
    hall = with_versions(2)
    names = [hall.machine.core.name(hall.peers[name].guest.peer) for name in ("bob", "dan")]
    for name in ("bob", "dan"):
        hall.leaves(name)
    hall.settle(20)
    for told in (status_of(hall)["reason"], hall.order(GoBack())):
        assert "--to 0" not in told and all(name in told for name in names)
    told = hall.order(GoBack(to=0))
    assert told.startswith(
        "nobody online has any version of the run that all stages have in common. This restarts"
    )
    assert (
        all(name in told for name in names) and "may still have it on disk: wait for them if you can" in told
    )
    assert "discards all that was learned: 2 rounds" in told


def test_what_lies_in_a_place_is_taken_by_the_host_and_named_where_it_is_not_enough() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 1)
    loses_stage_1(hall)
    hall.hello("eve", (1,))  # it has just been started again, and holds nothing yet
    hall.peers["eve"].shelf = (1,)
    hall.settle(3)
    assert "Going back to version 1 discards 2 rounds" in hall.order(GoBack())
    assert "version 1 is here: farflung rewind run.toml goes to that" in hall.order(GoBack(to=0))


def test_the_status_says_so_too_where_everybody_is_gone() -> None:
    hall = with_versions(1)
    for name in ("ann", "bob", "cyd", "dan"):
        dies(hall, name)
    hall.settle(20)
    told = status_of(hall)["reason"]
    assert told.startswith("nobody online has version 1 of stage 0: waiting for ")
    assert told.endswith("; the same of stage 1")
    hall.start()
    assert "nobody online" not in status_of(hall)["reason"], "they may be on their way to the new coordinator"


def test_the_host_rewinds_to_a_version_that_every_stage_can_bring() -> None:
    hall = with_versions(3)
    says_it_can_bring(hall, 2)
    refused = hall.order(Rewind(to=2))
    assert "nobody online has version 2, or a checkpoint of it; no older version is online" in refused
    hall.peers["dan"].shelf = (2,)
    hall.settle(1)
    assert "nobody online has version 1, or a checkpoint of it; rewind can go to 2" in hall.order(
        Rewind(to=1)
    )
    assert "Rewinding to version 2 undoes 1 round" in hall.order(Rewind(to=2))


# ---- what is believed --------------------------------------------------------------------------------------------


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


def test_what_a_peer_can_bring_of_a_stage_counts_for_it_where_the_peer_holds_that_stage() -> None:
    hall = with_versions(3)
    shelves, [first, second] = hall.machine.modes["recovery"].rollback.shelves, hall.machine.drivers
    hall.peers["bob"].shelf = (2,)
    hall.settle(1)
    assert shelves.brought(second) == {2} and not shelves.brought(first)
    bob = hall.peers["bob"]
    hall.leaves("bob")
    assert not shelves.brought(second) and shelves.peers_with(second) == {bob.guest.peer}, "on its disk"


def test_what_a_peer_says_counts_only_with_the_runs_own_digest() -> None:
    hall = with_versions(3)
    shelves, second = hall.machine.modes["recovery"].rollback.shelves, hall.machine.drivers[1]
    hall.peers["bob"].shelf = (2, 7)
    hall.settle(1)
    assert shelves.brought(second) == {2}, "nobody knows a version 7"
    hall.machine.core.ledger.books[1].digests[2] = bytes(32)
    assert not shelves.brought(second), "version 2 of another era"
