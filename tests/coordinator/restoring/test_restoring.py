"""A coordinator that asks its peers for the run: what counts, who may lie and what follows, and how long it waits."""

from __future__ import annotations

import msgspec
import pytest

from farflung.coordinator.batches.batch_book import BatchBegun, BatchBook, GrantedMicros, Seated
from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.ledger.ledger import NUMBERS_AHEAD, Ledger, LedgerRules
from farflung.coordinator.ledger.records import Amended, Granted, RolledBack, Started, from_bytes, to_bytes
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.restoring.kept_books import Keepers, KeptSteps, Restored
from farflung.coordinator.restoring.restoration import (
    CODE,
    NOBODY_S,
    PATIENCE_S,
    Own,
    Restoring,
    RestoringState,
    why_wait,
)
from farflung.coordinator.run.core import Core
from farflung.peer.restoring.fellow_search import KeptCommits
from farflung.protocol.limits import KEPT_BOOKS_BYTES, PROTOCOL_VERSION
from farflung.protocol.messages import AskStatus, Knock, Lease, Refuse
from farflung.protocol.mode_words import AskKept, Keep, KeptReceipts
from farflung.protocol.run_terms import Terms, encoded
from farflung.protocol.signed_words import kept_part
from farflung.protocol.signing import Amendment, KeptCommit, curve_key_of
from rig.amended import signed
from rig.lost_run import ANN, BOB, HOST, MANIFEST, MODEL, RUN_ID, Host, host_at, keeper, key_of, public_of

NONCE = bytes(32)


def machine(copy: Host | None = None) -> Restoring:
    own = Own(MANIFEST, public_of(HOST))
    if copy is not None:
        own = Own(MANIFEST, public_of(HOST), copy.run_id, copy.ledger, MANIFEST)
    return Restoring(own, NONCE, 0.0)


def knocks(asks: Restoring, number: int, kept: KeptCommits, now: float = 1.0) -> Refuse:
    """All that passes at the door until it is told to come again."""
    caller = bytes([number])
    answer = asks.on_door(caller, Knock(protocol=PROTOCOL_VERSION, run="lost"), now)
    for _ in range(200):
        if isinstance(answer, Refuse):
            return answer
        assert isinstance(answer, AskKept)
        answer = asks.on_door(caller, kept.answer(answer, key_of(number).sign), now)
    raise AssertionError("it asks for ever")


def restored(found: RunRecords | None) -> Ledger:
    assert found is not None
    ledger = Ledger(LedgerRules(8, 4))
    for record in found.records:
        ledger.apply(from_bytes(to_bytes(record)))
    return ledger


# ---- what is put back -----------------------------------------------------------------------------------------------


def test_with_its_key_alone_it_is_the_run_again_to_the_sample() -> None:
    host, asks = host_at(5), machine()
    knocks(asks, 1, keeper(1, host))
    assert asks.due(1.0) is None and "1 peer came" in asks.reason
    knocks(asks, 2, keeper(2, host))
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None and (found.run_id, found.manifest.digest) == (RUN_ID, MANIFEST.digest)
    was, now = host.ledger, restored(found)
    assert (now.version, now.totals.tokens, now.totals.loss, now.eras.number) == (5, 35, 1.5, 0)
    assert now.model == MODEL and now.leases.samples == 1000
    assert now.leases.granted_samples == now.leases.committed_samples == 80
    assert now.books[0].commits == was.books[0].commits, "who missed one of the last gets it"
    assert now.books[0].vouched == {ANN, BOB} and now.peers.tokens[ANN] == 35
    assert now.books[0].digests == {v: bytes([v]) * 32 for v in range(5)}, "the newest one is settled anew"
    assert {v: mark.reach for v, mark in now.books[0].marks.items() if v} == {
        v: mark.reach for v, mark in was.books[0].marks.items()
    }, "it may go back, and knows to which samples"
    assert KeptSteps.of(now).link == KeptSteps.of(was).link


def test_no_number_is_given_twice() -> None:
    """The coordinator that is gone may have granted leases and opened rounds since the commit."""
    host, asks = host_at(3), machine()
    knocks(asks, 1, keeper(1, host))
    now = restored(asks.due(1.0 + PATIENCE_S))
    assert now.leases.next_id >= host.ledger.leases.next_id + NUMBERS_AHEAD
    assert now.round_no >= host.ledger.round_no + NUMBERS_AHEAD
    assert BatchBook.of(now).last_seat >= NUMBERS_AHEAD


