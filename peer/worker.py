"""A thread that works through jobs in order beside the agent's loop, and hands what they made back to that loop.

The agent has one for each thing that takes long, such as checkpoints and results on disk; its arithmetic has several
threads.  What takes long would make a heartbeat late; in a thread it does not, because torch, blake3 and the
disk let go of the interpreter.  What belongs to one worker is touched by nobody else, and what was asked first happens
first.  Must not know what the jobs are about.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

Made = TypeVar("Made")
Job = Callable[[], object]
Then = Callable[[Any], None]
# Run the job in some worker; `then(what it made)` is called in the agent's loop.
Submit = Callable[[Callable[[], object], Callable[[object], None]], None]


def nothing(_: object) -> None:
    """Nobody waits for the end of this job."""


class Inbox:
    """What workers finished, for the agent's loop: `wake` becomes readable when `collect` has something to do."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[tuple[Then, object, Exception | None]] = queue.SimpleQueue()
        self.wake, self._bell = socket.socketpair()
        self.wake.setblocking(False)
        self._bell.setblocking(False)

    def submit(self, job: Job, then: Callable[[object], None]) -> None:
        """In a worker's thread, in which this job, a short one, is run too."""
        made, error = None, None
        try:
            made = job()
        except Exception as caught:  # the outermost frame of a worker: a bug, which is raised in the loop
            error = caught
        self._finished.put((then, made, error))
        try:
            self._bell.send(b"!")
        except BlockingIOError:
            pass  # the bell is ringing already

    def collect(self) -> None:
        """In the loop: call what is to follow each finished job.  An error of a job is a bug and is raised here."""
        try:
            while self.wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        while (finished := self._next()) is not None:
            then, made, error = finished
            if error is not None:
                raise error
            then(made)

    def close(self) -> None:
        """Once the workers ended.  Nothing follows any more, but an error that nobody collected is printed."""
        self.wake.close()
        self._bell.close()
        while (finished := self._next()) is not None:
            if finished[2] is not None:
                sys.excepthook(type(finished[2]), finished[2], finished[2].__traceback__)

    def _next(self) -> tuple[Then, object, Exception | None] | None:
        try:
            return self._finished.get_nowait()
        except queue.Empty:
            return None


