"""The life of a child process: begun with one word, heard, started again when it dies or hangs, and ended.

Of the front door, the gateways, the relay and a run's page.  The parent makes a `KeptChild`; the child's module has a
function `serve(end)` that calls `serve_parent`, and leaves the rest to `live`.  A child talks to strangers and may be
taken over: its parent reads a bounded number of its words at a time (channel.py), believes nothing but their shape, and
waits for none without a limit.  A child ends when its parent is gone.  Must not know what either says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from farflung.protocol.errors import UserError
from farflung.protocol.limits import CONTROL_FRAME_BYTES

# ---- channel -----------------------------------------------------------------------------------------------
# A channel of words between a process and a child of its.
#
# A child may talk to strangers, so its words are bounded and typed like anybody's (msgpack, nothing is
# executed). The channel never blocks: a word that does not fit is not said, and whoever waited for it asks
# again. Must not know the words: whoever opens a channel brings the decoder of those that the other side may
# say.

WORD_BYTES = CONTROL_FRAME_BYTES + 8192
WORDS_PER_TURN = 64

Said = TypeVar("Said")

_encoder = msgspec.msgpack.Encoder()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # a word must fit into it whole
        end.setblocking(False)
    return ends


def packed(word: object) -> bytes:
    return _encoder.encode(word)


class Channel(Generic[Said]):
    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Said]) -> None:
        self.socket = end
        self.closed = False  # by the other side
        self._decoder = decoder

    def send(self, word: object) -> bool:
        """False: the other side does not read, or is gone."""
        return self.send_raw(packed(word))

    def send_raw(self, raw: bytes) -> bool:
        try:
            self.socket.send(raw)
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            return False
        return True

    def receive(self, most: int = WORDS_PER_TURN) -> Iterator[Said]:
        """What has come so far, a bounded number; a word that is none ends the channel."""
        for _ in range(most):
            try:
                raw = self.socket.recv(WORD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:
                self.closed = True
                return
            try:
                yield self._decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.closed = True
                return

    def wait(self, most_s: float) -> None:
        """Until something has come, or the other side is gone.  By poll(2): descriptors may have any number."""
        looking = select.poll()
        looking.register(self.socket, select.POLLIN)
        looking.poll(round(1000 * most_s))


# ---- child -------------------------------------------------------------------------------------------------

STARTS_WITHIN_S = 30.0  # for people: after that they are told what it waits for
HANGS_AT_START_S = 120.0  # on a busy machine Python itself may take a minute to start
DIES_WITHIN_S = 1.0  # after it hung up
HANGS_AFTER_S = 10.0  # without a word
# Each time that it was ended for that, it gets twice as long: it may be the machine.
HANGS_AFTER_MOST_S = 160.0
STARTS_MOST = 8  # of those that never listened, before its parent gives up
BACKOFF_S, BACKOFF_MAX_S = 0.2, 30.0
WELL_AFTER_S = 60.0  # one that lived so long is started again at once
REASON_CHARS = 1000

log = logging.getLogger("farflung.coordinator")


class ChildWord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="word"):
    pass


class ChildSettings(ChildWord, frozen=True, kw_only=True, tag="begin"):
    """The first word to a child, with what each kind has to know."""

    port: int  # 0: any; then the one that it found, also when it is started again: others know it


class Listening(ChildWord, frozen=True, kw_only=True, tag="listening"):
    port: Annotated[int, Meta(ge=1, le=65535)]


class CannotListen(ChildWord, frozen=True, kw_only=True, tag="cannot_listen"):
    reason: Annotated[str, Meta(max_length=REASON_CHARS)]


Settings = TypeVar("Settings", bound=ChildSettings)


# ---- the parent ------------------------------------------------------------------------------------------


class Handle(Protocol):
    """Of a running child."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


Spawn = Callable[[str, socket.socket, int], Handle]


def started(
    module: str, end: socket.socket, memory_bytes: int, also: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """As it is meant: memory-capped, and nothing of it is in this process.  `also`: descriptors that it shares."""
    return subprocess.Popen(
        [sys.executable, "-m", module, str(end.fileno()), str(memory_bytes)],
        pass_fds=[end.fileno(), *also],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Each arena of the allocator takes address space as if it were memory.
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},
    )