def test_what_was_leased_after_the_commit_is_leased_again_and_what_it_used_is_not() -> None:
    host, asks = host_at(3), machine()
    host.write(Granted(peer=BOB, lease=Lease.at(host.ledger.leases.next_id, 0, 48, 64, (48,))))
    knocks(asks, 1, keeper(1, host))
    leases: Leases = restored(asks.due(1.0 + PATIENCE_S)).leases
    due = leases.next_range(16)
    assert due is not None and (due.start, due.stop) == (48, 64)
    assert leases.foreign(BOB, [4]) == (4,), "whoever worked on it is told that it is void"


def test_an_old_copy_gets_what_it_lacks_and_a_whole_one_nothing() -> None:
    host = host_at(6)
    for at, expected in ((2, 6), (6, 6)):
        copy = host_at(at)
        asks = machine(copy)
        knocks(asks, 1, keeper(1, host))
        knocks(asks, 2, keeper(2, host))
        found = asks.due(1.0 + PATIENCE_S)
        assert found is not None and found.run_id == RUN_ID
        copy.write(*found.records)
        assert (
            copy.ledger.version == expected
            and KeptSteps.of(copy.ledger).link == KeptSteps.of(host.ledger).link
        )
        assert copy.ledger.leases.committed_samples == 16 * expected
        assert copy.ledger.clock.newest_s == 0.0 and copy.ledger.peers.names[ANN] == "ann", (
            "the rest is the copy's"
        )


def test_P14_a_copy_that_lacks_no_commit_may_lack_grants_so_its_batch_begins_again_with_other_seats() -> None:
    copy = host_at(6)
    copy.write(BatchBegun(version=6, epoch=0, start=96, stop=104, count=8))
    copy.write(
        Seated(number=3, peer=ANN, process=bytes(16), trainer=0), GrantedMicros(seat=3, first=0, stop=8)
    )
    table_no = BatchBook.of(copy.ledger).table_no
    copy.write(Restored(kept=None))
    batches = BatchBook.of(copy.ledger)
    assert batches.batch is None and not batches.seats and not batches.table.seats
    assert batches.last_seat >= 3 + NUMBERS_AHEAD and batches.table_no >= table_no + NUMBERS_AHEAD


def test_a_restored_run_goes_on_and_can_be_restored_again() -> None:
    host, asks = host_at(3), machine()
    knocks(asks, 1, keeper(1, host))
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None
    second = Host()
    second.records, second.ledger = [], Ledger(LedgerRules(8, 4))
    second.write(*found.records, Started(incarnation=1001))
    second.commit()
    kept = keeper(1, host)
    kept.hear(second.told[-1])
    assert kept.newest is not None and kept.newest.number == KeptSteps.of(host.ledger).link.number + 1
    again = machine()
    knocks(again, 1, kept)
    assert restored(again.due(1.0 + PATIENCE_S)).version == 4


# ---- who may lie ----------------------------------------------------------------------------------------------------


def test_an_old_chain_loses_to_a_newer_one() -> None:
    host, asks = host_at(6), machine()
    knocks(asks, 1, keeper(1, host, 3))
    knocks(asks, 2, keeper(2, host))
    assert restored(asks.due(1.0 + PATIENCE_S)).version == 6


def test_P21_who_comes_first_with_an_old_commit_does_not_end_the_waiting() -> None:
    """It was alone when that was made: all whom it names have answered.  Somebody went on since."""
    host, asks = host_at(6), machine()
    knocks(asks, 1, keeper(1, host, 1))
    assert asks.due(1.0 + PATIENCE_S - 0.1) is None
    knocks(asks, 2, keeper(2, host), 1.0 + PATIENCE_S - 0.1)
    assert restored(asks.due(1.0 + PATIENCE_S)).version == 6


def test_P21_of_a_version_that_was_made_twice_the_later_commit_counts() -> None:
    host, asks = host_at(5), machine()
    host.write(RolledBack(versions=(3,), reason="all who held version 5 are gone"))
    host.tell(Keep)
    for samples in (24, 32):
        host.commit(samples)
    knocks(asks, 1, keeper(1, host))
    now = restored(asks.due(1.0 + PATIENCE_S))
    assert now.version == 5 and now.eras.number == 1
    assert now.books[0].commits == host.ledger.books[0].commits, "and none of the era that is over"


