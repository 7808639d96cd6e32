"""Trials of relays that members offer: do some bytes come through, both ways?  A shell, driven by relay_hand.py.

Each trial is two connections with the tickets of one pair that nobody else knows.  The relay lets them in only if its
member passed on what the coordinator ordered, so whoever names a relay of somebody else fails.  Nothing here waits: a
turn does what can be done.  What a relay does to bytes later is seen by those that meet there, and by the next trial.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from farflung.coordinator.relay.socks import CHOSEN, JOINED
from farflung.coordinator.roster.ways import Trial

TRIAL_S = 5.0  # for all of it
AT_ONCE = 8
CHALLENGE_BYTES = 4096
_GREETING = b"\x05\x01\x00"
_IN_PROGRESS = (BlockingIOError, InterruptedError)
_SOON = (errno.EINPROGRESS, errno.EAGAIN)


class _TrialFailed(Exception):
    """Its text says why nothing comes through."""


@dataclass
class _Side:
    """One connection: what it still has to say, and what it is to hear before its next step."""

    socket: socket.socket
    steps: list[tuple[bytes, bytes]]  # (said, then heard)
    to_say: bytes = b""
    heard: bytes = b""
    connected: bool = False

    def turn(self) -> bool:
        """True: it has heard all."""
        if not self.connected and not self._connects():
            return False
        while self.steps:
            if self.to_say:
                self.to_say = self.to_say[self.socket.send(self.to_say) :]
            _, awaited = self.steps[0]
            came = self.socket.recv(len(awaited) - len(self.heard))
            if not came:
                raise _TrialFailed("it hung up")
            self.heard += came
            if not awaited.startswith(self.heard):
                raise _TrialFailed(
                    "what came out is not what went in" if len(self.steps) == 1 else "it refused its ticket"
                )
            if len(self.heard) == len(awaited):
                self.steps.pop(0)
                self.heard = b""
                self.to_say = self.steps[0][0] if self.steps else b""
        return True

    def _connects(self) -> bool:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise _TrialFailed(os.strerror(error))
        try:
            self.socket.getpeername()
        except OSError:
            return False  # not yet
        self.connected, self.to_say = True, self.steps[0][0]
        return True


@dataclass
class _TrialRun:
    trial: Trial
    until: float
    sides: list[_Side] = field(default_factory=list)

    def begin(self) -> None:
        challenges = [secrets.token_bytes(CHALLENGE_BYTES) for _ in self.trial.tickets]
        for ticket, mine, theirs in zip(self.trial.tickets, challenges, reversed(challenges), strict=True):
            name = ticket.encode("ascii")
            ask = b"\x05\x01\x00\x03" + bytes((len(name),)) + name + b"\x00\x01"
            host = self.trial.host.strip("[]")
            side = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            side.setblocking(False)
            self.sides.append(_Side(side, [(_GREETING, CHOSEN), (ask, JOINED), (mine, theirs)]))
            error = side.connect_ex((host, self.trial.port))
            if error and error not in _SOON:
                raise _TrialFailed(os.strerror(error))

    def turn(self, now: float) -> bool:
        done = []
        for side in self.sides:
            try:
                done.append(side.turn())
            except _IN_PROGRESS:
                done.append(False)
            except OSError as error:
                raise _TrialFailed(error.strerror or "its connection broke") from None
        if not all(done) and now >= self.until:
            answered = any(side.connected for side in self.sides)
            raise _TrialFailed(
                f"no bytes came through within {TRIAL_S:g} s" if answered else "nobody answers there"
            )
        return all(done)

    def close(self) -> None:
        for side in self.sides:
            side.socket.close()


class Trials:
    def __init__(self) -> None:
        self._queue: list[Trial] = []
        self._open: list[_TrialRun] = []
        self._over: list[tuple[Trial, str]] = []

    def begin(self, trial: Trial, now: float) -> None:
        if len(self._open) >= AT_ONCE:
            self._queue.append(trial)  # each member has one at most
            return
        attempt = _TrialRun(trial, now + TRIAL_S)
        self._open.append(attempt)
        try:
            attempt.begin()
        except (_TrialFailed, OSError) as error:
            self._ends(attempt, str(error))

    def turn(self, now: float) -> Iterator[tuple[Trial, str]]:
        """Those that ended, each with why nothing came through; empty: all did."""
        for attempt in list(self._open):
            try:
                if attempt.turn(now):
                    self._ends(attempt, "")
            except _TrialFailed as error:
                self._ends(attempt, str(error))
        over, self._over = self._over, []
        yield from over
        while self._queue and len(self._open) < AT_ONCE:
            self.begin(self._queue.pop(0), now)

    def close(self) -> None:
        for attempt in self._open:
            attempt.close()
        self._open.clear()

    def _ends(self, attempt: _TrialRun, why_not: str) -> None:
        attempt.close()
        self._open.remove(attempt)
        trial = attempt.trial
        self._over.append((trial, f"port {trial.port} of its address: {why_not}" if why_not else ""))
