"""The coordinator's hold on its relay: starts it, listens to it, and starts it again when it dies or hangs.

Called by the server.  A run needs no relay to go on: whoever has another way is not touched by its death, and those
that it joined come again.  So nobody waits for it, and it is no error if it can't listen.  Must not know who is joined.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator

import msgspec

from farflung.coordinator.door.channel import pair
from farflung.coordinator.door.front_door_process import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    DIES_WITHIN_S,
    HANGS_AFTER_S,
    STARTS_WITHIN_S,
    WELL_AFTER_S,
    Handle,
    ServedInThread,
    Spawn,
    how_it_ended,
    started,
)
from farflung.coordinator.relay.relay import serve_pairs
from farflung.coordinator.relay.relay_words import (
    Begin,
    CannotListen,
    Counted,
    FromRelay,
    Listening,
    RelayChannel,
    Wanted,
    relay_channel,
)

MEMORY_BYTES = 256 << 20  # address space of the whole process
TRIES_AGAIN_S = 30.0  # where it could not listen


def in_process(end: socket.socket, memory_bytes: int) -> Handle:
    return started("farflung.coordinator.relay.relay", end, memory_bytes)


def in_thread(end: socket.socket, memory_bytes: int) -> Handle:
    """For tests: the same code, without a process and without the cap."""
    return ServedInThread(end, serve_pairs, "relay")


class RelayProcess:
    """`note(text)` tells people."""

    def __init__(self, begin: Begin, note: Callable[[str], None], spawn: Spawn = in_process) -> None:
        self._begin = begin
        self._note = note
        self._spawn = spawn
        self._handle: Handle | None = None
        self._wanted = Wanted(pairs=())
        self._told: Wanted | None = None  # what this one knows of them
        self._started_at = self._heard_at = self._again_at = 0.0
        self._pause_s = BACKOFF_S
        self._gone_at: float | None = None
        self.channel: RelayChannel | None = None
        self.port: int | None = None  # where it listens now
        self.why_not = "it has not begun to listen yet"
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return getattr(self._handle, "pid", None)

    @property
    def bytes_per_s(self) -> float:
        return self._begin.bytes_per_s

    def want(self, pairs: tuple[bytes, ...], clock_ahead_s: float = 0.0) -> None:
        """Who may meet there from now on.  `clock_ahead_s`: where tickets end by the clock of another machine."""
        self._wanted = Wanted(pairs=pairs, clock_ahead_s=clock_ahead_s)
        self._say_wanted()

    def close(self, why: str = "") -> None:
        self.port, self.why_not, self._told = None, why or self.why_not, None
        if self.channel is not None:
            self.channel.socket.close()
            self.channel = None
        if self._handle is not None:
            self._handle.kill()
            if isinstance(self._handle, subprocess.Popen):
                self._handle.wait()
            self._handle = None

    def receive(self, now: float) -> Iterator[Counted]:
        """What it counted; it is started again here, when that is due."""
        for word in self._words(now):
            match word:
                case Listening(port=port):
                    self.port, self.why_not = port, ""
                    # The same one when it is started again: it stands on people's tickets, and in firewalls.
                    self._begin = msgspec.structs.replace(self._begin, port=port)
                    self._say_wanted()
                    if self.starts > 1:
                        self._note(f"relay: open again on port {port}")
                case CannotListen(reason=reason):
                    self._note(
                        f"relay: {reason}; peers that nobody can dial reach only those who can be dialled"
                    )
                    self.close(reason)
                    self._again_at = now + TRIES_AGAIN_S
                case Counted():
                    yield word
                case _:
                    pass  # not its word to say
        if self._told != self._wanted:
            self._say_wanted()
        self._watch(now)

    def _words(self, now: float) -> Iterator[FromRelay | Begin | Wanted]:
        for word in self.channel.receive() if self.channel is not None else ():
            self._heard_at = now
            yield word

    def _say_wanted(self) -> None:
        if self.port is not None and self.channel is not None and self.channel.send(self._wanted):
            self._told = self._wanted

    def _watch(self, now: float) -> None:
        if self._handle is None:
            if now >= self._again_at:
                self._start(now)
            return
        code, hangs = self._handle.poll(), now - self._heard_at >= HANGS_AFTER_S
        if self.channel is not None and self.channel.closed and self._gone_at is None:
            self._gone_at = now
        gone = self._gone_at is not None and now - self._gone_at >= DIES_WITHIN_S
        if code is None and not hangs and not gone:
            return
        why = f"said nothing for {HANGS_AFTER_S:g} s" if hangs else how_it_ended(code)
        self.close(why)
        well = now - self._started_at >= WELL_AFTER_S
        self._pause_s = BACKOFF_S if well else min(BACKOFF_MAX_S, 2 * self._pause_s)
        self._again_at = now + self._pause_s
        self._note(f"relay: {why}; it is started again in {self._pause_s:.1f} s")

    def _start(self, now: float) -> None:
        ours, theirs = pair()
        with theirs:
            self._handle = self._spawn(theirs, MEMORY_BYTES)
        self.channel = relay_channel(ours)
        self.starts += 1
        self._started_at, self._heard_at, self._gone_at = now, now + STARTS_WITHIN_S, None
        self.channel.send(self._begin)