def test_what_is_withheld_by_all_is_lost_and_the_run_goes_on_from_what_was_shown() -> None:
    host, asks = host_at(6), machine()
    knocks(asks, 1, keeper(1, host, 5))
    knocks(asks, 2, keeper(2, host, 5))
    now = restored(asks.due(1.0 + PATIENCE_S))
    assert now.version == 5 and now.leases.committed_samples == 80


def test_a_step_whose_books_others_keep_is_waited_for_as_long_as_any_peer() -> None:
    host, asks = host_at(6), machine()
    for each in (1, 2):
        knocks(asks, each, keeper(each, host, books=4))
    assert asks.due(2.0 + PATIENCE_S - 1.1) is None
    assert f"the books of step {KeptSteps.of(host.ledger).link.number}" in asks.reason
    knocks(asks, 3, keeper(3, host))
    assert restored(asks.due(1.0 + PATIENCE_S)).version == 6, "whoever keeps them, however many do not"


def test_a_step_whose_books_nobody_shows_is_void_and_people_are_told() -> None:
    host, asks = host_at(6), machine()
    for each in (1, 2):
        knocks(asks, each, keeper(each, host, books=4))
    found = asks.due(1.0 + PATIENCE_S)
    now = restored(found)
    assert now.version == 4 and now.leases.committed_samples == 64
    why = f"step {KeptSteps.of(host.ledger).link.number} was made, and nobody came"
    assert why in KeptSteps.of(now).restored_because
    core = Core(MANIFEST, RUN_ID, now)
    core.prove, keepers = host.prove, Keepers(core)
    core.modes = (keepers,)
    newest = keeper(1, host, books=4).newest
    assert newest is not None
    keepers.hear_of(newest)
    assert not core.held, "who shows that step again does not hold the run up: it was given up"
    later = msgspec.structs.replace(newest, number=newest.number + 1, proof=b"")
    keepers.hear_of(msgspec.structs.replace(later, proof=host.prove(later.statement)))
    assert "old copy" in core.held


def test_without_any_books_a_key_alone_waits_and_a_copy_goes_on() -> None:
    host, asks = host_at(6), machine()
    knocks(asks, 1, keeper(1, host, books=0))
    assert asks.due(1e6) is None and "nobody who keeps the books" in asks.reason
    copy = host_at(5)
    asks = machine(copy)
    knocks(asks, 1, keeper(1, host, books=0))
    assert asks.due(1.0 + PATIENCE_S - 0.1) is None
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None
    copy.write(*found.records)
    assert copy.ledger.version == 5 and "nobody came" in (KeptSteps.of(copy.ledger).restored_because or "")


def shows_forged(host: Host, change: object) -> tuple[Restoring, Refuse]:
    asks, kept = machine(), keeper(1, host)
    newest = kept._heads[-1]
    kept._heads[-1] = change(newest)  # type: ignore[operator]
    return asks, knocks(asks, 1, kept)


def test_a_forged_record_is_refused_by_its_signature() -> None:
    def other_version(kept: KeptCommit) -> KeptCommit:
        return KeptCommit(msgspec.structs.replace(kept.head, versions=(99,)), kept.books)

    def other_books(kept: KeptCommit) -> KeptCommit:
        return KeptCommit(kept.head, kept.books[:-1] + b"\x7f")

    for change in (other_version, other_books):
        asks, said = shows_forged(host_at(3), change)
        assert said.code == CODE and asks.due(100.0) is None
        assert len(asks.notes) == 1 and "is not taken" in asks.notes[0]
        knocks(asks, 2, keeper(2, host_at(2)), 100.0)
        assert restored(asks.due(200.0)).version == 2


def test_a_chain_of_another_run_or_of_another_key_is_refused() -> None:
    other_key, other_run = host_at(7, key=key_of(5)), host_at(7, run_id=bytes(16))
    asks = machine(host_at(2))
    knocks(asks, 1, keeper(1, other_key))
    knocks(asks, 2, keeper(2, other_run))
    assert "not signed by this run's key" in asks.notes[0] and "another run" in asks.notes[1]
    found = asks.due(NOBODY_S + 1.0)
    assert found is not None
    [record] = found.records
    assert isinstance(record, Restored) and record.kept is None


