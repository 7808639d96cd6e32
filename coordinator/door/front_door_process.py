"""The coordinator's hold on its front door: starts it, listens to it, and starts it again when it dies or hangs.

Called by the server.  Members have another socket, in the coordinator's own process: whatever becomes of the front
door, they are not touched.  Must not know what strangers say.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from farflung.coordinator.door.channel import pair
from farflung.coordinator.door.front_door import serve_strangers
from farflung.coordinator.door.front_door_words import (
    Begin,
    CannotListen,
    Counted,
    DoorChannel,
    FromDoor,
    LedFrom,
    Limits,
    Listening,
    ModelNow,
    ToDoor,
    door_channel,
)
from farflung.coordinator.door.hello_check import RunFacts
from farflung.coordinator.door.listener import ListenOn
from farflung.protocol.errors import UserError

STARTS_WITHIN_S = 30.0  # for people: after that they are told what it waits for
HANGS_AT_START_S = 120.0  # on a busy machine Python itself may take a minute to start
DIES_WITHIN_S = 1.0  # after it hung up
HANGS_AFTER_S = 10.0  # without a word
# Each time that it was ended for that, it gets twice as long: it may be the machine.
HANGS_AFTER_MOST_S = 160.0
STARTS_MOST = 8  # of those that never listened, before the coordinator gives up
BACKOFF_S, BACKOFF_MAX_S = 0.2, 30.0
WELL_AFTER_S = 60.0  # a door that lived so long is started again at once

log = logging.getLogger("farflung.coordinator")


class Handle(Protocol):
    """Of a running front door."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


Spawn = Callable[[socket.socket, int], Handle]


def in_process(end: socket.socket, memory_bytes: int) -> Handle:
    """As it is meant: memory-capped, and nothing of it is in this process."""
    return started("farflung.coordinator.door.front_door", end, memory_bytes)


def started(module: str, end: socket.socket, memory_bytes: int) -> subprocess.Popen[bytes]:
    """A process beside the coordinator that speaks over `end`; of the relay, too (coordinator/relay/)."""
    words = [sys.executable, "-m", module, str(end.fileno()), str(memory_bytes)]
    # Each arena of the allocator takes address space as if it were memory.
    env = os.environ | {"MALLOC_ARENA_MAX": "2"}
    return subprocess.Popen(words, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL, env=env)


