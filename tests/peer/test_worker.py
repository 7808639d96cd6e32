"""The agent's background threads: order, errors, and how they end."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

import pytest

from farflung.peer.worker import Inbox, Worker, nothing
from rig.waiting import PATIENCE_S

SOON_S = 0.05


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def worker(inbox: Inbox) -> Iterator[Worker]:
    made = Worker("arithmetic", inbox.submit)
    yield made
    made.close(PATIENCE_S)


def rings(inbox: Inbox, patience_s: float = PATIENCE_S) -> bool:
    """As the agent waits for it: in a poll, beside its sockets."""
    return bool(select.select([inbox.wake], [], [], patience_s)[0])


def fail(error: Exception) -> NoReturn:
    raise error


def collect_until(inbox: Inbox, told: list[object], count: int) -> None:
    while len(told) < count:
        assert rings(inbox)
        inbox.collect()


# ---- order -----------------------------------------------------------------------------------------------------


def test_jobs_are_done_in_order_in_one_thread_and_followed_in_the_loop(inbox: Inbox, worker: Worker) -> None:
    threads: set[str] = set()
    told: list[tuple[int, str]] = []

    def job(number: int) -> int:
        threads.add(threading.current_thread().name)
        return number

    for number in range(100):
        worker.submit(partial(job, number), lambda made: told.append((made, threading.current_thread().name)))
    collect_until(inbox, told, 100)  # type: ignore[arg-type]
    assert told == [(number, threading.current_thread().name) for number in range(100)]
    assert threads == {"arithmetic"}
    worker.close()  # it rings after it has handed a job back: the last time, maybe, when that was collected already
    inbox.collect()
    assert not rings(inbox, 0.0), "the bell is quiet once everything was collected"


def test_a_job_that_nobody_follows_does_not_wake_the_loop(inbox: Inbox, worker: Worker) -> None:
    done = threading.Event()
    worker.submit(done.set, nothing)
    assert done.wait(PATIENCE_S) and not rings(inbox, SOON_S)


def test_the_loop_is_woken_at_once(inbox: Inbox, worker: Worker) -> None:
    told: list[object] = []
    took = []
    for _ in range(50):
        before = time.perf_counter()
        worker.submit(object, told.append)
        collect_until(inbox, told, 1)
        took.append(time.perf_counter() - before)
        told.clear()
    assert sorted(took)[25] < 0.01, "and not at the loop's next tick"


def test_what_a_second_worker_made_comes_behind_what_the_first_was_asked_before(
    inbox: Inbox, worker: Worker
) -> None:
    """So a state is in place before the machine hears that it was read from a checkpoint."""
    hold, asked = threading.Event(), threading.Event()
    second = Worker("checkpoints", worker.submit)
    told: list[object] = []

    def read() -> str:
        worker.submit(hold.wait, lambda _: told.append("installed"))
        second.later(lambda: told.append("event"))
        asked.set()
        return "read"

    second.submit(read, told.append)
    assert asked.wait(PATIENCE_S)
    inbox.collect()
    assert told == []
    hold.set()
    collect_until(inbox, told, 3)
    assert told == ["installed", "event", "read"]
    second.close()


def test_whoever_submits_can_see_how_much_waits(worker: Worker) -> None:
    hold, begun = threading.Event(), threading.Event()
    worker.submit(lambda: begun.set() or hold.wait(), size_bytes=100)  # type: ignore[func-returns-value]
    assert begun.wait(PATIENCE_S)
    worker.submit(bytes, size_bytes=20)
    worker.submit(bytes, size_bytes=3)
    assert worker.waiting_bytes == 23, "what is being done does not wait any more"
    hold.set()
    worker.close()
    assert worker.waiting_bytes == 0


# ---- errors ----------------------------------------------------------------------------------------------------


def test_an_error_reaches_the_loop_as_what_it_is_and_the_others_are_done(
    inbox: Inbox, worker: Worker
) -> None:
    error, told = KeyError("a bug"), list[object]()
    worker.submit(lambda: fail(error), told.append)
    worker.submit(lambda: "next", told.append)
    assert rings(inbox)
    with pytest.raises(KeyError) as caught:
        collect_until(inbox, told, 1)
    assert caught.value is error and caught.traceback[-1].name == "fail", "where it happened is still told"
    inbox.collect()
    worker.close()
    inbox.collect()
    assert told == ["next"]


@pytest.mark.parametrize("follow", [nothing, print])
def test_an_error_of_a_second_worker_is_raised_in_the_loop_too(
    inbox: Inbox, worker: Worker, follow: object, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ZeroDivisionError("a bug")
    second = Worker("results", worker.submit)
    second.submit(lambda: fail(error), follow)  # type: ignore[arg-type]
    assert rings(inbox)
    with pytest.raises(ZeroDivisionError) as caught:
        inbox.collect()
    assert caught.value is error and capsys.readouterr().out == ""
    second.close()


def test_an_error_that_nobody_collected_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    inbox = Inbox()
    worker = Worker("arithmetic", inbox.submit)
    worker.submit(lambda: fail(ValueError("in the last moment")))
    worker.close()
    inbox.close()
    assert "ValueError: in the last moment" in capsys.readouterr().err


# ---- the end ---------------------------------------------------------------------------------------------------


def test_to_close_a_busy_worker_is_to_finish_what_was_submitted(inbox: Inbox, worker: Worker) -> None:
    told: list[object] = []
    for number in range(20):
        worker.submit(lambda number=number: time.sleep(0.001) or number, told.append)  # type: ignore[misc]
    worker.close()
    inbox.collect()
    assert told == list(range(20))


def test_a_job_that_hangs_is_left_behind_and_those_after_it_are_dropped(inbox: Inbox, worker: Worker) -> None:
    hold, told = threading.Event(), list[object]()
    worker.submit(hold.wait, told.append)
    worker.submit(lambda: "dropped", told.append)
    began = time.monotonic()
    worker.close(SOON_S)
    assert SOON_S <= time.monotonic() - began < PATIENCE_S and worker.given_up.is_set()
    hold.set()
    worker.close(PATIENCE_S)
    inbox.collect()
    assert told == [True]


def test_a_long_job_sees_that_nobody_waits_for_it(worker: Worker) -> None:
    seen: list[bool] = []
    worker.submit(lambda: seen.append(worker.given_up.wait(PATIENCE_S)))
    worker.close(SOON_S)
    worker.close(PATIENCE_S)
    assert seen == [True]


def test_to_close_an_idle_worker_takes_no_time_and_may_be_repeated(inbox: Inbox, worker: Worker) -> None:
    told: list[object] = []
    worker.submit(object, told.append)
    collect_until(inbox, told, 1)
    for _ in range(2):
        worker.close(PATIENCE_S)
    never_used = Worker("results", inbox.submit)
    assert never_used.cpu_seconds() == 0.0
    never_used.close()
    never_used.submit(object, told.append)
    assert not rings(inbox, SOON_S) and len(told) == 1


def test_a_job_after_close_is_not_done(inbox: Inbox, worker: Worker) -> None:
    done: list[int] = []
    worker.submit(lambda: done.append(1))
    worker.close()
    worker.submit(lambda: done.append(2), size_bytes=5)
    worker.close()
    assert done == [1] and worker.waiting_bytes == 0 and not rings(inbox, SOON_S)


def test_the_thread_s_time_is_told(inbox: Inbox, worker: Worker) -> None:
    told: list[object] = []
    worker.submit(lambda: sum(range(300_000)), told.append)
    collect_until(inbox, told, 1)
    assert worker.cpu_seconds() > 0.0