class Worker:
    """`hand_back`: the inbox's `submit`, or another worker's: then what is made here reaches the loop behind
    everything that the other was asked before, and an error passes through it in the same way.

    The queue has no end of its own.  An owner that must bound it looks at `waiting_bytes` before `submit`.
    """

    def __init__(self, name: str, hand_back: Submit) -> None:
        self._name, self._hand_back = name, hand_back
        self._jobs: queue.SimpleQueue[tuple[Job, Then, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first job on
        self._lock = threading.Lock()
        self._closed = False
        self._waiting_bytes = 0
        self.given_up = threading.Event()  # nobody waits for what is being done: a long job looks at it

    def submit(
        self, job: Callable[[], Made], then: Callable[[Made], None] = nothing, size_bytes: int = 0
    ) -> None:
        """From any thread.  What comes after `close` is not done: there is no loop that could follow it."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._waiting_bytes += size_bytes
            self._jobs.put((job, then, size_bytes))

    @property
    def waiting_bytes(self) -> int:
        """Of the jobs that were not begun yet."""
        return self._waiting_bytes

    def cpu_seconds(self) -> float:
        """What the thread has used so far."""
        if self._thread is None or self._thread.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self, patience_s: float | None = None) -> None:
        """Do what was submitted, for so long (None: to the end); drop what was not begun then.  Safe to repeat.

        A job that hangs is left behind: the thread is a daemon.
        """
        with self._lock:
            if not self._closed:
                self._jobs.put(None)
            self._closed = True
        if self._thread is not None:
            self._thread.join(patience_s)
        self.given_up.set()

    # ---- in the thread ---------------------------------------------------------------------------------------

    def later(self, event: Callable[[], None]) -> None:
        """From within a job: `event` is called in the agent's loop."""
        self._hand_back(no_work, lambda _: event())

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None and not self.given_up.is_set():
            job, then, size_bytes = item
            with self._lock:
                self._waiting_bytes -= size_bytes
            try:
                made = job()
            except Exception as error:  # the thread's outermost loop: a bug, raised in the agent's loop
                follow(self._hand_back, then, None, error)
            else:
                follow(self._hand_back, then, made, None)


def follow(hand_back: Submit, then: Then, made: object, error: Exception | None) -> None:
    """A job is done: an error is raised in the agent's loop; what was made goes there if anybody waits for it."""
    if error is not None:
        hand_back(partial(_raise, error), nothing)
    elif then is not nothing:
        hand_back(partial(_give, made), then)


def no_work() -> None:
    """What follows is what matters."""


def _give(made: Made) -> Made:
    return made


def _raise(error: Exception) -> NoReturn:
    raise error


# ---- pool --------------------------------------------------------------------------------------------------
# The agent's arithmetic: threads that work side by side on jobs that have nothing to do with each other.
#
# Made and asked by the agent, whose loop hears what came of each job in the order in which it asked, as from
# one thread. A job either concerns all, and then it begins when everything before it is done and
# nothing else begins until it is; or it stands `beside` others, under a key, and waits for what concerns all
# and for jobs of its own key. So whoever sees only one chunk, or all of them, can't tell how many threads
# there are. Must not know what the jobs are about.

USUAL_MOST = 4  # each has some chunks' room of its own, and between its calls it needs the interpreter's lock
SHARES_EACH = 2  # of what is cut into as many jobs as there are threads to do it
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
AHEAD = 8  # jobs for each thread that may be done before an older one is: what they made waits for that one


def usual_threads(cores: int | None = None) -> int:
    """Half of the cores that this process may use: the trainer, other threads and other peers want some too."""
    return max(1, min(USUAL_MOST, (cores or len(os.sched_getaffinity(0))) // 2))


def shares(chunks: range, threads: int) -> list[range]:
    """Some for each thread, so that none waits long for the last one."""
    step = -(-len(chunks) // (SHARES_EACH * threads)) or 1
    return [chunks[first : first + step] for first in range(0, len(chunks), step)]


def load_libraries() -> None:
    """Numpy and torch, before anything else loads them: what is asked of them is done by the thread that asks.

    Numpy's products of matrices read how many threads they may use when they are loaded, and only then.  A trainer that
    this process starts is not told.
    """
    given = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ.pop(_BLAS_THREADS)
    if given is not None:
        os.environ[_BLAS_THREADS] = given


@dataclass(frozen=True, eq=False, slots=True)
class _Task:
    number: int  # as it was asked
    key: Hashable | None  # None: it concerns all
    job: Job
    then: Then


class Pool:
    """The queue has no end of its own, as a worker's has none."""

    def __init__(self, name: str, hand_back: Submit, threads: int) -> None:
        self._name, self._hand_back, self.size = name, hand_back, threads
        self._threads: list[threading.Thread] = []  # from the first jobs on
        self._news = threading.Condition()  # and the lock of all that follows
        self._waiting: deque[_Task] = deque()
        self._running: set[Hashable] = set()  # keys
        self._alone = False  # one that concerns all is being done
        self._asked = self._handed = 0
        self._finished: dict[int, Callable[[], None]] = {}  # by number: those that are not handed back yet
        self._closed = False

    def submit(self, job: Callable[[], Made], then: Callable[[Made], None] = nothing) -> None:
        """What concerns all.  From any thread; what comes after `close` is not done."""
        self._ask(None, job, then)

    def beside(self, key: Hashable, job: Callable[[], Made], then: Callable[[Made], None] = nothing) -> None:
        """What may be done while jobs of other keys are."""
        self._ask(key, job, then)

    def spread(self, jobs: Sequence[Callable[[], object]]) -> None:
        """What concerns all and was cut into parts: these are done side by side, and nothing else meanwhile."""
        self.submit(no_work)  # behind everything that was asked before
        for number, job in enumerate(jobs):
            self.beside((Pool, number), job)
        self.submit(no_work)

    def _ask(self, key: Hashable | None, job: Job, then: Then) -> None:
        with self._news:
            if self._closed:
                return
            self._waiting.append(_Task(self._asked, key, job, then))
            self._asked += 1
            if len(self._threads) < self.size:
                name = self._name if self.size == 1 else f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._news.notify()

    def cpu_seconds(self) -> float:
        """What the threads have used so far."""
        idents = [each.ident for each in self._threads if each.is_alive() and each.ident is not None]
        return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)

    def close(self) -> None:
        """Do what was submitted, to the end.  Safe to repeat."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

    # ---- in the threads --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._do_one():
            pass  # and nothing of a job is held while there is none

    def _do_one(self) -> bool:
        """False: there will be nothing more to do."""
        with self._news:
            while (task := self._next()) is None:
                if self._closed and not self._waiting:
                    return False
                self._news.wait()
        made, error = None, None
        try:
            made = task.job()
        except Exception as caught:  # a thread's outermost loop: a bug, raised in the agent's loop
            error = caught
        self._end(task, lambda: follow(self._hand_back, task.then, made, error))
        return True

    def _next(self) -> _Task | None:
        """The oldest that may begin now."""
        if self._alone:
            return None
        older = set(self._running)  # keys of what was asked before, and is not done
        for place, task in enumerate(self._waiting):
            if task.number >= self._handed + AHEAD * self.size:
                return None
            if task.key is None and older:
                return None
            if task.key not in older:
                del self._waiting[place]
                self._begin(task)
                return task
            older.add(task.key)
        return None

    def _begin(self, task: _Task) -> None:
        if task.key is None:
            self._alone = True
        else:
            self._running.add(task.key)

    def _end(self, task: _Task, hand_back: Callable[[], None]) -> None:
        with self._news:
            if task.key is None:
                self._alone = False
            else:
                self._running.discard(task.key)
            self._finished[task.number] = hand_back
            while (oldest := self._finished.pop(self._handed, None)) is not None:
                self._handed += 1
                oldest()
            self._news.notify_all()