class ServedInThread:
    """What such a process does, in a thread of this one."""

    def __init__(self, end: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
        self._end = end.dup()
        self._serve_end = serve
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def _serve(self) -> None:
        self._end.setblocking(False)
        with self._end:
            self._serve_end(self._end)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        self._thread.join(5.0)  # its channel was closed, and it ends by that


def in_thread(end: socket.socket, memory_bytes: int) -> Handle:
    """For tests that start many coordinators: the same code, without a process and without the cap."""
    return ServedInThread(end, serve_strangers, "front door")


def begin_of(facts: RunFacts, secret: bytes, listen: ListenOn, limits: Limits) -> Begin:
    return Begin(
        name=facts.name,
        run_id=facts.run_id,
        manifest=facts.manifest,
        secret=secret,
        host=listen.host,
        port=listen.port,
        limits=limits,
    )


class DoorProcess:
    """`note(text)` tells people."""

    def __init__(self, begin: Begin, note: Callable[[str], None], spawn: Spawn = in_process) -> None:
        self.asked_to_stop: Callable[[], bool] = lambda: False  # while it waits for the first one
        self._begin = begin
        self._note = note
        self._spawn = spawn
        self._handle: Handle | None = None
        self.channel: DoorChannel | None = None
        self.generation = 0  # grows when `channel` is another one
        self.starts = 0
        self.connections = 0
        self._started_at = self._heard_at = 0.0
        self._pause_s = BACKOFF_S
        self._patience_s = HANGS_AFTER_S
        self._again_at = 0.0
        self._listens = False
        self._gone_at: float | None = None  # it hung up: how it died is known a moment later

    @property
    def port(self) -> int:
        return self._begin.port

    @property
    def pid(self) -> int | None:
        return getattr(self._handle, "pid", None)

    def open(self) -> None:
        """Returns when strangers can come; UserError if it can't listen there.

        One that dies before that, or takes too long, is started again as any other: members of a coordinator that was
        started again are not kept out by a machine that is busy for a minute.
        """
        self._start(time.monotonic())
        told_at = time.monotonic() + STARTS_WITHIN_S
        while not self._listens:
            now = time.monotonic()
            for word in self._words(now):
                if isinstance(word, CannotListen):
                    self.close()
                    raise UserError(word.reason)
            if self._listens:
                return
            self._watch(now)
            if self.asked_to_stop():
                self.close()
                raise UserError("asked to stop before the front door was open")
            if self._handle is None and self.starts >= STARTS_MOST:
                self.close()
                raise UserError(
                    f"the front door did not start, {self.starts} times; its last words are above, or in the log"
                )
            if now >= told_at:
                told_at = now + STARTS_WITHIN_S
                self._note("front door: not open yet: it starts slowly; is this machine very busy?")
            threading.Event().wait(0.005)

    def close(self) -> None:
        if self.channel is not None:
            self.channel.socket.close()
            self.channel = None
            self.generation += 1
        if self._handle is not None:
            self._handle.kill()
            if isinstance(self._handle, subprocess.Popen):
                self._handle.wait()
            self._handle = None

    def stand_by(self, whereabouts: bytes) -> None:
        """Of who leads, from now on; also for a door that is started again."""
        if self._begin.stands_by != whereabouts:
            self._begin = msgspec.structs.replace(self._begin, stands_by=whereabouts)
            self.send(LedFrom(whereabouts=whereabouts))

    def send(self, word: ToDoor) -> bool:
        return self.channel is not None and self.channel.send(word)

    def receive(self, now: float) -> Iterator[FromDoor]:
        """What it said; it is started again here, when that is due."""
        yield from self._words(now)
        self._watch(now)

    def _words(self, now: float) -> Iterator[FromDoor]:
        for word in self.channel.receive() if self.channel is not None else ():
            self._heard_at = now
            match word:
                case Listening(port=port):
                    self._begin = msgspec.structs.replace(self._begin, port=port)
                    self._listens = True
                    if self.starts > 1:
                        self._note(f"front door: open again on port {port}")
                case Counted(connections=connections, notes=notes):
                    self.connections = connections
                    for note in notes:
                        self._note(note)
                    yield word
                case CannotListen(reason=reason):
                    if self.starts > 1:
                        log.warning("front door: %s", reason)
                    yield word
                case Begin() | LedFrom() | ModelNow():
                    pass  # not its word to say
                case _:
                    yield word  # type: ignore[misc]

    def _watch(self, now: float) -> None:
        if self._handle is None:
            if now >= self._again_at:
                self._start(now)
            return
        code = self._handle.poll()
        hangs = now - self._heard_at >= self._patience_s
        if self.channel is not None and self.channel.closed and self._gone_at is None:
            self._gone_at = now
            self.generation += 1  # there is nothing to wait for on this channel
        gone = self._gone_at is not None and now - self._gone_at >= DIES_WITHIN_S
        if code is None and not hangs and not gone:
            return
        why = how_it_ended(code)
        if hangs:
            why = (
                f"said nothing for {self._patience_s:g} s"
                if self._listens
                else f"did not start in {HANGS_AT_START_S:g} s"
            )
            # One that starves is starved by its successor's start as well: not again so soon.
            self._patience_s = min(HANGS_AFTER_MOST_S, 2 * self._patience_s)
        self.close()
        well = now - self._started_at >= WELL_AFTER_S
        if well and not hangs:
            self._patience_s = HANGS_AFTER_S
        self._pause_s = BACKOFF_S if well else min(BACKOFF_MAX_S, 2 * self._pause_s)
        self._again_at = now + self._pause_s
        told = f"front door: {why}; members are not affected; it is started again in {self._pause_s:.1f} s"
        self._note(told)

    def _start(self, now: float) -> None:
        ours, theirs = pair()
        with theirs:
            self._handle = self._spawn(theirs, self._begin.limits.memory_bytes)
        self.channel = door_channel(ours)
        self.generation += 1
        self.starts += 1
        self._started_at, self._listens = now, False
        self._heard_at = now + HANGS_AT_START_S - self._patience_s
        self._gone_at = None
        self.channel.send(self._begin)


def how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "hung up" if code is None else f"ended with exit code {code}"