class KeptChild(Generic[Settings, Said]):
    """`note(text)` tells people.  Whoever keeps one calls `receive` often."""

    name: str  # for people, as is `lost`: what becomes of the rest when it ends, with why in its place
    lost = "{}"
    module: str
    memory_bytes: int  # address space of the whole process
    heard: msgspec.msgpack.Decoder[Said]
    silent_most_s = HANGS_AFTER_S
    ends_within_s = 0.0  # once it is hung up on, before it is killed

    def __init__(self, begin: Settings, note: Callable[[str], None], spawn: Spawn = started) -> None:
        self.begin = begin
        self.channel: Channel[Said] | None = None
        self.generation = 0  # grows when `channel` is another one
        self.port: int | None = None  # where it listens now
        self.why_not = "it has not begun to listen yet"
        self.starts = 0
        self._note, self._spawn = note, spawn
        self._handle: Handle | None = None
        self._started_at = self._hangs_at = self._again_at = 0.0
        self._pause_s = BACKOFF_S
        self._patience_s = self.silent_most_s
        self._gone_at: float | None = None  # it hung up: how it died is known a moment later

    @property
    def pid(self) -> int | None:
        return getattr(self._handle, "pid", None)

    def open(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Returns when it listens; UserError if it can't, or if it was `stopped` before.

        One that dies before that, or takes too long, is started again as any other: a parent that was started again
        does not fail because of a machine that is busy for a minute.
        """
        self.start(time.monotonic())
        told_at = time.monotonic() + STARTS_WITHIN_S
        while self.port is None:
            now, why_not = time.monotonic(), ""
            for word in self.receive(now):
                if isinstance(word, CannotListen):
                    why_not = word.reason
            if stopped():
                why_not = f"asked to stop before the {self.name} was open"
            if self._handle is None and self.starts >= STARTS_MOST:
                told = f"the {self.name} did not start, {self.starts} times"
                why_not = why_not or f"{told}; its last words are above, or in the log"
            if why_not:
                self.close()
                raise UserError(why_not)
            if now >= told_at:
                told_at = now + STARTS_WITHIN_S
                self._note(f"{self.name}: not open yet: it starts slowly; is this machine very busy?")
            time.sleep(0.005)

    def start(self, now: float) -> None:
        ours, theirs = pair()
        with theirs:
            self._handle = self._spawn(self.module, theirs, self.memory_bytes)
        self.channel = Channel(ours, self.heard)
        self.generation += 1
        self.starts += 1
        self._started_at, self._hangs_at, self._gone_at = now, now + HANGS_AT_START_S, None
        self.channel.send(self.begin)

    def close(self, why: str = "") -> None:
        self.port, self.why_not = None, why or self.why_not
        if self.channel is not None:
            self.channel.socket.close()
            self.channel = None
            self.generation += 1
        if self._handle is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._handle.wait(self.ends_within_s)
            self._handle.kill()
            self._handle.wait()
            self._handle = None

    def send(self, word: ChildWord) -> bool:
        return self.channel is not None and self.channel.send(word)

    def receive(self, now: float) -> Iterator[Said]:
        """What it said; it is started again here, when that is due."""
        yield from self.hear(now)
        self.watch(now)

    def hear(self, now: float, most: int = WORDS_PER_TURN) -> Iterator[Said]:
        """What it says after its channel has ended, or after it could not listen, is not heard."""
        channel = self.channel if self._gone_at is None else None
        for word in channel.receive(most) if channel is not None else ():
            self._hangs_at = now + self._patience_s
            if isinstance(word, CannotListen):
                self.on_cannot_listen(word.reason, now)
                yield word
                return
            if not isinstance(word, Listening):
                yield word
            elif self.port is None:
                self.port = word.port
                self.begin = msgspec.structs.replace(self.begin, port=word.port)
                if self.starts > 1:
                    self._note(f"{self.name}: open again on port {word.port}")

    def on_cannot_listen(self, reason: str, now: float) -> None:
        """It ends by itself then."""
        self._end_channel(now)
        if self.starts > 1:
            log.warning("%s: %s", self.name, reason)

    def watch(self, now: float) -> bool:
        """True once when it has died or hangs: it was closed here, and is due to start again a moment later."""
        if self._handle is None:
            if now >= self._again_at:
                self.start(now)
            return False
        code, hangs = self._handle.poll(), now >= self._hangs_at
        if self.channel is not None and self.channel.closed:
            self._end_channel(now)
        gone = self._gone_at is not None and now - self._gone_at >= DIES_WITHIN_S
        if code is None and not hangs and not gone:
            return False
        why = self._how_it_ended(code, hangs)
        well = now - self._started_at >= WELL_AFTER_S
        if hangs:
            # One that starves is starved by its successor's start as well: not again so soon.
            self._patience_s = max(self.silent_most_s, min(HANGS_AFTER_MOST_S, 2 * self._patience_s))
        elif well:
            self._patience_s = self.silent_most_s
        self.close(why)
        self._pause_s = BACKOFF_S if well else min(BACKOFF_MAX_S, 2 * self._pause_s)
        self._again_at = now + self._pause_s
        self._note(f"{self.name}: {self.lost.format(why)}; it is started again in {self._pause_s:.1f} s")
        return True

    def _end_channel(self, now: float) -> None:
        """There is nothing to wait for on it."""
        if self.channel is not None and self._gone_at is None:
            self.channel.closed, self._gone_at = True, now
            self.generation += 1

    def _how_it_ended(self, code: int | None, hangs: bool) -> str:
        if hangs and self.port is None:
            return f"did not start in {HANGS_AT_START_S:g} s"
        if hangs:
            return f"said nothing for {self._patience_s:g} s"
        if code is not None and code < 0:
            return f"killed by {self.signal_name(-code)}"
        return "hung up" if code is None else f"ended with exit code {code}"

    def signal_name(self, number: int) -> str:
        """It chose the number, and most have a name."""
        names = {each.value: each.name for each in signal.Signals}
        return names.get(number, f"signal {number}")


# ---- the child -------------------------------------------------------------------------------------------


class Servant(Protocol):
    def run(self) -> None: ...


def serve_parent(
    channel: Channel[Any], settings: type[Settings], made: Callable[[Settings, Channel[Any]], Servant]
) -> None:
    """Until the parent hangs up.  The first word must be its settings; `made` says by UserError if they don't do."""
    while not channel.closed:
        for word in channel.receive(1):
            if isinstance(word, settings):
                try:
                    servant = made(word, channel)
                except UserError as error:
                    channel.send(CannotListen(reason=str(error)[:REASON_CHARS]))
                    return
                servant.run()
                return
        channel.wait(1.0)


def live(serve: Callable[[socket.socket], None], nice: int = 0) -> None:
    """`python -m MODULE DESCRIPTOR MEMORY_BYTES`, by the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then hangs up
    descriptor, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as end:
        end.setblocking(False)
        serve(end)
