"""Loaders that ask for batches before the steps that use them: which samples are used, which are read once more."""

from __future__ import annotations

import pytest

from farflung.peer.data.leased_data import (
    AHEAD_S,
    LEASES_OF_AN_EPOCH,
    LeaseBook,
    LoaderPace,
    ReadPace,
    Span,
)
from farflung.protocol.messages import Lease

BATCH = 2


def leased(*places: tuple[int, int], fragments: int = 1, ahead: int = 1) -> LeaseBook:
    book = LeaseBook(fragments)
    leases = [Lease.at(i, 0, start, stop, (start,) * fragments) for i, (start, stop) in enumerate(places, 1)]
    book.on_leases(tuple(leases))
    book.read_ahead(ahead)
    return book


def read(book: LeaseBook) -> Span:
    [span] = book.next_batch(BATCH)
    book.hand_out((span,), tokens=span.stop - span.start)
    return span


def test_a_step_has_used_all_but_the_newest_batches_and_their_tokens() -> None:
    book = leased((0, 20), ahead=2)
    for _ in range(3):
        read(book)
    assert book.step_tokens == BATCH
    book.on_step()
    assert [used.upto for used in book.used()] == [2]
    book.on_step()  # a second step on the same batch, such as that of another optimizer
    assert [used.upto for used in book.used()] == [2] and book.handed_out == 2


def test_what_is_missing_after_a_drop_comes_right_behind_what_was_held_back() -> None:
    book = leased((0, 20))
    read(book), read(book)
    book.on_step()  # [0, 2) is used, [2, 4) held back
    book.restart()
    assert read(book).start == 0
    assert book.learners() == [], "[2, 4) is no use: what comes before it is missing"
    book.on_step()
    assert read(book).start == 2 and book.learners() == [0]
    book.on_step()
    assert [used.upto for used in book.used()] == [2]


def test_a_fragment_that_lacks_samples_gets_them_while_the_others_wait() -> None:
    book = leased((0, 20), fragments=2)
    read(book), read(book)
    book.on_step()
    book.restart(1)  # of this fragment the work was dropped
    assert (read(book).start, book.learners()) == (0, [0])
    book.on_step()  # with [2, 4): the other fragment learns from it
    assert (read(book).start, book.learners()) == (2, [1])
    book.on_step()
    assert [used.upto for used in book.used(0)] == [4] and [used.upto for used in book.used(1)] == [2]


def test_what_is_held_back_of_a_lease_that_is_lost_is_of_no_use() -> None:
    book = leased((0, 4), (4, 20))
    read(book), read(book)
    book.on_step()
    book.on_leases((Lease(2, 0, 4, 20, 4),))
    book.restart()
    assert (read(book).start, book.learners()) == (4, [])
    book.on_step()
    assert (read(book).start, book.learners()) == (6, [0])


def asked(pace: LoaderPace, *before_each_step: int) -> list[str]:
    """What is said at each step, where so many batches were asked for before it."""
    told, out = [], 0
    for count in before_each_step:
        for _ in range(count):
            pace.on_hand_out()
        out += count
        told.append(pace.on_step(out))
        out = min(out, pace.ahead)
    return told


@pytest.mark.parametrize(
    ("ahead", "steps"),
    [(0, (1, 1, 1, 1)), (0, (4, 4, 4)), (1, (2, 1, 1)), (2, (6, 4, 4)), (0, (1, 0, 1, 0, 1)), (0, (3, 2, 1))],
)
def test_a_loader_that_asks_as_it_was_said_is_no_reason_for_words(ahead: int, steps: tuple[int, ...]) -> None:
    assert not any(asked(LoaderPace(ahead), *steps))


def test_a_loader_that_reads_ahead_without_a_word_is_told_once() -> None:
    told = asked(LoaderPace(0), 2, 1, 1, 1, 1)
    assert [bool(each) for each in told] == [False, False, True, False, False]
    assert "run.batches(..., ahead=1)" in told[2]
    assert "run.batches(..., ahead=2)" in asked(LoaderPace(1), 6, 4, 4)[2]


def test_a_loader_that_does_not_read_ahead_as_it_was_said_is_taken_as_it_is() -> None:
    pace = LoaderPace(2)
    told = asked(pace, 2, 1, 1)
    assert "taken as ahead=1" in told[0] and pace.ahead == 1
    assert not any(told[1:])


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_after_a_drop_steps_of_several_batches_soon_learn_again(group: int, ahead: int) -> None:
    """A step is lost with one of its batches: what is held back meanwhile must be what the next step needs."""
    book = leased((0, 1000), ahead=ahead)
    for _ in range(group + ahead):
        read(book)
    book.on_step()
    book.restart()
    for _ in range(ahead + 2):
        for _ in range(group):
            read(book)
        book.on_step()
    assert book.used(), "nothing is ever learned again"


# ---- how much lies ahead of a peer ---------------------------------------------------------------------------------


def paced(sample_s: float, batch: int = 4, pause_every: int = 0) -> ReadPace:
    pace, now = ReadPace(), 0.0
    for number in range(200):
        pace.on_read(batch, now)
        now += sample_s * batch + (30.0 if pause_every and number % pause_every == 0 else 0.0)
    return pace


def test_leases_last_ten_minutes_of_reading_where_the_data_set_is_large_enough() -> None:
    large = 10_000_000
    unit = paced(0.0125).unit(256, large)
    assert AHEAD_S <= unit * 0.0125 <= 1.1 * AHEAD_S
    assert paced(5.0).unit(256, large) == 256, "a slow reader's usual lease lasts longer"
    assert ReadPace().unit(256, large) == 256, "before anything is known"


def test_no_peer_holds_so_much_of_an_epoch_that_others_have_none() -> None:
    assert paced(0.001).unit(256, 64_000) == 64_000 // LEASES_OF_AN_EPOCH
    assert paced(0.001).unit(256, 60) == 256, "small data sets are leased as ever"


def test_rounds_that_are_waited_for_are_no_pace_of_reading() -> None:
    with_rounds = paced(0.0125, pause_every=40).unit(256, 10_000_000)
    assert 0.8 <= with_rounds / paced(0.0125).unit(256, 10_000_000) <= 1.0
