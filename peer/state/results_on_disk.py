"""The agent's hand for results on disk: a thread of its own that writes them, reads them, and finds those of before.

Owned by the agent, which tells it of every result that is applied, and hands it the machine's questions for one.
A disk that fails, or does not keep up, is told once, and the log goes on in memory.  Must not know who catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from farflung.checkpoints.kept_results import KeptResults
from farflung.collectives.round.effects import Roll, SendFrame
from farflung.peer.machine import effects as do
from farflung.peer.machine.disk_words import ResultsFound, ResultsLost
from farflung.peer.state.arrived_pieces import left_behind, name_on_disk
from farflung.peer.worker import Job, Submit, Worker
from farflung.protocol.errors import StoreError
from farflung.protocol.frames import Frame, Header, Kind, Payload, bare_answer, with_payload
from farflung.protocol.run_terms import Attached

BEHIND_BYTES = 256 << 20  # so much may wait to be written, or one version if that is more
CLOSE_S = 5.0


class Asker(Protocol):
    """The peer machine, as this hand sees it."""

    def on_disk(self, word: ResultsFound | ResultsLost, now: float) -> list[do.Effect]: ...

    def on_frame(self, sender: str, frame: Frame, now: float) -> list[do.Effect]: ...


@dataclass(frozen=True)
class DiskPlace:
    """Where results are kept, and how many."""

    folder: Path
    peer: str
    limit_bytes: int
    payload_bytes: int  # of one result, at most


class KeepingResults:
    """`tell` carries out effects, in the agent's loop.  Built when the model is known, if results are kept on disk."""

    def __init__(
        self,
        place: DiskPlace,
        attached: Attached,
        submit: Submit,
        machine: Asker,
        tell: Callable[[list[do.Effect]], None],
    ) -> None:
        self._attached, self._me, self._machine, self._tell = attached, place.peer, machine, tell
        self._worker = Worker("results", submit)
        self._given_up = False
        self._kept: KeptResults | None = None  # the thread's own
        self._do(lambda: self._open(place))

    # ---- in the agent's loop -----------------------------------------------------------------------------

    def rolled(self, effect: Roll, era: int, logged_bytes: int) -> None:
        """`logged_bytes`: what the log in memory holds."""
        if self._given_up:
            return
        fragment, size = self._attached.fragment_of(effect.chunk).number, len(effect.payload)
        if self._worker.waiting_bytes > max(BEHIND_BYTES, logged_bytes):
            self._give_up("the disk does not keep up")
            return
        self._do(lambda: self._put((era, fragment, effect.version), effect), size)

    def serve(self, effect: do.ServeLogged, era: int) -> None:
        tag = self._attached.known.tag

        def look() -> None:
            kept, place = self._kept, (era, effect.fragment, effect.version, effect.chunk)
            payload = kept.get(*place) if kept is not None else None
            frame = logged_answer(effect, payload, tag)
            self._worker.later(lambda: self._answer(effect.to, frame))

        self._do(look)

    def close(self, finished: bool) -> None:
        """What is kept stays for the next time, unless the run is over."""
        self._do(lambda: self._close(finished))
        self._worker.close(CLOSE_S)  # a disk that hangs is given up

    def _do(self, job: Job, size_bytes: int = 0) -> None:
        self._worker.submit(lambda: self._tried(job), size_bytes=size_bytes)

    def _answer(self, to: str, frame: Frame) -> None:
        mine = to == self._me
        self._tell(self._machine.on_frame(to, frame, time.monotonic()) if mine else [SendFrame(to, frame)])

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._tell(self._machine.on_disk(ResultsLost(why), time.monotonic()))

    # ---- in the thread -----------------------------------------------------------------------------------

    def _tried(self, job: Job) -> None:
        try:
            job()
        except (StoreError, OSError) as error:
            self._worker.later(partial(self._give_up, str(error)))

    def _open(self, place: DiskPlace) -> None:
        known = self._attached.known
        path = place.folder / f"{name_on_disk(self._attached, place.peer)}.results"
        for other in left_behind(path):
            _clear(other)
        keep = known.manifest.round.keep_results
        self._kept = KeptResults(path, self._attached.name, keep, place.limit_bytes, place.payload_bytes)
        found = ResultsFound(self._kept.found())
        self._worker.later(lambda: self._tell(self._machine.on_disk(found, time.monotonic())))

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
