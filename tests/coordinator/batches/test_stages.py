"""A model in stages at the coordinator: who serves which stage, and one record that moves them all."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from farflung.coordinator.batches.batch_book import Unseated
from farflung.coordinator.batches.rebalancing import PAYS_WITHIN_S, Move
from farflung.coordinator.ledger.records import AbortedRound, CommittedRound, Genesis, Opened
from farflung.coordinator.run.ticks import FOUNDER_PATIENCE_S
from farflung.protocol import messages as m
from farflung.protocol.digests import hash_bytes
from farflung.protocol.errors import DepartureCause
from farflung.protocol.mode_words import ServeTick
from farflung.protocol.outer_numbers import fp32
from farflung.protocol.round_words import Plan, section
from farflung.protocol.states import Goal
from rig.stage_hall import StageHall

SIX = ("ann", "bob", "cyd", "dan", "eve", "fay")


def begun(*names: str, stages: int = 3) -> StageHall:
    """Everybody holds version 0, and the first batch has begun."""
    hall = StageHall(stages)
    hall.join(*(names or SIX))
    hall.found()
    return hall


def prepared(*but: str) -> StageHall:
    """The rounds of all stages are in flight, and at their end, but for those of these peers."""
    hall = begun()
    hall.count_all()
    hall.freeze()
    there = [name for name in hall.peers if name not in but]
    hall.send(*there)
    hall.finish_rounds(*there)
    return hall


def versions(hall: StageHall) -> list[int]:
    return [book.version for book in hall.machine.core.ledger.books]


def reasons(hall: StageHall) -> list[str]:
    return [driver.reason for driver in hall.machine.drivers]


def test_P2_P13_a_calm_run_commits_all_stages_at_once() -> None:
    hall = begun()
    assert [peer.stage for peer in hall.peers.values()] == [0, 1, 2, 0, 1, 2]
    hall.one_batch()
    hall.one_batch()
    assert [[each.commit.version for each in record.rounds] for record in hall.commits] == [[1] * 3, [2] * 3]
    assert hall.machine.core.ledger.totals.loss == 2.0 and not hall.written(CommittedRound)
    assert not hall.written(AbortedRound) and not hall.written(Unseated)
    hall.start()
    assert versions(hall) == [2, 2, 2], "what the journal says"


def test_all_stages_are_multiplied_by_one_factor_and_people_hear_where_it_leaves_hardly_anything() -> None:
    hall = StageHall(3, "clip = 4.0\n")
    hall.join(*SIX)
    hall.found()
    hall.squares = {1: 10.0}  # of 2 chunks; the others have 1.0
    hall.one_batch()
    hall.squares = {1: 1e16}
    hall.one_batch()
    factors = [{each.commit.factor for each in record.rounds} for record in hall.commits]
    assert factors == [{fp32(4.0 / (24.0**0.5 + 1e-6))}, {fp32(4.0 / (2e16**0.5 + 1e-6))}]
    [told] = [note for note in hall.notes if "hardly anything" in note]
    assert "by version 2" in told and "results of stage 1 are 1.41e+08" in told


def test_at_a_commit_nobody_is_told_that_the_new_version_is_held_by_nobody() -> None:
    hall = begun("ann", "bob", "cyd")
    hall.one_batch()
    assert len(hall.commits) == 1 and hall.told
    assert [reason for reason in hall.told if "nobody online" in reason] == []


# ---- joining -----------------------------------------------------------------------------------------------


def test_a_newcomer_gets_one_stage_of_those_that_fit_it() -> None:
    hall = StageHall(3)
    hall.join("ann", offers=(1,))
    hall.join("bob", offers=(1, 2))
    hall.join("cyd", offers=(2, 1))
    assert [hall.peers[name].stage for name in ("ann", "bob", "cyd")] == [1, 2, 1]


def test_a_hello_whose_answer_was_lost_gets_the_same_stage_again() -> None:
    hall = StageHall(3)
    first, again = hall.hello("ann", (0, 1, 2)), hall.hello("ann", (0, 1, 2))
    assert isinstance(first, m.Welcome) and isinstance(again, m.Welcome)
    assert again.fragments == first.fragments == (0,)
    hall.join("bob")
    assert hall.peers["bob"].stage == 1


def test_a_member_that_comes_back_keeps_its_stage_and_its_seat() -> None:
    hall = begun()
    seat = hall.peers["bob"].seat
    hall.join("bob", offers=(1,))
    hall.beats(*SIX)
    assert (hall.peers["bob"].stage, hall.peers["bob"].seat) == (1, seat) and seat
    hall.start()  # another coordinator: whoever comes first does not decide where the others sit
    for name in reversed(SIX):
        hall.join(name, offers=(hall.peers[name].stage,))
    hall.settle()
    assert hall.peers["bob"].seat == seat and not hall.written(Unseated)


def test_a_newcomer_leaves_the_stages_of_those_who_are_still_coming_back_to_them() -> None:
    """The coordinator has just been started again, and half of the peers have said hello."""
    hall = begun("ann", "bob", "cyd", "dan", stages=2)
    hall.start()
    hall.join("ann", "cyd", offers=(0,))
    hall.join("eve")
    assert hall.peers["eve"].stage == 0, "stage 1 is not empty: bob and dan have seats in it"


@pytest.mark.parametrize("offers", [(3,), (1, 1)])
def test_stages_that_there_are_not_are_refused_with_words(offers: tuple[int, ...]) -> None:
    told = ", ".join(map(str, offers))
    answer = StageHall(3).hello("ann", offers)
    assert isinstance(answer, m.Refuse)
    assert answer.reason == f"this run's model has stages 0 to 2; offered were stages {told}"


# ---- founding ----------------------------------------------------------------------------------------------


def test_the_oldest_holder_of_each_stage_founds_it_and_all_of_them_one_run() -> None:
    hall = StageHall(2)
    hall.join("ann", "bob", "cyd", "dan")
    hall.settle(1)
    goals = [peer.tick.goal for peer in hall.peers.values() if peer.tick is not None]
    assert goals == [Goal.FOUND, Goal.FOUND, Goal.WAIT, Goal.WAIT]
    ann, bob = hall.peers["ann"], hall.peers["bob"]
    ann.version, ann.digest = 0, hash_bytes(b"0", bytes([0]))
    hall.settle(1)
    assert not hall.written(Genesis)
    assert ann.tick is not None and ann.tick.reason == "waiting for the initial state of stage 1"
    bob.version, bob.digest = 0, hash_bytes(b"0", bytes([1]))
    hall.settle(1)
    [genesis] = hall.written(Genesis)
    assert isinstance(genesis, Genesis)
    assert genesis.founders == (ann.guest.peer, bob.guest.peer)
    assert genesis.digests == (ann.digest, bob.digest) and all(genesis.shown)


def test_P3_a_founder_of_a_later_stage_that_makes_nothing_has_its_turn_and_who_has_made_its_own_keeps_it() -> (
    None
):
    hall = StageHall(2)
    hall.join("ann", "bob", "cyd", "dan")
    hall.settle(1)
    ann = hall.peers["ann"]
    ann.version, ann.digest = 0, hash_bytes(b"0", bytes([0]))
    dan = hall.peers["dan"]
    assert hall.machine.core.ledger.model is not None
    for _ in range(15):
        hall.now += FOUNDER_PATIENCE_S / 10
        hall.beats(*hall.peers)
    assert dan.stage == 1 and dan.tick is not None and dan.tick.goal == Goal.FOUND
    dan.version, dan.digest = 0, hash_bytes(b"0", bytes([1]))
    hall.beats("dan", "ann")
    [genesis] = hall.written(Genesis)
    assert isinstance(genesis, Genesis) and genesis.founders == (ann.guest.peer, dan.guest.peer)


def test_P4_a_stage_that_was_lost_before_anything_was_learned_is_founded_again() -> None:
    hall = begun("ann", "bob", stages=2)
    bob = hall.peers.pop("bob")
    hall.machine.on_closed(bob.guest.peer, bob.guest.session, hall.now)
    hall.settle()
    hall.join("cyd")
    hall.settle(1)
    cyd = hall.peers["cyd"]
    assert cyd.stage == 1 and cyd.tick is not None and cyd.tick.goal == Goal.FOUND
    cyd.version, cyd.digest = 0, hash_bytes(b"another beginning")
    hall.settle()
    first, second = hall.written(Genesis)
    assert isinstance(first, Genesis) and isinstance(second, Genesis)
    assert first.digests[0] == second.digests[0] and first.digests[1] != second.digests[1]
    hall.one_batch()
    assert versions(hall) == [1, 1]


# ---- rounds ------------------------------------------------------------------------------------------------


def test_P2_P13_nobody_hears_of_a_commit_before_every_stage_is_at_its_end() -> None:
    hall = prepared("cyd", "fay")
    assert versions(hall) == [0, 0, 0] and not hall.commits
    assert all(peer.batch_version < 0 for peer in hall.peers.values())
    waits = "every result is held by several: waiting for the other stages' rounds"
    assert reasons(hall)[:2] == [waits, waits]
    hall.send("cyd", "fay")
    hall.finish_rounds("cyd", "fay")
    assert versions(hall) == [1, 1, 1] and len(hall.commits) == 1
    assert all(peer.batch_version == 1 for peer in hall.peers.values())


def test_a_stage_at_its_end_waits_for_the_others_for_as_long_as_it_takes() -> None:
    hall = prepared("cyd", "fay")
    for _ in range(200):  # of a second: longer than a round may take
        hall.settle(1)
    ends = [record for record in hall.written(AbortedRound) if isinstance(record, AbortedRound)]
    assert ends and {record.fragment for record in ends} == {2}
    assert hall.machine.drivers[0].prepared and hall.machine.drivers[1].prepared


def goes(hall: StageHall, name: str) -> None:
    peer = hall.peers.pop(name)
    hall.machine.on_closed(peer.guest.peer, peer.guest.session, hall.now)
    hall.settle()


def test_P2_the_round_of_one_stage_is_aborted_and_those_of_the_others_stand() -> None:
    hall = prepared("cyd", "fay")
    goes(hall, "fay")
    [aborted] = hall.written(AbortedRound)
    assert isinstance(aborted, AbortedRound) and aborted.fragment == 2
    assert [record.peer for record in hall.written(Unseated) if isinstance(record, Unseated)]
    assert "counted in stage 2" in reasons(hall)[2]
    cyd = hall.peers["cyd"]
    cyd.counted = set(range(8))
    hall.settle(1)
    hall.freeze()
    hall.settle(1)
    assert len([r for r in hall.written(Opened) if isinstance(r, Opened) and r.plan.epoch == 1]) == 4
    hall.send("cyd")
    hall.finish_rounds("cyd")
    assert versions(hall) == [1, 1, 1]
    assert [list(record.counted) for record in hall.commits[0].rounds][2] == [cyd.guest.peer]


def test_P3_who_goes_when_its_stage_is_at_its_end_costs_nothing() -> None:
    hall = prepared("cyd", "fay")
    goes(hall, "bob")
    hall.send("cyd", "fay")
    hall.finish_rounds()
    assert versions(hall) == [1, 1, 1] and not hall.written(AbortedRound)


def _owns(hall: StageHall, plan: Plan, name: str) -> bool:
    return plan.members.index(hall.peers[name].guest.peer) in plan.owners


def test_P2_a_stage_that_was_at_its_end_and_lost_results_since_is_not_committed() -> None:
    """Of three one has not got them yet; of the two who have, one is thrown out."""
    hall = begun(*SIX, "gil", "hal", "ian")
    hall.count_all()
    hall.freeze()
    second = hall.machine.drivers[1]
    assert second.round is not None
    plan, names = second.round.plan, {peer.guest.peer: name for name, peer in hall.peers.items()}
    first, other, late = sorted(
        {names[peer] for peer in plan.members}, key=lambda n: not _owns(hall, plan, n)
    )
    hall.send(late, "ann", "dan", first, other)  # the late one reports before anything is merged
    hall.finish_rounds("ann", "dan", first, other)
    assert second.prepared
    hall.machine.sessions.send_away(
        hall.peers.pop(other).guest.peer, DepartureCause.KICKED, "", "it is told to"
    )
    rest = [name for name, peer in hall.peers.items() if peer.stage == 2]
    hall.send(*rest)
    hall.finish_rounds(*rest)
    assert versions(hall) == [0, 0, 0] and not second.prepared, "one alone holds the results"
    waited = 0
    while second.round is not None and waited < 200:
        hall.settle(1)
        waited += 1
    assert waited < 200, "it has as long as any round"


def test_P5_a_coordinator_that_is_killed_between_the_last_end_and_the_record_begins_the_rounds_again() -> (
    None
):
    hall = prepared("cyd", "fay")
    hall.records = [record for record in hall.records]
    hall.start()
    assert versions(hall) == [0, 0, 0]
    assert len(hall.written(AbortedRound)) == 3
    for name in SIX:
        peer = hall.peers[name]
        peer.plan, peer.round_no, peer.decision, peer.decision_no = None, 0, None, 0
        hall.join(name, offers=(peer.stage,))
    hall.settle()
    assert not hall.written(Unseated), "sums that stand frozen are not computed again"
    hall.freeze()
    hall.send(*SIX)
    hall.finish_rounds()
    assert versions(hall) == [1, 1, 1]


def test_a_pause_does_not_leave_a_stage_at_its_end_waiting_for_ever() -> None:
    hall = prepared("cyd", "fay")
    hall.machine.core.draining = True
    goes(hall, "fay")
    hall.peers["cyd"].counted = set(range(8))
    hall.settle(1)
    hall.freeze()
    hall.settle(1)
    hall.send("cyd")
    hall.finish_rounds("cyd")
    hall.settle(1)
    assert versions(hall) == [1, 1, 1] and hall.machine.drained


# ---- what people see ---------------------------------------------------------------------------------------


def test_the_status_has_rows_of_stages_before_anybody_said_what_the_model_is() -> None:
    status = json.loads(StageHall(3).machine.status(0.0))
    assert [row["narrow"] for row in status["stages"]] == ["too few seats", "", ""]
    assert all(row["seats"] == 0 and "state_bytes" not in row for row in status["stages"])


def test_the_status_has_a_row_for_each_stage() -> None:
    hall = begun()
    hall.peers["bob"].counted = {0, 1}
    hall.settle(1)
    status = json.loads(hall.machine.status(hall.now))
    rows = [(row["members"], row["seats"], row["counted"], row["version"]) for row in status["stages"]]
    assert rows == [(2, 2, 0, 0), (2, 2, 2, 0), (2, 2, 0, 0)]
    first = status["stages"][0]
    assert (first["micros_per_s"], first["unit_s"], first["narrow"]) == (4.0, 0.5, "compute")
    assert [row["narrow"] for row in status["stages"][1:]] == ["", ""], "the first of equal ones"
    # 8 values of fp32 and their sums; two chunks of 4 values each, of one part of the outer state.
    assert (first["compute_bytes"], first["state_bytes"]) == (64, 32)
    assert (first["up_bytes"], first["gives"]) == (0, {"values": 0, "raw_bytes": 0})
    assert status["batch"]["counted"] == 0 and {row["stage"] for row in status["members"]} == {0, 1, 2}
    assert status["stages"][2]["reason"] == "waiting for microbatches: 0 of 8 counted in stage 0"


def test_P15_whoever_goes_at_its_stages_end_is_replaced_if_another_stage_does_a_share_again() -> None:
    """What it kept of microbatches went with it: a source that makes them again could ask nobody for gradients."""
    hall = prepared("ann", "dan")
    goes(hall, "bob")
    assert not hall.written(AbortedRound)
    goes(hall, "dan")
    ends = [record for record in hall.written(AbortedRound) if isinstance(record, AbortedRound)]
    assert [record.fragment for record in ends] == [0, 1]
    gone = [record.peer for record in hall.written(Unseated) if isinstance(record, Unseated)]
    assert len(gone) == 2 and hall.machine.drivers[2].prepared


def test_P15_who_is_alone_in_its_stage_need_not_be_dialled() -> None:
    hall = begun("ann", "bob", stages=2)
    for member in hall.machine.core.members.members.values():
        member.contact = replace(member.contact, address="")
    hall.one_batch()
    assert versions(hall) == [1, 1]


def test_P15_after_a_restart_a_newcomer_leaves_those_with_seats_their_stages() -> None:
    hall = begun("ann", "bob", "cyd", stages=3)
    hall.start()
    hall.join("cyd", offers=(0, 1, 2))  # another process of hers: her state went with the old one
    assert hall.peers["cyd"].stage == 2


def test_P9_a_newcomer_gets_the_stage_whose_only_holders_never_fetched_its_state() -> None:
    hall = StageHall(2, "rebalance_s = 60.0\n")
    hall.join("ann", "bob", "cyd", "dan")
    hall.found()
    hall.one_batch()
    for name in ("bob", "dan"):
        it = hall.peers[name]
        hall.leaves(name)
        hall.peers[name], it.version, it.digest = it, -1, b""
        hall.join(name)
    assert [peer.stage for peer in hall.peers.values()] == [0, 0, 1, 1]
    for _ in range(round(PAYS_WITHIN_S / 4) + 40):
        hall.passes(4.0)
        hall.beats(*hall.peers)
    hall.join("gil")
    assert hall.peers["gil"].stage == 1, "as many hold the other one"


def test_P17_a_peer_that_was_told_to_move_gets_the_stage_that_it_was_told_whatever_is_shorter() -> None:
    hall = StageHall(3)
    hall.join("ann", "bob", "cyd", "dan", "eve")
    stages = {name: peer.stage for name, peer in hall.peers.items()}
    assert stages == {"ann": 0, "bob": 1, "cyd": 2, "dan": 0, "eve": 1}
    batches, dan = hall.machine.modes["batches"].batches, hall.peers["dan"].guest.peer
    assert batches is not None
    now = hall.machine.core.now
    batches.moves.under_way = Move(dan, 0, 1, "it is slow", False, 0, 2, gone_at=now)
    it = hall.peers["dan"]
    hall.leaves("dan")
    hall.peers["dan"] = it
    hall.join("dan")
    assert hall.peers["dan"].stage == 1, "stage 2 has fewer"
    hall.beats("dan")
    told = hall.peers["dan"].tick
    assert told is not None and section(ServeTick, told.sections) is None, "it serves it already"
    batches.moves.under_way = None
    hall.leaves("dan")
    hall.peers["dan"] = it
    hall.join("dan")
    assert hall.peers["dan"].stage == 0
