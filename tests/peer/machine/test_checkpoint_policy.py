"""When a peer saves and when it reads back, and the copies that it takes beside the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from farflung.checkpoints.checked_chunks import NO_VERSION
from farflung.checkpoints.result_log import ResultLog
from farflung.coordinator.door.keys import load_or_create
from farflung.peer.machine.checkpoint_policy import (
    AT_RELAY,
    READ_AGAIN_S,
    STARVED_S,
    TORN_S,
    Keeping,
    RestoringOwn,
    Saving,
)
from farflung.peer.machine.disk_words import AheadKept, KeepingFailed, Reached
from farflung.peer.machine.effects import (
    DropSave,
    ListShelf,
    Note,
    Restore,
    SaveFragment,
)
from farflung.peer.machine.replicas import Replica
from farflung.peer.settings import place_of
from farflung.peer.state.checkpoint_thread import Capture, GivenUp
from farflung.peer.worker import Inbox, Worker, nothing
from farflung.protocol.manifest import CheckpointSection, Manifest, RunSection
from farflung.protocol.messages import FragmentTick, Tick
from farflung.protocol.model_schema import fragments_of
from farflung.protocol.round_words import RelayRoute
from farflung.protocol.run_terms import Known
from farflung.protocol.signing import statement_of
from farflung.protocol.states import Goal
from rig.waiting import PATIENCE_S


def replicas(*versions: int) -> list[Replica]:
    """Confirmed by the coordinator, each at its version."""
    found = []
    for fragment, version in zip(fragments_of(4, len(versions)), versions, strict=True):
        replica = Replica("ann", b"12345678", fragment, ResultLog(3))
        replica.held.fill()
        replica.filled(version)
        replica.on_sealed(version, bytes([version]) * 32)
        confirm(replica)
        found.append(replica)
    return found


def confirm(replica: Replica, proof: bytes = b"") -> None:
    replica.on_tick(
        FragmentTick(replica.fragment.number, replica.held.version, (), True, (), 0, False, 0, proof=proof)
    )


def saving(every_rounds: int = 2, rounds: int = 9, enabled: bool = True, pinned: bytes = b"") -> Saving:
    manifest = Manifest(
        run=RunSection(rounds=rounds), checkpoint=CheckpointSection(every_rounds=every_rounds)
    )
    return Saving(Known(manifest, bytes(16)), enabled, pinned)


# ---- when ----------------------------------------------------------------------------------------------------


def test_only_a_signature_that_fits_goes_into_a_checkpoint(tmp_path: Path) -> None:
    keys, other = load_or_create(tmp_path), bytes(32)
    [replica] = replicas(2)
    confirm(replica, keys.prove(statement_of(bytes(16), 0, 0, 2, replica.held.digest)))
    for pinned, era, good in ((keys.public_raw, 0, True), (other, 0, False), (keys.public_raw, 1, False)):
        due = saving(pinned=pinned)
        effects = due.due_saves([replica], era)
        assert [e.proof for e in effects if isinstance(e, SaveFragment)] == [
            replica.held.proof if good else b""
        ]
        assert good or any(isinstance(e, Note) and "does not fit" in e.text for e in effects)


def test_every_so_many_rounds_and_at_the_end() -> None:
    due = saving()
    assert [version for version in range(10) if due.is_due(version)] == [2, 4, 6, 8, 9]
    assert not any(saving(every_rounds=0).is_due(version) for version in range(10))
    due = saving(enabled=False)
    assert not any(due.is_due(version) for version in range(10))


def test_each_fragment_is_taken_when_it_is_there_and_only_once() -> None:
    due = saving()
    assert due.due_saves(replicas(2, 1), 0) == [SaveFragment(2, 0, bytes([2]) * 32, 0, 0)]
    assert due.due_saves(replicas(3, 2), 0) == [SaveFragment(2, 1, bytes([2]) * 32, 0, 0)]
    assert due.due_saves(replicas(3, 2), 0) == []
    assert due.on_saved(2, "") == [Note("checkpoint of version 2 saved"), ListShelf()] and due.saved == 2


def test_what_lies_there_is_asked_for_at_start_and_after_each_save() -> None:
    due = saving()
    assert due.due_list() == [ListShelf()] and due.due_list() == []
    due.due_saves(replicas(2), 0)
    assert ListShelf() not in due.on_saved(2, "the disk is full") and due.due_list() == []
    due.due_saves(replicas(4), 0)
    assert ListShelf() in due.on_saved(4, "") and due.due_list() == []
    assert saving(enabled=False).due_list() == [], "there is no place"


def test_a_state_that_is_not_confirmed_or_being_hashed_is_not_taken() -> None:
    due = saving()
    replica = Replica("ann", b"12345678", fragments_of(4, 1)[0], ResultLog(3))
    replica.held.fill()
    replica.filled(2)
    assert replica.held.sealing and due.due_saves([replica], 0) == []
    replica.on_sealed(2, bytes([2]) * 32)
    assert replica.held.whole and due.due_saves([replica], 0) == []
    confirm(replica)
    assert due.due_saves([replica], 0) == [SaveFragment(2, 0, bytes([2]) * 32, 0, 0)]


def test_what_can_not_become_whole_is_given_up_and_the_next_one_is_tried() -> None:
    due = saving()
    due.due_saves(replicas(2, 1), 0)
    assert due.due_saves(replicas(2, 4), 0) == [DropSave(2), SaveFragment(4, 1, bytes([4]) * 32, 0, 0)]
    assert due.on_saved(2, "") == [], "nobody waits for it any more"


def test_the_last_version_is_saved_though_an_earlier_one_is_still_being_written() -> None:
    due = saving()
    assert due.due_saves(replicas(8, 8), 0)[0] == SaveFragment(8, 0, bytes([8]) * 32, 0, 0)
    assert due.due_saves(replicas(9, 8), 0) == [DropSave(8), SaveFragment(9, 0, bytes([9]) * 32, 0, 0)]
    assert due.due_saves(replicas(9, 9), 0) == [SaveFragment(9, 1, bytes([9]) * 32, 0, 0)]
    assert due.due_saves(replicas(9, 9), 0) == [] and due.on_saved(8, "") == []
    assert due.on_saved(9, "") == [Note("checkpoint of version 9 saved"), ListShelf()]


def test_an_earlier_version_waits_for_the_one_that_is_being_written() -> None:
    due = saving()
    due.due_saves(replicas(6, 6), 0)
    assert due.due_saves(replicas(8, 8), 0) == [], "a slow disk would never end one"


def test_a_store_that_fails_is_told_and_the_next_version_is_tried() -> None:
    due = saving()
    due.due_saves(replicas(2), 0)
    assert due.on_saved(2, "the disk is full") == [Note("the disk is full")] and due.saved == -1
    assert due.due_saves(replicas(2), 0) == []
    assert due.due_saves(replicas(4), 0) != []


# ---- reading one back ------------------------------------------------------------------------------------------


def empty_and(*versions: int) -> list[Replica]:
    """Fragment 0 is not here at all; the others are, at these versions."""
    count = len(versions) + 1
    nothing = Replica("ann", b"12345678", fragments_of(4, count)[0], ResultLog(3))
    return [nothing, *replicas(0, *versions)[1:]]


def tick_of(*donors: tuple[str, ...], goal: Goal = Goal.WAIT) -> Tick:
    """The run is at version 5 of each fragment, and these give it."""
    words = tuple(
        FragmentTick(number, 5, ((4, bytes([number]) * 32),), False, those, 0, False, 0)
        for number, those in enumerate(donors)
    )
    return Tick(

        session=bytes(16), seq=1, answers=1, heard_s=0.0, fragments=words, goal=goal, reason="",
        roster_no=0, roster=None, leases=None, void=(), era=0, advice="", era_because="",
    )  # fmt: skip


def test_P3_only_the_fragments_that_nobody_gives_are_read_and_what_is_held_of_others_stays() -> None:
    due = RestoringOwn(enabled=True)
    [restore] = due.due_restore(tick_of((), ("bob",)), empty_and(5), False, 1.0)
    assert isinstance(restore, Restore) and restore.lacking == {0: ((4, bytes(32)),)}
    assert due.due_restore(tick_of((), ("bob",)), empty_and(5), False, 2.0) == [], "one at a time"
    assert due.on_end(4, 3.0) == {0}


def test_a_fragment_that_somebody_gives_is_fetched_and_not_read_until_it_gives_nothing_for_long() -> None:
    due = RestoringOwn(enabled=True)
    gives = tick_of(("bob",), ("bob",))
    assert due.due_restore(gives, empty_and(5), False, 0.0) == []
    assert due.due_restore(gives, empty_and(5), False, STARVED_S - 1.0) == []
    assert due.due_restore(gives, empty_and(5), False, STARVED_S) != []


def test_P3_pieces_that_nobody_has_more_of_do_not_keep_a_peer_from_its_checkpoint() -> None:
    """Joiners give each other what they have: all may have the same, from somebody who is gone."""
    due, partly = RestoringOwn(enabled=True), empty_and(5)
    partly[0].held.chunks.versions[0] = 5
    nobody, bob = tick_of((), ("bob",)), tick_of(("bob",), ("bob",))
    assert due.due_restore(nobody, partly, False, 0.0) == [], "more of it may come"
    assert due.due_restore(bob, partly, False, 2 * STARVED_S) == [], "it is given, however slowly"
    partly[0].held.chunks.versions[1] = 5
    assert due.due_restore(nobody, partly, False, 2 * STARVED_S) == [], "more of it has come"
    assert due.due_restore(nobody, partly, False, 3 * STARVED_S - 1.0) == []
    [restore] = due.due_restore(nobody, partly, False, 3 * STARVED_S)
    assert isinstance(restore, Restore) and set(restore.lacking) == {0}


def test_P3_a_peer_torn_between_two_versions_reads_its_checkpoint_when_nobody_can_help() -> None:
    """A piece came as the state of a newer version, and whoever gave it is gone."""
    due, torn = RestoringOwn(enabled=True), replicas(5, 5)
    torn[0].held.chunks.versions[1] = 7
    torn[0].held._look_whether_torn()
    nobody, bob = tick_of((), ("bob",)), tick_of(("bob",), ("bob",))
    assert due.due_restore(bob, torn, False, 0.0) == []
    assert due.due_restore(bob, torn, False, 2 * STARVED_S) == [], "somebody can give it the rest"
    torn[0].held.chunks.versions[0] = 6
    assert due.due_restore(nobody, torn, False, 2 * STARVED_S) == [], "it has moved on"
    assert due.due_restore(nobody, torn, False, 3 * STARVED_S - 1.0) == []
    [restore] = due.due_restore(nobody, torn, False, 3 * STARVED_S)
    assert isinstance(restore, Restore) and set(restore.lacking) == {0}


def test_P3_donors_that_are_named_and_give_nothing_do_not_keep_a_torn_peer_from_its_checkpoint() -> None:
    """Two that were torn by one piece each name the other: neither can give anything."""
    due, torn = RestoringOwn(enabled=True), replicas(5, 5)
    torn[0].held.chunks.versions[1] = 7
    torn[0].held._look_whether_torn()
    bob = tick_of(("bob",), ("bob",))
    assert due.due_restore(bob, torn, False, 0.0) == due.due_restore(bob, torn, False, TORN_S - 1.0) == []
    [restore] = due.due_restore(bob, torn, False, TORN_S)
    assert isinstance(restore, Restore) and set(restore.lacking) == {0}


def test_whoever_holds_nothing_reads_all_and_whoever_holds_all_reads_nothing() -> None:
    due = RestoringOwn(enabled=True)
    assert due.due_restore(tick_of((), ()), replicas(5, 5), False, 0.0) == []
    nothing = [empty_and(5)[0], Replica("ann", b"12345678", fragments_of(4, 2)[1], ResultLog(3))]
    assert due.due_restore(tick_of((), (), goal=Goal.SYNC), nothing, False, 0.0) == []
    [restore] = due.due_restore(tick_of((), ()), nothing, False, 0.0)
    assert isinstance(restore, Restore) and restore.lacking.keys() == {0, 1}


def test_what_was_not_found_is_looked_for_again_later() -> None:
    due = RestoringOwn(enabled=True)
    due.due_restore(tick_of((), ()), empty_and(5), False, 1.0)
    assert due.on_end(NO_VERSION, 2.0) == {0}
    assert due.due_restore(tick_of((), ()), empty_and(5), False, 2.0 + READ_AGAIN_S - 1.0) == []
    assert due.due_restore(tick_of((), ()), empty_and(5), False, 2.0 + READ_AGAIN_S) != []


def at_relay(*names: str, worth: int = 2) -> RestoringOwn:
    due = RestoringOwn(enabled=True, worth=worth)
    due.on_ways([RelayRoute(name, 7, "ticket") for name in names])
    return due


def far_tick(*donors: str, version: int = 5) -> Tick:
    """One fragment is there at once by anybody's word; the other one's donors are these."""
    usual = tick_of((), donors, goal=Goal.SYNC)
    known = tuple((number, bytes([number]) * 32) for number in (2, 3, 4))
    first, second = usual.fragments
    return replace(usual, fragments=(first, replace(second, version=version, digests=known)))


def one_empty() -> list[Replica]:
    return [replicas(5, 5)[0], Replica("ann", b"12345678", fragments_of(4, 2)[1], ResultLog(3))]


def test_whoever_meets_all_donors_at_a_relay_reads_a_recent_checkpoint_first() -> None:
    due = at_relay("bob", "cyd")
    told, restore = due.due_restore(far_tick("bob", "cyd"), one_empty(), False, 0.0)
    assert told == Note(AT_RELAY)
    recent = tuple((number, bytes([number]) * 32) for number in (3, 4))
    assert restore == Restore({1: recent}), "from version 2 on its state is less than all results"


def test_one_donor_that_is_reached_otherwise_is_asked_and_no_checkpoint_read() -> None:
    assert at_relay("bob").due_restore(far_tick("bob", "cyd"), one_empty(), False, 0.0) == []
    assert at_relay().due_restore(far_tick("bob"), one_empty(), False, 0.0) == []
    assert RestoringOwn(enabled=False, worth=2).due_restore(far_tick("bob"), one_empty(), False, 0.0) == []


def test_what_has_come_over_the_relay_already_is_not_read_again() -> None:
    due, partly = at_relay("bob"), one_empty()
    partly[1].held.chunks.versions[0] = 5
    assert due.due_restore(far_tick("bob"), partly, False, 0.0) == []


def test_no_checkpoint_is_read_where_it_is_too_old_to_be_of_use() -> None:
    assert at_relay("bob").due_restore(far_tick("bob", version=7), one_empty(), False, 0.0) == []
    assert at_relay("bob", worth=0).due_restore(far_tick("bob"), one_empty(), False, 0.0) == []


def test_without_a_good_checkpoint_the_donors_are_asked_at_once() -> None:
    due = at_relay("bob")
    assert due.due_restore(far_tick("bob"), one_empty(), False, 0.0) != []
    assert due.on_end(NO_VERSION, 1.0) == {1}
    assert due.due_restore(far_tick("bob"), one_empty(), False, 1.0 + STARVED_S - 2.0) == []


def test_a_run_that_is_quicker_than_the_reading_does_not_make_it_read_for_ever() -> None:
    due = at_relay("bob")
    assert due.due_restore(far_tick("bob"), one_empty(), False, 0.0) != []
    assert due.on_end(3, 1.0) == {1}
    assert due.due_restore(far_tick("bob", version=6), one_empty(), False, 2.0) == [], "it was of no use"


# ---- copies beside the training --------------------------------------------------------------------------------


@pytest.fixture
def arithmetic() -> Iterator[Worker]:
    inbox = Inbox()
    made = Worker("arithmetic", inbox.submit)
    yield made
    made.close()
    inbox.close()


def test_a_chunk_is_copied_before_it_changes_whoever_comes_first(arithmetic: Worker) -> None:
    """The state is at version 1, and is rolled to version 2 while a slow writer takes what it was."""
    state = {chunk: b"one" for chunk in range(20)}
    capture = Capture(range(20), lambda chunk: state[chunk], arithmetic.submit)

    def roll(chunk: int) -> None:
        capture.copy(chunk)
        state[chunk] = b"two"

    taken = [capture.take(chunk) for chunk in range(5)]
    for chunk in reversed(range(20)):
        arithmetic.submit(lambda chunk=chunk: roll(chunk), nothing)  # type: ignore[misc]
    taken += [capture.take(chunk) for chunk in range(5, 20)]
    assert taken == [b"one"] * 20
    done = threading.Event()
    arithmetic.submit(done.set, nothing)
    assert done.wait(PATIENCE_S) and set(state.values()) == {b"two"} and capture.over


def test_who_waits_for_a_copy_that_is_given_up_is_told(arithmetic: Worker) -> None:
    hold = threading.Event()
    arithmetic.submit(hold.wait, nothing)  # the arithmetic is busy: nothing is copied
    capture = Capture(range(1), lambda chunk: b"one", arithmetic.submit)
    ended: list[str] = []

    def write() -> None:
        try:
            capture.take(0)
        except GivenUp:
            ended.append("given up")

    writer = threading.Thread(target=write)
    writer.start()
    capture.drop()
    writer.join(PATIENCE_S)
    hold.set()
    assert ended == ["given up"]


def test_a_path_is_taken_in_full_and_a_url_as_it_is() -> None:
    assert place_of("s3://there/x") == "s3://there/x" and place_of("") == ""
    assert Path(place_of("here")).is_absolute() and Path(place_of("~/here")).is_absolute()


# ---- what lies on this peer's own disk --------------------------------------------------------------------


def alone_in_a_round(version: int, decision_no: int = 1) -> Any:
    """A member's round that only this peer is in, with all results there."""
    plan = SimpleNamespace(members=("ann",), fragment=0, round_no=version, version=version - 1)
    deciding = SimpleNamespace(newest=SimpleNamespace(decision_no=decision_no))
    pieces = SimpleNamespace(results=dict[int, Any]())
    return SimpleNamespace(plan=plan, deciding=deciding, counts=(1, 1, 4, 4), first_chunk=0, pieces=pieces)


