"""What the agent writes into its event log: the phases of every round, and what they cost.

Called by the agent with the coordinator's words, with finished arithmetic and after each batch of frames.  It
looks and never touches; with the log off every call returns at once.

    start        pid                                     moved     round, epoch: ownership changed
    plan         round, fragment, version,               decided   round, weights
                 members, owned (chunks of each), use
    encoded      round: the hash list is on its way      committed round, version
    progress     round, held, got: in twentieths         rolled    version, fragment: every result is applied
    held         round: all contributions that I own     sealed    version, fragment, digest
    results      round: every result is here             end       use, peak_rss_bytes
    piece        chunk, version: of the run's state, fetched from a peer and found to be good
    beat         up, down: bytes per second that the line was measured to carry, 0 where that is not known
    tick         seconds: from a beat to its answer      apart     the coordinator was lost, or lost us

`use` is what this process has used so far: bytes sent and received by the data plane, and CPU seconds of the
loop, of the arithmetic and of the whole process (what is left is mostly libzmq's, which encrypts).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from farflung.collectives.round import MemberRound
from farflung.coordinator.messages import Aborted, Beat, Committed, Decided, OpenRound
from farflung.peer.events import EventLog

STEPS = 20  # of a phase: as fine as progress is told

Use = dict[str, float]


@dataclass
class Seen:
    """What was written of one round's progress."""

    at: tuple[int, int] = (0, 0)  # steps of what is held, and of results
    complete: tuple[bool, bool] = (False, False)
    encoded: bool = False


class RoundEvents:
    def __init__(self, log: EventLog, use: Callable[[], Use]) -> None:
        self._log = log
        self._use = use
        self._told: tuple[int, int] = (0, 0)  # (round, epoch) of the plan that was written last
        self._decided: tuple[int, int] = (0, 0)
        self._seen: dict[int, Seen] = {}  # by round
        log.write("start", pid=os.getpid())

    def on_said(self, message: object) -> None:
        """What this peer says to the coordinator."""
        if self._log.is_on and isinstance(message, Beat):
            self._log.write("beat", up=message.up_bytes_per_s, down=message.down_bytes_per_s)

    def on_piece(self, chunk: int, version: int) -> None:
        self._log.write("piece", chunk=chunk, version=version)

    def on_apart(self) -> None:
        self._log.write("apart")

    def on_answer(self, took_s: float) -> None:
        self._log.write("tick", seconds=took_s)

    def on_control(self, message: object) -> None:
        """The coordinator repeats what it thinks is not known: only what is new is written."""
        if not self._log.is_on:
            return
        match message:
            case OpenRound(plan=plan) if (plan.round_no, plan.epoch) > self._told:
                new = plan.round_no > self._told[0]
                self._told = (plan.round_no, plan.epoch)
                if new:
                    body = {"version": plan.version, "members": plan.members, "fragment": plan.fragment}
                    body["owned"] = [plan.owners.count(index) for index in range(len(plan.members))]
                    self._log.write("plan", round=plan.round_no, **body, use=self._use())
                else:
                    self._log.write("moved", round=plan.round_no, epoch=plan.epoch)
            case Decided(decision=made) if (made.round_no, made.decision_no) > self._decided:
                self._decided = (made.round_no, made.decision_no)
                self._log.write("decided", round=made.round_no, weights=made.weights)
            case Committed(commit=commit):
                self._log.write("committed", round=commit.round_no, version=commit.version)
            case Aborted(round_no=round_no, reason=reason):
                self._log.write("aborted", round=round_no, reason=reason)

    def on_progress(self, flights: Iterable[MemberRound | None]) -> None:
        """After frames: how much of each round is here.  Asked often, so it only counts."""
        if not self._log.is_on:
            return
        on = {flight.plan.round_no: flight for flight in flights if flight is not None}
        self._seen = {number: self._seen.get(number, Seen()) for number in on}
        for number, flight in on.items():
            self._look(number, flight, self._seen[number])

    def _look(self, number: int, flight: MemberRound, seen: Seen) -> None:
        if flight.encoded and not seen.encoded:
            seen.encoded = True
            self._log.write("encoded", round=number)
        held, due, got, chunks = flight.counts
        at = (STEPS * held // max(1, due), STEPS * got // max(1, chunks))
        if at == seen.at:
            return
        seen.at = at
        self._log.write("progress", round=number, held=held / max(1, due), got=got / max(1, chunks))
        complete = flight.complete
        for event, now, before in zip(("held", "results"), complete, seen.complete, strict=True):
            if now and not before:
                self._log.write(event, round=number)
        seen.complete = complete

    def sealing(self, version: int, fragment: int, seal: Callable[[], bytes]) -> bytes:
        """Around the hashing: it is the first job after the last result was applied."""
        self._log.write("rolled", version=version, fragment=fragment)
        digest = seal()
        self._log.write("sealed", version=version, fragment=fragment, digest=digest.hex())
        return digest

    def close(self) -> None:
        if self._log.is_on:
            self._log.write("end", use=self._use(), peak_rss_bytes=_peak_rss_bytes())
        self._log.close()


def cpu_seconds_of(thread_ident: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread_ident))


def _peak_rss_bytes() -> int:
    """Of this program alone: what getrusage tells may still be its parent's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux always tells VmHWM")
