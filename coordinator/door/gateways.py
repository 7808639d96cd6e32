"""The coordinator's hold on its gateways: what they are told, in lots, and what they say.

Called by the server.  A member whose gateway dies keeps its session: it dials again, the same port or, if that stays
silent, the door, which names another one.  Nothing is lost by it that the next beat does not bring, and its death is no
sign that a member has gone.  Must not know members: a route names a connection, and begins with its gateway's number.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from farflung.coordinator.door.front_door_process import FramesCounted
from farflung.protocol.limits import ADDRESS_CHARS, CONTROL_FRAME_BYTES
from farflung.protocol.process.child import (
    CannotListen,
    ChildSettings,
    ChildWord,
    KeptChild,
    Listening,
    Spawn,
    packed,
    started,
)
from farflung.protocol.round_words import Bytes32

# ---- gateway words -----------------------------------------------------------------------------------------
# What the coordinator and its gateways say to each other, over a channel (protocol/process/child.py).
#
# A gateway holds members' connections and decides nothing: it passes on what they say, many words at a time,
# and says what it is given. It talks to whoever connects, so its words are bounded and typed like anybody's.

LOT_FRAMES, LOT_BYTES = 64, 192 * 1024  # of one word; a frame that is larger goes alone
KEYS_AT_ONCE = 1024
MEMORY_BYTES = 2 << 30  # address space of a gateway: buffers of thousands of connections

Route = Annotated[bytes, Meta(max_length=64)]  # names a connection for as long as it lasts
FrameBytes = Annotated[bytes, Meta(max_length=CONTROL_FRAME_BYTES)]


# ---- to a gateway --------------------------------------------------------------------------------------


class GatewaySettings(ChildSettings, frozen=True, kw_only=True, tag="begin"):
    secret: bytes  # the coordinator's CURVE key: the join URL pins one for all its sockets
    host: str
    heartbeat_s: float
    fragments: int


class Let(ChildWord, frozen=True, kw_only=True, tag="let"):
    """These keys may come in from now on."""

    keys: Annotated[tuple[Bytes32, ...], Meta(max_length=KEYS_AT_ONCE)]


class Shut(ChildWord, frozen=True, kw_only=True, tag="shut"):
    """This one may not come in any more.  `cut`: nothing more of it is read, and what it has open ends in a moment."""

    key: Bytes32
    cut: bool


class Say(ChildWord, frozen=True, kw_only=True, tag="say"):
    lot: Annotated[tuple[tuple[Route, FrameBytes], ...], Meta(max_length=LOT_FRAMES)]


# ---- from a gateway ------------------------------------------------------------------------------------


class Heard(ChildWord, frozen=True, kw_only=True, tag="heard"):
    """Messages of members, whole and of the right shape, each with the key that its connection proved."""

    lot: Annotated[tuple[tuple[Route, Bytes32, FrameBytes], ...], Meta(max_length=LOT_FRAMES)]


class Ended(ChildWord, frozen=True, kw_only=True, tag="ended"):
    routes: Annotated[tuple[Route, ...], Meta(max_length=KEYS_AT_ONCE)]


class Looked(ChildWord, frozen=True, kw_only=True, tag="looked"):
    """A connection that proved this key came from there."""

    key: Bytes32
    endpoint: Annotated[str, Meta(max_length=ADDRESS_CHARS)]


class Misbehaved(ChildWord, frozen=True, kw_only=True, tag="misbehaved"):
    """It is cut off: it flooded the gateway, or sent what no farflung sends."""

    route: Route
    key: Bytes32
    why: Annotated[str, Meta(max_length=200)]


ToGateway = GatewaySettings | Let | Shut | Say
FromGateway = Listening | CannotListen | Heard | Ended | Looked | Misbehaved | FramesCounted

TO_GATEWAY: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
FROM_GATEWAY: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)


# ---- gateways ----------------------------------------------------------------------------------------------

WORDS_PER_TURN = 4  # of one gateway: the others, the door and the clock wait for no more
# Of answers that a gateway has not taken; the next beats make good what is dropped.
WAITING_BYTES_MOST = 32 << 20


class GatewayProcess(KeptChild[GatewaySettings, FromGateway]):
    """One of them.  `number`: from 1, the first byte of its routes; libzmq's own begin with 0.  `keys`: who may come in
    when it starts."""

    lost = "{}; its members dial again, and keep what they have"
    module = "farflung.coordinator.door.gateway"
    memory_bytes = MEMORY_BYTES
    heard = FROM_GATEWAY

    def __init__(
        self,
        number: int,
        begin: GatewaySettings,
        note: Callable[[str], None],
        spawn: Spawn,
        keys: Callable[[], list[bytes]],
    ) -> None:
        super().__init__(begin, note, spawn)
        self.number, self.name = number, f"gateway {number}"
        self._keys = keys
        self._lot: list[tuple[bytes, bytes]] = []
        self._lot_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def start(self, now: float) -> None:
        super().start(now)
        keys = self._keys()
        for at in range(0, len(keys), KEYS_AT_ONCE):
            self.tell(Let(keys=tuple(keys[at : at + KEYS_AT_ONCE])))

    def close(self, why: str = "") -> None:
        self._lot, self._lot_bytes, self._waiting_bytes = [], 0, 0
        self._waiting.clear()
        super().close(why)

    def say(self, route: bytes, raw: bytes) -> bool:
        """With the lot that leaves at the end of this turn."""
        if self.port is None or self._waiting_bytes + self._lot_bytes > WAITING_BYTES_MOST:
            return False
        if self._lot and (len(self._lot) >= LOT_FRAMES or self._lot_bytes + len(raw) > LOT_BYTES):
            self._send_lot()
        self._lot.append((route, raw))
        self._lot_bytes += len(raw)
        return True

    def tell(self, word: Let | Shut) -> None:
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


class Gateways:
    """All of them.  Without any everything here does nothing."""

    def __init__(
        self,
        begins: list[GatewaySettings],
        note: Callable[[str], None],
        spawn: Spawn = started,
        keys: Callable[[], list[bytes]] = list,
    ) -> None:
        self._all = {
            number: GatewayProcess(number, begin, note, spawn, keys) for number, begin in enumerate(begins, 1)
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

    def watch(self, now: float) -> set[int]:
        """The numbers of those that have just died."""
        return {each.number for each in self if each.watch(now)}

    def receive(self, now: float) -> Iterator[tuple[GatewayProcess, FromGateway]]:
        for each in self:
            for word in each.hear(now, WORDS_PER_TURN):
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