def parted(keeping: Keeping, version: int) -> str:
    [note] = keeping.parting(version, ())
    assert isinstance(note, Note)
    return note.text


def test_a_version_that_lay_on_the_disk_before_its_commit_is_kept_before_the_disk_says_that_it_is_made() -> (
    None
):
    keeping = Keeping("ann", "/state", every=8)
    keeping.begin_era(0)
    keeping.on_kept(Reached(0, 0, base=4, version=4, made=4), 0.0)
    waits, _ = keeping.hold_back(alone_in_a_round(5), 1.0)
    assert waits and "Version 4 of it is kept in /state" in parted(keeping, 5)
    keeping.on_kept(AheadKept(0, version=5, round_no=5, decision_no=1), 1.1)
    waits, _ = keeping.hold_back(alone_in_a_round(5), 1.2)
    assert not waits
    assert "(version 5). It is kept in /state; run the same command to continue." in parted(keeping, 5)
    keeping.on_kept(Reached(0, 0, base=4, version=5, made=5), 1.3)
    assert "It is kept in /state" in parted(keeping, 5) and "Version 5 of it" in parted(keeping, 6)


@pytest.mark.parametrize(
    "word",
    [KeepingFailed("the disk is full"), Reached(0, 0, base=4, version=3, made=4)],
    ids=["full", "missing"],
)
def test_results_that_lie_on_the_disk_without_what_they_change_are_no_version(
    word: KeepingFailed | Reached,
) -> None:
    keeping = Keeping("ann", "/state", every=8)
    keeping.begin_era(0)
    keeping.on_kept(Reached(0, 0, base=4, version=4, made=4), 0.0)
    keeping.hold_back(alone_in_a_round(5), 1.0)
    keeping.on_kept(AheadKept(0, version=5, round_no=5, decision_no=1), 1.1)
    keeping.on_kept(word, 1.2)
    assert "It is not kept on this disk" in parted(keeping, 5)