def test_P21_whoever_shows_false_amendments_beside_true_commits_shuts_no_true_ones_out() -> None:
    host, copy = host_at(20), host_at(3)
    asks, liar, honest = machine(copy), keeper(1, host), keeper(2, host)
    changes = encoded({"round": {"sync_every": 10}})
    true = signed(Amendment(1, 2, 0, changes, MANIFEST.digest), HOST, RUN_ID)
    answer = asks.on_door(b"l", Knock(protocol=PROTOCOL_VERSION, run="lost"), 1.0)
    for version in range(20):
        assert isinstance(answer, AskKept)
        false = Amendment(1, version, 0, changes, MANIFEST.digest)
        liar.about = msgspec.structs.replace(liar.about, amendments=(false,) * (1 + version))
        answer = asks.on_door(b"l", liar.answer(answer, key_of(1).sign), 1.0)
    honest.about = msgspec.structs.replace(honest.about, amendments=(true,))
    knocks(asks, 2, honest)
    assert sum("amendments that are not believed" in note for note in asks.notes) == 1
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None
    assert [each.amendment for each in found.records if isinstance(each, Amended)] == [true]


def test_with_the_key_alone_the_file_of_any_of_its_amendments_is_the_runs() -> None:
    one = signed(Amendment(1, 2, 0, encoded({"round": {"sync_every": 10}}), MANIFEST.digest), HOST, RUN_ID)
    between = Terms(MANIFEST).plus(one).newest
    two = signed(Amendment(2, 2, 0, encoded({"round": {"sync_every": 20}}), between.digest), HOST, RUN_ID)
    kept = keeper(1, host_at(3))
    kept.about = msgspec.structs.replace(kept.about, amendments=(one, two))
    asks = Restoring(Own(between, public_of(HOST)), NONCE, 0.0)
    knocks(asks, 1, kept)
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None and found.manifest.digest == MANIFEST.digest
    assert [each.amendment for each in found.records if isinstance(each, Amended)] == [one, two]


def test_nobody_answers_in_the_name_of_another_peer() -> None:
    """Else a liar could say that all others have nothing, and hasten the decision."""
    asks = machine()
    knocks(asks, 1, keeper(1, host_at(3)))
    forged = KeptReceipts(identity=public_of(key_of(2)), kept=None)
    signed = msgspec.structs.replace(forged, signature=key_of(1).sign(kept_part(forged, NONCE)))
    said = asks.on_door(b"x", signed, 1.0)
    assert isinstance(said, Refuse) and said.code == "signature"
    assert asks.due(1.1) is None, "it still waits for bob"


def test_a_fork_is_told_and_the_line_of_the_later_coordinator_goes_on() -> None:
    old, new = host_at(6), host_at(3)
    new.write(Started(incarnation=1001))
    new.commit(24)
    asks = machine()
    knocks(asks, 1, keeper(1, old))
    knocks(asks, 2, keeper(2, new))
    assert any("the run was forked: step 5" in note for note in asks.notes)
    now = restored(asks.due(1.0 + PATIENCE_S))
    assert now.version == 4 and KeptSteps.of(now).link == KeptSteps.of(new.ledger).link
    assert now.leases.committed_samples == 3 * 16 + 24


def test_a_run_with_other_rules_than_the_file_given_is_not_taken() -> None:
    host = host_at(3)
    own = Own(
        MANIFEST.model_copy(update={"run": MANIFEST.run.model_copy(update={"seed": 3})}), public_of(HOST)
    )
    asks = Restoring(own, NONCE, 0.0)
    knocks(asks, 1, keeper(1, host))
    assert asks.due(100.0) is None and "other rules" in asks.notes[0]


def test_who_asks_for_the_status_is_told_why_it_waits() -> None:
    asks = machine()
    said = asks.on_door(b"w", AskStatus(run="lost"), 3.0)
    assert isinstance(said, Refuse) and said.code == CODE and "waiting for its peers" in said.reason
    assert (
        isinstance(wrong := asks.on_door(b"w", AskStatus(run="other"), 3.0), Refuse) and wrong.code == "run"
    )


