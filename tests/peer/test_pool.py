"""The threads of the agent's arithmetic: what is done side by side, what never is, and in which order it is told."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from farflung.peer.worker import AHEAD, USUAL_MOST, Inbox, Pool, nothing, shares, usual_threads
from rig.waiting import PATIENCE_S, eventually

SOON_S = 0.05
THREADS = 3


class Payload:
    """That it is gone can be seen."""


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def held() -> threading.Event:
    """What jobs of a test wait for."""
    return threading.Event()


@pytest.fixture
def pool(inbox: Inbox, held: threading.Event) -> Iterator[Pool]:
    made = Pool("arithmetic", inbox.submit, THREADS)
    yield made
    held.set()
    made.close()


def hold(begun: threading.Event, held: threading.Event) -> None:
    """A job that goes on until the test lets it end."""
    begun.set()
    held.wait(PATIENCE_S)


def told_in_the_end(pool: Pool, inbox: Inbox, told: list[object]) -> list[object]:
    pool.close()
    inbox.collect()
    return told


# ---- side by side ----------------------------------------------------------------------------------------------


def test_jobs_of_several_chunks_are_done_at_the_same_time(pool: Pool) -> None:
    both = threading.Barrier(2)  # each waits for the other
    done = threading.Semaphore(0)

    def job() -> None:
        both.wait(PATIENCE_S)
        done.release()

    for chunk in range(2):
        pool.beside(chunk, job)
    assert done.acquire(timeout=PATIENCE_S) and done.acquire(timeout=PATIENCE_S)


def test_jobs_of_one_chunk_are_done_one_after_the_other(pool: Pool, held: threading.Event) -> None:
    begun, second = threading.Event(), threading.Event()
    pool.beside(7, partial(hold, begun, held))
    pool.beside(7, second.set)
    assert begun.wait(PATIENCE_S) and not second.wait(SOON_S)
    held.set()
    assert second.wait(PATIENCE_S)


def test_what_concerns_all_begins_when_all_before_it_is_done(pool: Pool, held: threading.Event) -> None:
    begun, whole = threading.Event(), threading.Event()
    pool.beside(1, partial(hold, begun, held))
    pool.submit(whole.set)
    assert begun.wait(PATIENCE_S) and not whole.wait(SOON_S)
    held.set()
    assert whole.wait(PATIENCE_S)


def test_nothing_begins_while_what_concerns_all_is_done(pool: Pool, held: threading.Event) -> None:
    begun, after = threading.Event(), threading.Event()
    pool.submit(partial(hold, begun, held))
    pool.beside(1, after.set)
    assert begun.wait(PATIENCE_S) and not after.wait(SOON_S)
    held.set()
    assert after.wait(PATIENCE_S)


def test_nothing_overtakes_what_concerns_all(pool: Pool, held: threading.Event) -> None:
    begun, after = threading.Event(), threading.Event()
    pool.beside(1, partial(hold, begun, held))
    pool.submit(lambda: None)
    pool.beside(2, after.set)
    assert begun.wait(PATIENCE_S) and not after.wait(SOON_S)
    held.set()
    assert after.wait(PATIENCE_S)


def test_parts_of_what_concerns_all_are_done_side_by_side_and_beside_nothing_else(
    pool: Pool, held: threading.Event
) -> None:
    begun, both, after = threading.Event(), threading.Barrier(3), threading.Event()
    pool.beside(1, partial(hold, begun, held))
    pool.spread([partial(both.wait, PATIENCE_S)] * 2)
    pool.beside(1, after.set)
    try:
        assert begun.wait(PATIENCE_S)
        time.sleep(SOON_S)
        assert both.n_waiting == 0, "none before what was asked before"
        held.set()
        eventually(lambda: both.n_waiting == 2, "both at the same time")
        assert not after.wait(SOON_S), "and nothing else meanwhile"
    finally:
        both.abort()
    assert after.wait(PATIENCE_S)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_each_chunk_has_the_history_that_one_thread_gives_it(threads: int, inbox: Inbox) -> None:
    draw, pool = random.Random(threads), Pool("arithmetic", inbox.submit, threads)
    seen: dict[int, list[tuple[str, int]]] = {chunk: [] for chunk in range(5)}
    expected: dict[int, list[tuple[str, int]]] = {chunk: [] for chunk in range(5)}
    told: list[int] = []

    def look(number: int) -> int:
        for history in seen.values():
            history.append(("all", number))
        return number

    def change(chunk: int, number: int) -> int:
        before = list(seen[chunk])
        time.sleep(0.0001 * (number % 4))
        assert before == seen[chunk], "two at once"
        seen[chunk].append(("change", number))
        return number

    for number in range(300):
        if draw.random() < 0.1:
            pool.submit(partial(look, number), told.append)
            for history in expected.values():
                history.append(("all", number))
        else:
            chunk = draw.randrange(5)
            pool.beside(chunk, partial(change, chunk, number), told.append)
            expected[chunk].append(("change", number))
    pool.close()
    inbox.collect()
    assert seen == expected and told == list(range(300))


# ---- what the loop hears ---------------------------------------------------------------------------------------


def test_the_loop_hears_of_jobs_in_the_order_in_which_it_asked(
    pool: Pool, inbox: Inbox, held: threading.Event
) -> None:
    second, told = threading.Event(), list[object]()
    pool.beside(1, lambda: held.wait(PATIENCE_S), lambda _: told.append("first"))
    pool.beside(2, second.set, lambda _: told.append("second"))
    assert second.wait(PATIENCE_S)
    inbox.collect()
    assert told == []
    held.set()
    assert told_in_the_end(pool, inbox, told) == ["first", "second"]


def test_what_waits_for_an_older_job_is_bounded(pool: Pool, held: threading.Event) -> None:
    done = list[int]()
    pool.beside("held", lambda: held.wait(PATIENCE_S))
    for number in range(1000):
        pool.beside(number, partial(done.append, number))
    most = AHEAD * THREADS - 1  # beside the one that is held
    eventually(lambda: len(done) >= most, "as many as may be ahead")
    time.sleep(SOON_S)
    assert len(done) == most
    held.set()
    pool.close()
    assert sorted(done) == list(range(1000))


def test_an_error_is_raised_in_the_loop_in_its_turn_and_the_others_are_done(
    pool: Pool, inbox: Inbox, held: threading.Event
) -> None:
    failed, told = threading.Event(), list[object]()
    error = KeyError("a bug")

    def fail() -> None:
        failed.set()
        raise error

    pool.beside(1, lambda: held.wait(PATIENCE_S), told.append)
    pool.beside(2, fail, told.append)
    pool.submit(lambda: "next", told.append)
    assert failed.wait(PATIENCE_S)
    inbox.collect()
    held.set()
    pool.close()
    with pytest.raises(KeyError) as caught:
        inbox.collect()
    assert caught.value is error and told == [True]
    inbox.collect()
    assert told == [True, "next"]


def test_nothing_of_a_job_is_held_once_it_is_told(pool: Pool, inbox: Inbox) -> None:
    """Payloads of a round that is over: else each idle thread would keep some."""
    payload = Payload()
    known, told = weakref.ref(payload), threading.Event()
    pool.beside(1, partial(list, [payload]), nothing)
    pool.submit(told.set)
    del payload
    assert told.wait(PATIENCE_S)
    eventually(lambda: gc.collect() >= 0 and known() is None, "let go of")


# ---- how many, and the end -------------------------------------------------------------------------------------


def test_a_small_machine_has_one_thread_and_a_large_one_a_few() -> None:
    assert [usual_threads(cores) for cores in (1, 2, 3, 4, 8, 128)] == [1, 1, 1, 2, 4, USUAL_MOST]
    assert usual_threads() >= 1


def test_each_thread_has_a_share_of_the_chunks() -> None:
    assert shares(range(10, 20), 2) == [range(10, 13), range(13, 16), range(16, 19), range(19, 20)]
    assert shares(range(3), 4) == [range(1), range(1, 2), range(2, 3)] and shares(range(0), 4) == []


def test_to_close_a_busy_pool_is_to_finish_what_was_submitted(pool: Pool, inbox: Inbox) -> None:
    told: list[object] = []
    for number in range(50):
        pool.beside(number % 4, lambda number=number: time.sleep(0.001) or number, told.append)  # type: ignore[misc]
    assert told_in_the_end(pool, inbox, told) == list(range(50))
    pool.close()
    pool.beside(1, lambda: 50, told.append)
    pool.submit(lambda: 51, told.append)
    assert told_in_the_end(pool, inbox, told) == list(range(50)), "nothing is done after it"


def test_the_time_of_all_threads_is_told(pool: Pool) -> None:
    assert pool.cpu_seconds() == 0.0
    done = threading.Semaphore(0)

    def job() -> None:
        sum(range(300_000))
        done.release()

    for chunk in range(2):
        pool.beside(chunk, job)
    assert done.acquire(timeout=PATIENCE_S) and done.acquire(timeout=PATIENCE_S)
    assert pool.cpu_seconds() > 0.0
