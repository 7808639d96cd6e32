"""The book of batches: one cursor, each microbatch one seat's at most, and what becomes of it over a snapshot."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from farflung.coordinator.batches.batch_book import (
    Batch,
    BatchBegun,
    BatchBook,
    BookedSeat,
    GrantedMicros,
    MicroSkipped,
    Seated,
    TakenBack,
    Unseated,
    mask_of_spans,
    spans_of_mask,
)
from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    CommittedBatch,
    CommittedRound,
    DataFixed,
    Folded,
    Record,
    RolledBack,
    from_bytes,
    to_bytes,
)
from farflung.protocol.digests import mask_to_bytes
from farflung.protocol.round_words import Commit

TEN = BatchBegun(version=0, epoch=0, start=0, stop=10, count=10)


def a_ledger(*records: Record) -> Ledger:
    ledger = Ledger(LedgerRules(8, 3))
    for record in (DataFixed(samples=25, peer="ann"), *records):
        ledger.apply(record)
    return ledger


def seated(number: int, peer: str) -> Seated:
    return Seated(number=number, peer=peer, process=peer.encode(), trainer=0)


@pytest.mark.parametrize("mask", [0, 1, 0b1011, 0b1110_0111, 1 << 4095, (1 << 4096) - 1])
def test_masks_and_ranges_are_two_ways_to_say_it(mask: int) -> None:
    spans = spans_of_mask(mask)
    assert mask_of_spans(spans) == mask
    assert all(stop < first for (_, stop), (first, _) in pairwise(spans))


def test_what_a_seat_held_is_free_again_when_it_is_gone_the_counted_too() -> None:
    ledger = a_ledger(TEN, seated(1, "ann"), seated(2, "bob"))
    ledger.apply(GrantedMicros(seat=1, first=0, stop=4))
    ledger.apply(GrantedMicros(seat=2, first=4, stop=6))
    assert BatchBook.of(ledger).free == 0b11_1100_0000
    ledger.apply(Unseated(number=1, peer="ann", reason="it is gone"))
    assert BatchBook.of(ledger).free == 0b11_1100_1111
    ledger.apply(seated(3, "ann"))
    assert BatchBook.of(ledger).last_seat == 3 and not BatchBook.of(ledger).seats[3].granted, (
        "numbers are never used again"
    )


def test_batches_follow_each_other_and_the_last_of_an_epoch_may_be_short() -> None:
    book = BatchBook()
    found = []
    for version in range(4):
        batch = book.next_batch(version, samples=25, most=4, micro=3)
        found.append((batch.epoch, batch.start, batch.stop, batch.count))
        book.begin(batch)
        book.commit([{"ann": mask_to_bytes(batch.whole)}], 25)
    assert found == [(0, 0, 12, 4), (0, 12, 24, 4), (0, 24, 25, 1), (1, 0, 12, 4)]


@pytest.mark.parametrize(
    "counted",
    [{"ann": 0b0111, "bob": 0b1100}, {"ann": 0b0111}, {"ann": 0b1_1111}],
    ids=["twice", "too few", "beyond"],
)
def test_P11_a_commit_that_is_not_its_batch_is_none(counted: dict[str, int]) -> None:
    book = BatchBook()
    book.begin(Batch(0, 0, 0, 4, 4))
    with pytest.raises(ValueError, match="a commit"):
        book.commit([{peer: mask_to_bytes(mask) for peer, mask in counted.items()}], 25)


def test_what_nobody_gets_a_gradient_out_of_is_left_out_and_a_batch_of_nothing_is_passed_over() -> None:
    ledger = a_ledger(BatchBegun(version=0, epoch=0, start=20, stop=25, count=2), seated(1, "ann"))
    ledger.apply(GrantedMicros(seat=1, first=0, stop=2))
    ledger.apply(TakenBack(seat=1, first=1, stop=2, reason="nan"))
    ledger.apply(MicroSkipped(version=0, micro=1, samples=2, reason="nan"))
    batch = BatchBook.of(ledger).batch
    assert batch is not None and batch.whole == 0b01 and not BatchBook.of(ledger).free
    ledger.apply(MicroSkipped(version=0, micro=0, samples=3, reason="nan"))
    assert (BatchBook.of(ledger).batch, BatchBook.of(ledger).cursor) == (None, (1, 0))
    assert not BatchBook.of(ledger).seats, "what is said of the one batch is not taken for the next"
    assert BatchBook.of(ledger).skipped_samples == 5


def test_P5_a_folded_ledger_has_the_same_seats_and_grants() -> None:
    ledger = a_ledger(TEN, seated(1, "ann"), GrantedMicros(seat=1, first=2, stop=5))
    folded = ledger.folded(4)
    again = Ledger(LedgerRules(8, 3))
    again.apply(Folded(position=4, ledger=folded.ledger, digest=folded.digest))
    assert BatchBook.of(again) == BatchBook.of(ledger)
    assert BatchBook.of(again).seats[1] == BookedSeat(1, "ann", b"ann", 0, [(2, 5)])


def test_another_data_set_makes_the_batch_void() -> None:
    ledger = a_ledger(TEN, seated(1, "ann"))
    ledger.apply(DataFixed(samples=30, peer="bob"))
    assert (
        BatchBook.of(ledger).batch is None
        and not BatchBook.of(ledger).seats
        and BatchBook.of(ledger).last_seat == 1
    )


# ---- several stages ----------------------------------------------------------------------------------------


def in_stages(*records: Record, stages: int = 2) -> Ledger:
    ledger = Ledger(LedgerRules(8, 3, stages))
    for record in (DataFixed(samples=25, peer="ann"), *records):
        ledger.apply(record)
    return ledger


def staged(number: int, peer: str, stage: int) -> Seated:
    return Seated(number=number, peer=peer, process=peer.encode(), trainer=0, stage=stage)


def round_of(stage: int, counted: dict[str, int], version: int = 1, **changes: Any) -> CommittedRound:
    commit = Commit(version, stage + 1, tuple(counted), (1.0,) * len(counted), bytes(32), "fp32", stage)
    masks = {peer: mask_to_bytes(mask) for peer, mask in counted.items()}
    plain: dict[str, Any] = {
        "used": {}, "excluded": {}, "tokens": 10, "steps": 1, "loss": None, "seconds": 1.0, "tx_bytes": 0
    }  # fmt: skip
    return CommittedRound(commit=commit, counted=masks, **{**plain, **changes})


def test_seats_make_a_numbered_table_and_it_survives_a_snapshot() -> None:
    ledger = in_stages(staged(1, "ann", 0), staged(2, "bob", 1), TEN, staged(3, "cyd", 1))
    ledger.apply(Unseated(number=2, peer="bob", reason="it is gone"))
    book = BatchBook.of(ledger)
    assert (book.table_no, book.table.last_loss(1), [row.number for row in book.table.living(1)]) == (
        5,
        5,
        [3],
    )
    again = Ledger(LedgerRules(8, 3, 2))
    again.apply(from_bytes(to_bytes(ledger.folded(9))))
    assert BatchBook.of(again) == book and BatchBook.of(again).table.seats == book.table.seats
    again.apply(BatchBegun(version=0, epoch=0, start=0, stop=10, count=10))
    assert BatchBook.of(again).table.number == 6 and set(BatchBook.of(again).table.seats) == {1, 3}


def test_what_peers_keep_of_it_is_put_back_and_the_run_can_still_go_back_by_one() -> None:
    book = BatchBook((0, 20), 2, last_seat=7, table_no=9)
    older = BatchBook((0, 10), 1, last_seat=3, table_no=4)
    again = BatchBook()
    again.put_back(2, book.kept(), newest=True)
    again.put_back(1, older.kept(), newest=False)
    again.put_back(0, b"", newest=False)  # kept by a coordinator without batches
    assert (again.cursor, again.version, again.last_seat, again.table_no) == ((0, 20), 2, 7, 9)
    assert again.cursors == {2: (0, 20), 1: (0, 10)}
    ledger = a_ledger()
    again.apply(RolledBack(versions=(1,), reason="lost"), ledger)
    assert (again.cursor, again.version, again.cursors) == ((0, 10), 1, {1: (0, 10)})
    again.apply(RolledBack(versions=(0,), reason="lost"), ledger)
    assert again.cursor == (0, 0)


def test_a_batch_that_was_passed_over_since_is_not_begun_again_where_the_version_stays() -> None:
    ledger = a_ledger(TEN, MicroSkipped(version=0, micro=0, samples=1, reason="nan"))
    for micro in range(1, 10):
        ledger.apply(MicroSkipped(version=0, micro=micro, samples=1, reason="nan"))
    book = BatchBook.of(ledger)
    assert book.batch is None and book.cursor != (0, 0)
    due = book.cursor
    ledger.apply(RolledBack(versions=(0,), reason="a stage lost its version 0"))
    assert book.cursor == due


def test_P14_what_a_gone_seat_was_granted_is_marked_when_another_one_gets_it() -> None:
    ledger = in_stages(TEN, staged(1, "ann", 0), staged(2, "bob", 0))
    ledger.apply(GrantedMicros(seat=1, first=0, stop=3))
    ledger.apply(Unseated(number=1, peer="ann", reason="it is gone"))
    ledger.apply(GrantedMicros(seat=2, first=2, stop=6))
    assert BatchBook.of(ledger).again(BatchBook.of(ledger).seats[2]) == 0b100


def test_P13_all_stages_go_on_by_one_record() -> None:
    ledger = in_stages(TEN)
    rounds = (
        round_of(0, {"ann": 0b11111_00000, "bob": 0b11111}),
        round_of(1, {"cyd": 0b11111_11111}, loss=2.5),
    )
    ledger.apply(CommittedBatch(rounds=rounds))
    assert [book.version for book in ledger.books] == [1, 1]
    assert (ledger.totals.tokens, ledger.totals.loss, BatchBook.of(ledger).cursor) == (10, 2.5, (0, 10))
    assert BatchBook.of(ledger).cursors == {1: (0, 10)}
    assert [book.marks[1].loss for book in ledger.books] == [2.5] * 2


WHOLE = 0b11111_11111


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ((round_of(0, {"ann": WHOLE}),), "one round of every stage"),
        ((round_of(0, {"ann": WHOLE}), round_of(1, {"bob": WHOLE}, 2)), "one round of every stage"),
        ((round_of(1, {"ann": WHOLE}), round_of(0, {"bob": WHOLE})), "one round of every stage"),
        ((round_of(0, {"ann": WHOLE}), round_of(1, {"bob": WHOLE ^ 1})), "lacks microbatches"),
        ((round_of(0, {"ann": WHOLE}), round_of(1, {"bob": WHOLE, "cyd": 1})), "counts a microbatch twice"),
        ((round_of(0, {"ann": WHOLE}), round_of(1, {})), "lacks microbatches"),
    ],
)
def test_P11_P13_a_journal_that_moves_some_stages_or_a_part_of_the_batch_is_not_ours(
    rounds: tuple[CommittedRound, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        in_stages(TEN).apply(CommittedBatch(rounds=rounds))
    if len(rounds) == 1:
        with pytest.raises(ValueError, match=words):
            in_stages(TEN).apply(rounds[0])
