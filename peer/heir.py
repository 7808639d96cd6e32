"""The agent's hand for a donor's optimizer state that is arriving: asks, writes a file, tells the trainer.

Owned by the agent.  Whom to ask and what to believe is decided in inheriting.py; the trainer waits meanwhile,
and checks what the file holds.  Must not know what an optimizer is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from farflung.collectives.errors import UserError
from farflung.collectives.frames import Frame, Kind, Spoiled
from farflung.collectives.verdicts import Verdict
from farflung.coordinator.signing import name_of
from farflung.peer import effects as do
from farflung.peer.capture import Submit, nothing
from farflung.peer.inheriting import Inheriting, Piece, Wanted
from farflung.peer.inner_file import InnerFile, hash_beside
from farflung.peer.local_messages import InnerHere, InnerTaken
from farflung.peer.log_lines import duration, si
from farflung.peer.machine import PeerMachine


class Heir:
    def __init__(self, submit: Submit, tell: Callable[[list[do.Effect]], None]) -> None:
        self._submit, self._tell = submit, tell
        self._limit_s = 0.0
        self._machine: PeerMachine | None = None
        self._folder: Path | None = None
        self._came: InnerFile | None = None
        self._piece_bytes = 0
        self._fetch: Inheriting | None = None
        self._file = -1
        self._began_at = 0.0
        self._problem = ""  # of writing
        self.waiting = False  # the trainer waits

    def begin(self, machine: PeerMachine, limit_s: float, folder: Path, piece_bytes: int) -> None:
        """`limit_s`: how long the trainer may wait for it at most; 0: it starts with a fresh optimizer."""
        self._machine, self._limit_s, self._folder, self._piece_bytes = machine, limit_s, folder, piece_bytes

    def on_new_trainer(self) -> bool:
        """True: it is to ask for a donor's state."""
        self._forget()
        return self._limit_s > 0

    # ---- in the agent's loop -------------------------------------------------------------------------------

    def on_wanted(self, most_bytes: int, now: float) -> None:
        """The trainer holds the run's state, and waits for this before it takes its first step."""
        machine = self._machine
        assert machine is not None and machine.part is not None and self._folder is not None
        self._forget()
        self.waiting, self._began_at = True, now
        try:
            self._came = InnerFile(self._folder, "inner.in", most_bytes)
            self._file = os.open(self._came.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except (UserError, OSError) as error:
            self._end(f"no room for it: {error}")
            return
        donors = machine.part.lanes[0].catch.donors_by_speed
        wanted = Wanted(machine.doorway.run_id, most_bytes, self._piece_bytes, now + self._limit_s)
        self._fetch = Inheriting(wanted, donors, now)
        self._go_on(now)

    def takes(self, sender: str, came: Frame | Spoiled, now: float) -> bool:
        """True: a donor's answer, or what claims to be one; it is counted here."""
        header = came.header
        if header is None:
            return False
        named = header.decision_no == int(Kind.WANT_INNER) and not header.round_no
        if header.kind != Kind.INNER and not (header.kind in (Kind.MISSING, Kind.LATER) and named):
            return False
        part, fetch = self._machine.part if self._machine is not None else None, self._fetch
        if isinstance(came, Spoiled):  # the data plane counted it
            if fetch is not None:
                fetch.on_spoiled(sender, now)
                self._go_on(now)
            return True
        if part is None:
            return True
        if fetch is None:
            part.counters.count(Verdict.STALE)
            return True
        verdict, piece = fetch.on_frame(sender, came, now)
        part.counters.count(verdict)
        if piece is not None and self._file >= 0:
            file = self._file
            self._submit(lambda: self._write(file, piece), nothing)
        self._go_on(now)
        return True

    def on_tick(self, now: float) -> None:
        if self._fetch is not None:
            self._go_on(now)

    def on_taken(self, taken: InnerTaken, now: float) -> None:
        """The trainer's word: its optimizer goes on from there, or begins anew."""
        fetch, self.waiting = self._fetch, False
        if taken.problem:
            self._tell([do.Note(f"starts with a fresh optimizer and small first steps: {taken.problem}")])
        elif fetch is not None and (said := fetch.description) is not None:
            size, took = si(said.size, "B"), duration(now - self._began_at)
            self._tell(
                [do.Note(f"goes on with the optimizer's state of {name_of(said.public)}: {size} in {took}")]
            )
        self._forget()

    def _go_on(self, now: float) -> None:
        fetch = self._fetch
        assert fetch is not None
        if self._file < 0:
            return  # it is being checked
        questions = fetch.ask(now)
        if questions:
            self._tell([*questions])
        if fetch.problem:
            self._end(fetch.problem)
        elif fetch.is_whole:
            self._check(fetch)

    def _check(self, fetch: Inheriting) -> None:
        file, self._file = self._file, -1
        came, said = self._came, fetch.description
        assert came is not None and said is not None

        def end(digest: object) -> None:
            os.close(file)
            if self._fetch is not fetch:
                return
            if self._problem:
                self._end(self._problem)
            elif digest != said.digest:
                self._end("its bytes are not what the donor signed")
            else:
                self._tell([do.Tell(InnerHere(path=str(came.path)))])

        hash_beside(self._submit, said.size, lambda at, most: os.pread(file, most, at), end)

    def _end(self, problem: str) -> None:
        self._tell([do.Tell(InnerHere(problem=problem))])
        self._drop_file()

    def _forget(self) -> None:
        self._fetch, self._problem, self.waiting = None, "", False
        self._drop_file()

    def _drop_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            self._submit(lambda: os.close(file), nothing)  # after what is still to be written
        if self._came is not None:
            self._came.remove()
            self._came = None

    def close(self) -> None:
        self._drop_file()

    # ---- in the arithmetic thread --------------------------------------------------------------------------

    def _write(self, file: int, piece: Piece) -> None:
        try:
            written = os.pwrite(file, piece.payload, piece.at)
        except OSError as error:
            self._problem = f"it can't be written: {error.strerror}"
            return
        if written < len(piece.payload):
            self._problem = "it can't be written: there is no room"
