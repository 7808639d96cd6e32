"""What the coordinator and its gateways say to each other, over a channel (channel.py).

A gateway holds members' connections and decides nothing: it passes on what they say, many words at a time, and says
what it is given.  It talks to whoever connects, so its words are bounded and typed like anybody's.
"""

from __future__ import annotations

import socket
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.door.channel import Channel
from farflung.protocol.limits import ADDRESS_CHARS, CONTROL_FRAME_BYTES
from farflung.protocol.messages import Bytes32

GATEWAYS_MOST = 16
LOT_FRAMES, LOT_BYTES = 64, 192 * 1024  # of one word; a frame that is larger goes alone
KEYS_AT_ONCE = 1024
MEMORY_BYTES = 2 << 30  # address space of a gateway: buffers of thousands of connections

Route = Annotated[bytes, Meta(max_length=64)]  # names a connection for as long as it lasts
FrameBytes = Annotated[bytes, Meta(max_length=CONTROL_FRAME_BYTES)]


class _Word(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="word"):
    pass


# ---- to a gateway --------------------------------------------------------------------------------------


class Begin(_Word, frozen=True, kw_only=True, tag="begin"):
    secret: bytes  # the coordinator's CURVE key: the join URL pins one for all its sockets
    host: str
    port: int
    heartbeat_s: float
    fragments: int
    memory_bytes: int = MEMORY_BYTES


class Let(_Word, frozen=True, kw_only=True, tag="let"):
    """These keys may come in from now on."""

    keys: Annotated[tuple[Bytes32, ...], Meta(max_length=KEYS_AT_ONCE)]


class Shut(_Word, frozen=True, kw_only=True, tag="shut"):
    """This one may not come in any more.  `cut`: nothing more of it is read, and what it has open ends in a moment."""

    key: Bytes32
    cut: bool


class Say(_Word, frozen=True, kw_only=True, tag="say"):
    lot: Annotated[tuple[tuple[Route, FrameBytes], ...], Meta(max_length=LOT_FRAMES)]


# ---- from a gateway ------------------------------------------------------------------------------------


class Listening(_Word, frozen=True, kw_only=True, tag="listening"):
    port: Annotated[int, Meta(ge=1, le=65535)]


class CannotListen(_Word, frozen=True, kw_only=True, tag="cannot_listen"):
    reason: Annotated[str, Meta(max_length=1000)]


class Heard(_Word, frozen=True, kw_only=True, tag="heard"):
    """Messages of members, whole and of the right shape, each with the key that its connection proved."""

    lot: Annotated[tuple[tuple[Route, Bytes32, FrameBytes], ...], Meta(max_length=LOT_FRAMES)]


class Ended(_Word, frozen=True, kw_only=True, tag="ended"):
    routes: Annotated[tuple[Route, ...], Meta(max_length=KEYS_AT_ONCE)]


class Looked(_Word, frozen=True, kw_only=True, tag="looked"):
    """A connection that proved this key came from there."""

    key: Bytes32
    endpoint: Annotated[str, Meta(max_length=ADDRESS_CHARS)]


class Misbehaved(_Word, frozen=True, kw_only=True, tag="misbehaved"):
    """It is cut off: it flooded the gateway, or sent what no farflung sends."""

    route: Route
    key: Bytes32
    why: Annotated[str, Meta(max_length=200)]


class Counted(_Word, frozen=True, kw_only=True, tag="counted"):
    """Since the last time; said twice a second, so that its silence means that it hangs.  What was passed on counts
    where it is decided."""

    arrived: Annotated[int, Meta(ge=0, lt=1 << 32)]
    counters: Annotated[dict[str, int], Meta(max_length=16)]
    connections: Annotated[int, Meta(ge=0, lt=1 << 32)]
    undelivered: Annotated[int, Meta(ge=0, lt=1 << 32)]


ToGateway = Begin | Let | Shut | Say
FromGateway = Listening | CannotListen | Heard | Ended | Looked | Misbehaved | Counted

_decoder: msgspec.msgpack.Decoder[ToGateway | FromGateway] = msgspec.msgpack.Decoder(ToGateway | FromGateway)
GatewayChannel = Channel[ToGateway | FromGateway]


def gateway_channel(end: socket.socket) -> GatewayChannel:
    return Channel(end, _decoder)
