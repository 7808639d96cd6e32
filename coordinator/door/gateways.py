"""The coordinator's hold on its gateways: starts them, listens to them, and starts again the one that dies or hangs.

Called by the server.  A member whose gateway dies keeps its session: it dials again, the same port or, if that stays
silent, the door, which names another one.  Nothing is lost by it that the next beat does not bring, and its death is no
sign that a member has gone.  Must not know members: a route names a connection, and begins with its gateway's number.
"""

from __future__ import annotations

import logging
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from farflung.coordinator.door.channel import packed, pair
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
from farflung.coordinator.door.gateway import serve_members
from farflung.coordinator.door.gateway_words import (
    KEYS_AT_ONCE,
    LOT_BYTES,
    LOT_FRAMES,
    Begin,
    CannotListen,
    Counted,
    FromGateway,
    GatewayChannel,
    Let,
    Listening,
    Say,
    Shut,
    ToGateway,
    gateway_channel,
)

WORDS_PER_TURN = 4  # of one gateway: the others, the door and the clock wait for no more
# Of answers that a gateway has not taken; the next beats make good what is dropped.
WAITING_BYTES_MOST = 32 << 20

log = logging.getLogger("farflung.coordinator")


def in_process(end: socket.socket, memory_bytes: int) -> Handle:
    return started("farflung.coordinator.door.gateway", end, memory_bytes)


def in_thread(end: socket.socket, memory_bytes: int) -> Handle:
    """For tests: the same code, without a process and without the cap."""
    return ServedInThread(end, serve_members, "gateway")


class GatewayProcess:
    """One of them.  `number`: from 1, the first byte of its routes; libzmq's own begin with 0."""

    def __init__(self, number: int, begin: Begin, note: Callable[[str], None], spawn: Spawn) -> None:
        self.number = number
        self._begin, self._note, self._spawn = begin, note, spawn
        self._handle: Handle | None = None
        self.channel: GatewayChannel | None = None
        self.generation = 0  # grows when `channel` is another one
        self.port: int | None = None  # where it listens now
        self.starts = self.connections = 0
        self._lot: list[tuple[bytes, bytes]] = []
        self._lot_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._started_at = self._heard_at = self._again_at = 0.0
        self._pause_s = BACKOFF_S
        self._gone_at: float | None = None

    @property
    def pid(self) -> int | None:
        return getattr(self._handle, "pid", None)

    def start(self, now: float, keys: list[bytes]) -> None:
        ours, theirs = pair()
        with theirs:
            self._handle = self._spawn(theirs, self._begin.memory_bytes)
        self.channel = gateway_channel(ours)
        self.generation += 1
        self.starts += 1
        self._started_at, self._heard_at, self._gone_at = now, now + STARTS_WITHIN_S, None
        self.tell(self._begin)
        for at in range(0, len(keys), KEYS_AT_ONCE):
            self.tell(Let(keys=tuple(keys[at : at + KEYS_AT_ONCE])))

    def close(self) -> None:
        self.port, self._lot, self._lot_bytes, self._waiting_bytes = None, [], 0, 0
        self._waiting.clear()
        if self.channel is not None:
            self.channel.socket.close()
            self.channel = None
            self.generation += 1
        if self._handle is not None:
            self._handle.kill()
            if isinstance(self._handle, subprocess.Popen):
                self._handle.wait()
            self._handle = None

    # ---- to it -------------------------------------------------------------------------------------------

    def say(self, route: bytes, raw: bytes) -> bool:
        """With the lot that leaves at the end of this turn."""
        if self.port is None or self._waiting_bytes + self._lot_bytes > WAITING_BYTES_MOST:
            return False
        if self._lot and (len(self._lot) >= LOT_FRAMES or self._lot_bytes + len(raw) > LOT_BYTES):
            self._send_lot()
        self._lot.append((route, raw))
        self._lot_bytes += len(raw)
        return True

    def tell(self, word: ToGateway) -> None:
        """After all that was said before: who is shut out may still read its last word."""
        self._send_lot()
        self._queue(packed(word))
        self.flush()

    def flush(self) -> None:
        self._send_lot()
        while self._waiting and self.channel is not None and self.channel.send_raw(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())

    def _send_lot(self) -> None:
        if self._lot:
            self._queue(packed(Say(lot=tuple(self._lot))))
            self._lot, self._lot_bytes = [], 0

    def _queue(self, raw: bytes) -> None:
        self._waiting.append(raw)
        self._waiting_bytes += len(raw)

    # ---- from it -----------------------------------------------------------------------------------------

    def receive(self, now: float) -> Iterator[FromGateway]:
        for word in self.channel.receive(WORDS_PER_TURN) if self.channel is not None else ():
            self._heard_at = now
            match word:
                case Listening(port=port):
                    self.port = port
                    # The same one when it is started again: members dial it, and firewalls let it through.
                    self._begin = msgspec.structs.replace(self._begin, port=port)
                    if self.starts > 1:
                        self._note(f"gateway {self.number}: open again on port {port}")
                case CannotListen(reason=reason):
                    log.warning("gateway %d: %s", self.number, reason)
                    yield word
                case Counted(connections=connections):
                    self.connections = connections
                    yield word
                case Begin() | Let() | Shut() | Say():
                    pass  # not its word to say
                case _:
                    yield word

    def is_over(self, now: float) -> bool:
        """True once, when it has died or hangs: it was closed here, and is due to start again a moment later."""
        if self._handle is None:
            return False
        code, hangs = self._handle.poll(), now - self._heard_at >= HANGS_AFTER_S
        if self.channel is not None and self.channel.closed and self._gone_at is None:
            self._gone_at = now
            self.generation += 1  # there is nothing to wait for on this channel
        gone = self._gone_at is not None and now - self._gone_at >= DIES_WITHIN_S
        if code is None and not hangs and not gone:
            return False
        why = f"said nothing for {HANGS_AFTER_S:g} s" if hangs else how_it_ended(code)
        self.close()
        well = now - self._started_at >= WELL_AFTER_S
        self._pause_s = BACKOFF_S if well else min(BACKOFF_MAX_S, 2 * self._pause_s)
        self._again_at = now + self._pause_s
        told = "its members dial again, and keep what they have"
        self._note(f"gateway {self.number}: {why}; {told}; it is started again in {self._pause_s:.1f} s")
        return True

    def is_due(self, now: float) -> bool:
        return self._handle is None and now >= self._again_at


