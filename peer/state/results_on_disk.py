"""The agent's hand for results on disk: a thread of its own that writes them, reads them, and finds those of before.

Owned by the agent, which tells it of every result that is applied, and hands it the machine's questions for one.
A disk that fails, or does not keep up, is told once, and the log goes on in memory.  Must not know who catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from farflung.checkpoints.kept_results import KeptResults
from farflung.collectives.round.effects import Roll, SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.machine import PeerMachine
from farflung.peer.state.arrived_pieces import left_behind
from farflung.peer.worker import Job, Submit, Worker
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, Header, Kind, Payload, bare_answer, with_payload

BEHIND_BYTES = 256 << 20  # so much may wait to be written, or one version if that is more
CLOSE_S = 5.0


class KeepingResults:
    """`tell` carries out effects, in the agent's loop."""

    def __init__(self, folder: Path, submit: Submit, tell: Callable[[list[do.Effect]], None]) -> None:
        self._folder, self._tell = folder, tell
        self._worker = Worker("results", submit)
        self._machine: PeerMachine | None = None
        self._kept: KeptResults | None = None  # the thread's own

    # ---- in the agent's loop -----------------------------------------------------------------------------

    def begin(self, machine: PeerMachine, model_hash: bytes, payload_bytes: int) -> None:
        """Once, when the model is known, if results are to be kept on disk."""
        if not machine.log.on_disk:
            return
        self._machine = machine
        assert machine.manifest is not None
        what = machine.doorway.run_id + machine.manifest.digest + model_hash
        path = self._folder / f"{machine.doorway.run_id.hex()}-{machine.me.peer}.results"
        keep, limit = machine.manifest.round.keep_results, machine.log.limit_bytes
        self._do(lambda: self._open(path, what, keep, limit, payload_bytes))

    def rolled(self, effect: Roll) -> None:
        machine = self._machine
        if machine is None or not machine.log.on_disk or machine.part is None:
            return
        lane, size = machine.part.lane_of_chunk(effect.chunk), len(effect.payload)
        assert lane is not None
        if self._worker.waiting_bytes > max(BEHIND_BYTES, machine.log.bytes):
            self._give_up("the disk does not keep up")
            return
        key = (machine.reports.era, lane.fragment.number, effect.version)
        self._do(lambda: self._put(key, effect), size)

    def serve(self, effect: do.ServeLogged) -> None:
        machine = self._machine
        assert machine is not None
        era, tag = machine.reports.era, machine.doorway.run_id[:8]

        def look() -> None:
            kept, place = self._kept, (era, effect.fragment, effect.version, effect.chunk)
            payload = kept.get(*place) if kept is not None else None
            frame = logged_answer(effect, payload, tag)
            self._worker.later(lambda: self._answer(effect.to, frame))

        self._do(look)

    def close(self, finished: bool) -> None:
        """What is kept stays for the next time, unless the run is over."""
        if self._machine is not None:
            self._do(lambda: self._close(finished))
        self._worker.close(CLOSE_S)  # a disk that hangs is given up

    def _do(self, job: Job, size_bytes: int = 0) -> None:
        self._worker.submit(lambda: self._tried(job), size_bytes=size_bytes)

    def _answer(self, to: str, frame: Frame) -> None:
        machine = self._machine
        assert machine is not None
        if to == machine.me.peer:
            self._tell(machine.on_frame(to, frame, time.monotonic()))
        else:
            self._tell([SendFrame(to, frame)])

    def _give_up(self, why: str) -> None:
        assert self._machine is not None
        if self._machine.log.on_disk:
            self._machine.log.on_disk = False
            told = f"results of past rounds are kept in memory, not on disk any more: {why}"
            self._tell([do.Note(told)])

    # ---- in the thread -----------------------------------------------------------------------------------

    def _tried(self, job: Job) -> None:
        try:
            job()
        except (StoreError, OSError) as error:
            self._worker.later(partial(self._give_up, str(error)))

    def _open(self, path: Path, what: bytes, keep: int, limit: int, payload_bytes: int) -> None:
        for other in left_behind(path):
            _clear(other)
        self._kept = kept = KeptResults(path, what, keep, limit, payload_bytes)
        found = kept.found()
        machine = self._machine
        assert machine is not None
        self._worker.later(lambda: machine.log.found.update(found))

    def _put(self, key: tuple[int, int, int], effect: Roll) -> None:
        if self._kept is not None:
            self._kept.put(*key, effect.chunk, effect.payload)

    def _close(self, finished: bool) -> None:
        if self._kept is not None and finished:
            self._kept.remove()
        elif self._kept is not None:
            self._kept.close()


def logged_answer(effect: do.ServeLogged, payload: Payload | None, run_tag: bytes) -> Frame:
    """To whom asks for a result of the past.  None: it is not kept any more."""
    asked = Header(Kind.WANT_LOGGED, run_tag, version=effect.version, chunk=effect.chunk)
    if payload is None:
        return bare_answer(Kind.MISSING, asked)
    return with_payload(replace(asked, kind=Kind.LOGGED), payload)


def _clear(folder: Path) -> None:
    """Left behind by a peer that never came back."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()
