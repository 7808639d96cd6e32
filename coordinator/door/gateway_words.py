"""What the coordinator and its gateways say to each other, over a channel (protocol/process/channel.py).

A gateway holds members' connections and decides nothing: it passes on what they say, many words at a time, and says
what it is given.  It talks to whoever connects, so its words are bounded and typed like anybody's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from farflung.coordinator.door.front_door_words import FramesCounted
from farflung.protocol.limits import ADDRESS_CHARS, CONTROL_FRAME_BYTES
from farflung.protocol.messages import Bytes32
from farflung.protocol.process.child import CannotListen, ChildSettings, ChildWord, Listening

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
