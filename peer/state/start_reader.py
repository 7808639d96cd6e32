"""The agent's hand for a run that begins with a checkpoint or a file: a thread of its own reads it into the state.

Owned by the agent, which is told by the peer machine when to begin.  Values are checked as they come (warm_start.py),
and nothing of them counts before the machine hears that all are there.  Must not know who founds the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from farflung.checkpoints.warm_start import Cells, beginning
from farflung.peer.machine import effects as do
from farflung.peer.state.outer_state import OuterState
from farflung.peer.worker import Submit, Worker, nothing
from farflung.protocol.errors import FarflungError, StoreError
from farflung.protocol.run_terms import Attached

READ_AHEAD = 8  # pieces that were read and are not in the state yet, each of at most 8 MiB or a chunk


class Beginner(Protocol):
    """The peer machine, as this hand sees it."""

    def on_begun(self, problem: str, is_final: bool, now: float) -> list[do.Effect]: ...


class StartJobs:
    """`submit` runs a job in the arithmetic; `tell` carries out effects of the machine, in the agent's loop."""

    def __init__(
        self, attached: Attached, machine: Beginner, submit: Submit, tell: Callable[[list[do.Effect]], None]
    ) -> None:
        self._attached, self._machine, self._submit, self._tell = attached, machine, submit, tell
        self._worker = Worker("beginning", submit)

    def begin(self, effect: do.BeginFrom, state: OuterState, now: Callable[[], float]) -> None:
        self._worker.submit(lambda: self._read(effect, state, now))

    def close(self) -> None:
        """Before the arithmetic ends.  A place that does not answer is given up: the thread is a daemon."""
        self._worker.close(0.0)

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _read(self, effect: do.BeginFrom, state: OuterState, now: Callable[[], float]) -> None:
        problem, is_final = "", False
        try:
            self._submit(state.clear, nothing)
            room = threading.Semaphore(READ_AHEAD)
            begun = beginning(effect.start, self._attached.model, self._attached.held, effect.as_nobody)
            for cells in begun:
                while not room.acquire(timeout=0.2):
                    if self._worker.given_up.is_set():
                        return
                if self._worker.given_up.is_set():
                    return
                self._put(cells, state, room)
        except StoreError as error:
            problem = str(error)
        except FarflungError as error:
            problem, is_final = str(error), True
        self._worker.later(lambda: self._tell(self._machine.on_begun(problem, is_final, now())))

    def _put(self, cells: Cells, state: OuterState, room: threading.Semaphore) -> None:
        def job() -> None:
            state.place(cells.part, cells.at, cells.values)
            room.release()

        self._submit(job, nothing)