# ---- how long it waits ----------------------------------------------------------------------------------------------


def test_it_waits_as_long_as_every_living_peer_needs_to_knock_and_no_longer() -> None:
    heard = RestoringState(True, 0.0, 5.0, 1)
    assert why_wait(heard, 5.0 + PATIENCE_S - 0.1) and not why_wait(heard, 5.0 + PATIENCE_S)
    nobody = RestoringState(True, 0.0, None, 0)
    assert why_wait(nobody, NOBODY_S - 0.1) and not why_wait(nobody, NOBODY_S)
    assert why_wait(RestoringState(False, 0.0, None, 1), 1e6), "without a run there is nothing to go on with"
    assert PATIENCE_S + 10.0 < 30.0, "and all of it within the promise"


# ---- what a peer keeps ----------------------------------------------------------------------------------------------


def test_a_peer_keeps_the_last_64_and_finds_them_in_its_file() -> None:
    host = host_at(70)
    kept = keeper(1, host)
    assert (
        kept.newest is not None
        and kept.newest.number == 71
        and len(kept._heads) == 64
        and len(kept._commits) == 64
    )
    again = KeptCommits(curve_key_of(public_of(HOST)), public_of(key_of(1)), kept.raw)
    assert again.newest == kept.newest and again.about == kept.about
    torn = KeptCommits(curve_key_of(public_of(HOST)), public_of(key_of(1)), kept.raw[:-1])
    assert torn.newest is None


def test_a_peer_keeps_nothing_that_its_runs_key_did_not_sign_and_never_goes_back() -> None:
    host = host_at(3)
    assert keeper(1, host, pinned=key_of(5)).newest is None
    kept = keeper(1, host)
    kept.hear(host.told[0])
    assert kept.newest is not None and kept.newest.number == 4


@pytest.mark.parametrize("steps", [3, 70])
def test_a_peer_of_a_run_begun_anew_with_the_same_key_keeps_that_one_alone(steps: int) -> None:
    old, new = host_at(steps), host_at(9, run_id=b"a later run, 01!")
    kept = keeper(1, old)
    for each in new.told[-3:]:
        assert kept.hear(each)
    assert (
        [each.head.run_id for each in kept._heads] == [new.run_id] * 3
        and kept.newest is not None
        and kept.newest.number == 10
    )
    again = KeptCommits(curve_key_of(public_of(HOST)), public_of(key_of(1)), kept.raw)
    assert again.newest == kept.newest and len(again._heads) == len(kept._heads)


def test_of_two_runs_of_one_key_the_one_that_most_peers_show_goes_on_and_people_are_told() -> None:
    old, new = host_at(9), host_at(4, run_id=b"a later run, 01!")
    asks = machine()
    knocks(asks, 1, keeper(1, old))
    knocks(asks, 2, keeper(2, new))
    knocks(asks, 3, keeper(3, new))
    found = asks.due(1.0 + PATIENCE_S)
    assert found is not None and found.run_id == new.run_id and restored(found).version == 4
    (told,) = [note for note in asks.take_notes() if not note.startswith("restoring:")]
    assert "more than one run was begun with this key" in told and "forked" not in told


def test_a_peer_keeps_the_head_of_a_step_whose_books_others_keep_and_no_damaged_books() -> None:
    host = host_at(3)
    newest = keeper(1, host, books=0).newest
    assert newest is not None and newest.number == KeptSteps.of(host.ledger).link.number
    told = host.told[-1]
    assert told.kept is not None
    kept = keeper(1, host, 2)
    assert not kept.hear(msgspec.structs.replace(told, kept=KeptCommit(told.kept.head, b"other books")))
    assert kept.newest is not None and kept.newest.number == KeptSteps.of(host.ledger).link.number - 1


def test_books_that_are_too_long_are_no_message() -> None:
    kept = host_at(1).told[-1].kept
    assert kept is not None
    head = kept.head
    fits = msgspec.msgpack.encode(KeptCommit(head, bytes(KEPT_BOOKS_BYTES)))
    assert msgspec.msgpack.decode(fits, type=KeptCommit).head == head
    too_long = msgspec.msgpack.encode(KeptCommit(head, bytes(KEPT_BOOKS_BYTES + 1)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(too_long, type=KeptCommit)
