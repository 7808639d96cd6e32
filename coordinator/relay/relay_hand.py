"""The hand of the mode reach in the server: the coordinator's relay, and trials of those that members offer.

Made by the server (coordinator/modes/registry.py).  The relay begins when the run has: tickets are of one start of the
coordinator.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from farflung.coordinator.modes.registry import ServerHand
from farflung.coordinator.reach.reach import Reach, RelayPairs, TryRelay
from farflung.coordinator.relay.relay_words import FROM_RELAY, FromRelay, PairsCounted, RelaySettings, Wanted
from farflung.coordinator.relay.socks import CHOSEN, JOINED
from farflung.coordinator.roster.ways import RelayNow, Trial, Usage
from farflung.coordinator.run.effects import Effect, HandEffect
from farflung.protocol.caps import parse_relay
from farflung.protocol.errors import RelayCause
from farflung.protocol.process import own_files
from farflung.protocol.process.child import KeptChild, Spawn, started

# ---- trials ------------------------------------------------------------------------------------------------
# Trials of relays that members offer: do some bytes come through, both ways? A shell, driven by
# the hand below.
#
# Each trial is two connections with the tickets of one pair that nobody else knows. The relay lets them in
# only if its member passed on what the coordinator ordered, so whoever names a relay of somebody else fails.
# Nothing here waits: a turn does what can be done. What a relay does to bytes later is seen by those that
# meet there, and by the next trial.

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


# ---- relay process -----------------------------------------------------------------------------------------
# The relay as the run machine knows it: is there one just now, what did it pass, and is the month's share
# used up?
#
# Owned by the mode's hand, around the relay's process (relay.py); what a member offers is
# kept in the same way (console/offered_relay.py). A relay that dies is back within a second, and on the same
# port: the machine hears of it only if that lasts, so that no round is given up for a hiccup. Must not know
# who is joined.

FILE_NAME = "relay.json"
BACK_WITHIN_S = 15.0
SAVED_EVERY_S = 60.0
TRIES_AGAIN_S = 30.0  # where it could not listen

log = logging.getLogger("farflung.coordinator")


class RelayProcess(KeptChild[RelaySettings, FromRelay]):
    """A run needs no relay to go on: whoever has another way is not touched by its death, and those that it joined come
    again.  So nobody waits for it, and it is no error if it can't listen."""

    name = "relay"
    module = "farflung.coordinator.relay.relay"
    memory_bytes = 256 << 20
    heard = FROM_RELAY

    def __init__(self, begin: RelaySettings, note: Callable[[str], None], spawn: Spawn = started) -> None:
        super().__init__(begin, note, spawn)
        self._wanted = Wanted(pairs=())
        self._told: Wanted | None = None  # what this one knows of them

    @property
    def bytes_per_s(self) -> float:
        return self.begin.bytes_per_s

    def want(self, pairs: tuple[bytes, ...], clock_ahead_s: float = 0.0) -> None:
        """Who may meet there from now on.  `clock_ahead_s`: where tickets end by the clock of another machine."""
        self._wanted = Wanted(pairs=pairs, clock_ahead_s=clock_ahead_s)
        self._say_wanted()

    def close(self, why: str = "") -> None:
        self._told = None
        super().close(why)

    def receive(self, now: float) -> Iterator[PairsCounted]:
        for word in super().receive(now):
            if isinstance(word, PairsCounted):
                yield word
        if self._told != self._wanted:
            self._say_wanted()

    def on_cannot_listen(self, reason: str, now: float) -> None:
        self._note(f"relay: {reason}; peers that nobody can dial reach only those who can be dialled")
        self.close(reason)
        self._again_at = now + TRIES_AGAIN_S

    def _say_wanted(self) -> None:
        if self.port is not None and self.send(self._wanted):
            self._told = self._wanted


