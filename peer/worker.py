"""The agent's arithmetic: one thread that works through effects in order, and tells when each is finished.

Owned by the agent.  Encoding, merging, rolling and hashing take long enough to make a heartbeat late; here they
run beside the agent's loop (torch and blake3 let go of the interpreter).  One thread and one queue: the outer
state is touched by nobody else, and what was asked first happens first.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

Job = Callable[[], object]
Finished = Callable[[], None]


class Arithmetic:
    """`wake` becomes readable when something is finished."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Callable[[object], None]] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Callable[[object], None], object, BaseException | None]]
        self._finished = queue.SimpleQueue()
        self.wake, self._bell = socket.socketpair()
        self.wake.setblocking(False)
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._work, name="arithmetic", daemon=True)
        self._thread.start()

    def submit(self, job: Job, then: Callable[[object], None]) -> None:
        """Run `job` in the thread; `then(result)` is called by `collect`, in the agent's loop."""
        self._jobs.put((job, then))

    def collect(self) -> None:
        """Call what is to follow each finished job.  An error in a job is a bug and is raised here."""
        for then, result, error in self._drain():
            if error is not None:
                raise error
            then(result)

    def _drain(self) -> Iterator[tuple[Callable[[object], None], object, BaseException | None]]:
        try:
            while self.wake.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                yield self._finished.get_nowait()
            except queue.Empty:
                return

    def cpu_seconds(self) -> float:
        """What the thread has used so far."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self.wake.close()
        self._bell.close()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, then = item
            result, error = None, None
            try:
                result = job()
            except Exception as caught:  # the thread's outermost loop
                error = caught  # carried over to the agent's loop, where it ends the agent
            self._finished.put((then, result, error))
            try:
                self._bell.send(b"!")
            except BlockingIOError:
                pass  # the bell is ringing already