class Gateways:
    """All of them.  Without any everything here does nothing."""

    def __init__(self, begins: list[Begin], note: Callable[[str], None], spawn: Spawn = in_process) -> None:
        self._all = {
            number: GatewayProcess(number, begin, note, spawn) for number, begin in enumerate(begins, 1)
        }

    def __iter__(self) -> Iterator[GatewayProcess]:
        return iter(self._all.values())

    @property
    def ports(self) -> tuple[int, ...]:
        """Of those that listen."""
        return tuple(each.port for each in self if each.port is not None)

    @property
    def generation(self) -> int:
        """Grows when somebody's channel is another one."""
        return sum(each.generation for each in self)

    def channels(self) -> Iterator[socket.socket]:
        for each in self:
            if each.channel is not None and not each.channel.closed:
                yield each.channel.socket

    def watch(self, now: float, keys: Callable[[], list[bytes]]) -> set[int]:
        """The numbers of those that have just died.  `keys`: who may come in, for those that are started now."""
        over = {each.number for each in self if each.is_over(now)}
        for each in self:
            if each.is_due(now):
                each.start(now, keys())
        return over

    def receive(self, now: float) -> Iterator[tuple[GatewayProcess, FromGateway]]:
        for each in self:
            for word in each.receive(now):
                yield each, word

    def send(self, route: bytes, raw: bytes) -> bool:
        gateway = self._all.get(route[0])
        return gateway is not None and gateway.say(route[1:], raw)

    def let(self, key: bytes) -> None:
        for each in self:
            if each.channel is not None:
                each.tell(Let(keys=(key,)))

    def shut(self, key: bytes, cut: bool) -> None:
        for each in self:
            if each.channel is not None:
                each.tell(Shut(key=key, cut=cut))

    def flush(self) -> None:
        for each in self:
            each.flush()

    def close(self) -> None:
        for each in self:
            each.close()


def route_of(gateway: GatewayProcess, route: bytes) -> bytes:
    return bytes([gateway.number]) + route


def is_held_elsewhere(route: bytes) -> bool:
    """By a gateway, and not by the coordinator's own socket."""
    return route[:1] != b"\0"