@dataclass
class Month:
    """What was passed in a calendar month, by the machine's clock; kept in a file, for restarts."""

    path: Path
    limit_bytes: int
    name: str = ""
    used_bytes: int = 0

    @classmethod
    def load(cls, path: Path, limit_bytes: int) -> Month:
        found = cls(path, limit_bytes)
        try:
            said = json.loads(path.read_bytes())
            found.name, found.used_bytes = str(said["month"]), max(0, int(said["bytes"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s: cannot be read (%s): the relay's month is counted from 0", path, error)
        return found

    def add(self, size: int, wall_s: float) -> None:
        name = time.strftime("%Y-%m", time.gmtime(wall_s))
        if name != self.name:
            self.name, self.used_bytes = name, 0
        self.used_bytes += size

    @property
    def is_over(self) -> bool:
        return self.used_bytes >= self.limit_bytes

    def save(self) -> None:
        told = json.dumps({"month": self.name, "bytes": self.used_bytes}) + "\n"
        try:
            own_files.replaced(self.path, told.encode("ascii"))
        except OSError as error:
            log.warning("%s: cannot be written: %s", self.path, error)


class KeptRelay:
    """A relay's process with what it may pass in a month: of a coordinator, or beside a member's agent."""

    def __init__(self, process: RelayProcess, month: Month, setting: str) -> None:
        """`setting`: by which people change the month's share."""
        self.process = process
        self._month = month
        self._setting = setting
        self.usage = Usage(month_limit_bytes=month.limit_bytes)
        self._last: RelayNow | None = None
        self._gone_at: float | None = None
        self._saved_at = float("-inf")

    def turn(self, now: float, wall_s: float) -> tuple[RelayNow | None, str]:
        """What it is just now, and where there is none, why."""
        usage, moved = self.usage, 0
        for said in self.process.receive(now):
            moved += said.moved_bytes
            usage.pairs, usage.waiting = said.pairs, said.waiting
            usage.refused += said.refused
        self._month.add(moved, wall_s)
        usage.moved_bytes += moved
        usage.month_bytes = self._month.used_bytes
        if now - self._saved_at >= SAVED_EVERY_S:
            self._saved_at = now
            self._month.save()
        return self._relay(now)

    @property
    def cause(self) -> RelayCause:
        """Why there is none: all that others hear of it."""
        return RelayCause.MONTH_OVER if self._month.is_over else RelayCause.NOT_OPEN

    def _relay(self, now: float) -> tuple[RelayNow | None, str]:
        process, month = self.process, self._month
        if month.is_over:
            return None, f"it passed its {month.limit_bytes / 1e9:g} GB of {month.name} ({self._setting})"
        if process.port is not None:
            self._last, self._gone_at = RelayNow(process.port, process.bytes_per_s), None
            return self._last, ""
        self._gone_at = now if self._gone_at is None else self._gone_at
        if now - self._gone_at >= BACK_WITHIN_S:
            self._last = None
        return self._last, "" if self._last is not None else process.why_not

    def close(self) -> None:
        self._month.save()
        self.process.close()


# ---- relay hand --------------------------------------------------------------------------------------------


class RelayHand(ServerHand):
    def __init__(self, mode: Reach, folder: Path) -> None:
        self._mode = mode
        self._folder = folder
        self._trials = Trials()
        self._relay: KeptRelay | None = None

    def begin(self, public: bytes, host: str, port: int) -> None:
        core = self._mode.core
        limits = parse_relay(core.manifest.net.relay)
        if limits is None:
            self._mode.routes.why_no_relay = 'the host wants none ([net] relay = "off")'
            return
        begin = RelaySettings(
            run_id=core.run_id,
            incarnation=core.ledger.incarnation,
            public=public,
            host=host,
            port=port,
            bytes_per_s=limits.bytes_per_s,
        )
        month = Month.load(self._folder / FILE_NAME, limits.month_bytes)
        self.keep(RelayProcess(begin, core.note), month)

    def keep(self, process: RelayProcess, month: Month) -> None:
        self._relay = KeptRelay(process, month, "[net] relay")

    def turn(self, now: float, wall_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for trial, why_not in self._trials.turn(now):
            effects += self._mode.on_relay_tried(trial, why_not, now)
        if self._relay is not None:
            relay, why_not = self._relay.turn(now, wall_s)
            effects += self._mode.on_relay(relay, why_not, self._relay.usage, now)
        return effects

    def act(self, effect: HandEffect, now: float) -> None:
        match effect:
            case RelayPairs(pairs=pairs):
                if self._relay is not None:
                    self._relay.process.want(pairs)
            case TryRelay(trial=trial):
                self._trials.begin(trial, now)

    def close(self) -> None:
        self._trials.close()
        if self._relay is not None:
            self._relay.close()


hand = RelayHand
