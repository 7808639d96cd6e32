"""A thread that works through jobs in order beside the agent's loop, and hands what they made back to that loop.

The agent has one for each thing that takes long, such as checkpoints and results on disk; its arithmetic has several
threads (pool.py).  What takes long would make a heartbeat late; in a thread it does not, because torch, blake3 and the
disk let go of the interpreter.  What belongs to one worker is touched by nobody else, and what was asked first happens
first.  Must not know what the jobs are about.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
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
