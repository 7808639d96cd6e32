"""The coordinator's hold on its front door: what it is told, and what people are told of it.

Called by the server.  Members have another socket, in the coordinator's own process: whatever becomes of the front
door, they are not touched.  Must not know what strangers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.hello_check import DoorFacts
from farflung.coordinator.door.listener import ListenOn
from farflung.protocol.errors import Verdict
from farflung.protocol.limits import ADDRESS_CHARS, CONTROL_BIN_BYTES, CONTROL_FRAME_BYTES, WHEREABOUTS_BYTES
from farflung.protocol.messages import Hello
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.process.child import (
    CannotListen,
    ChildSettings,
    ChildWord,
    KeptChild,
    Listening,
    Spawn,
    started,
)
from farflung.protocol.round_words import Bytes32, Session

# ---- front door words --------------------------------------------------------------------------------------
# What the coordinator and its front door say to each other, over a channel (protocol/process/child.py).
#
# The front door is a process of its own and talks to strangers, so its words are bounded and typed like
# anybody's.

# At the front door, of everybody and of one network (protocol/process/networks.py).
CONNECTIONS_MOST = 1024
CONNECTIONS_OF_NETWORK = 64
SILENT_S = 10.0  # a full door makes room for the next by cutting off who said nothing for so long
FRAMES_PER_S = 100.0  # of one network; three seconds' worth at once
BYTES_PER_S = 4.0 * (1 << 20)
HELLOS_PER_S = 200.0  # of everybody: what is passed on to the coordinator
LOOKS_PER_S = 200.0  # the same, of members that show from where they are seen
MEMORY_BYTES = 512 << 20  # address space of the whole process
Caller = Annotated[bytes, Meta(max_length=512)]


# ---- to the front door ---------------------------------------------------------------------------------


class DoorLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds at a door; tests have others."""

    connections: int = CONNECTIONS_MOST
    connections_of_network: int = CONNECTIONS_OF_NETWORK
    silent_s: float = SILENT_S
    frames_per_s: float = FRAMES_PER_S
    bytes_per_s: float = BYTES_PER_S
    hellos_per_s: float = HELLOS_PER_S
    memory_bytes: int = MEMORY_BYTES


class DoorSettings(ChildSettings, frozen=True, kw_only=True, tag="begin"):
    name: str
    run_id: Session
    manifest: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]
    secret: bytes  # the coordinator's CURVE key: the join URL pins one for both sockets
    host: str
    limits: DoorLimits = DoorLimits()
    # Another coordinator leads, and this is what is told of it: the signed list of its addresses, empty where nobody
    # leads just now.  None: this one leads.
    stands_by: Annotated[bytes, Meta(max_length=WHEREABOUTS_BYTES)] | None = None


class LedFrom(ChildWord, frozen=True, kw_only=True, tag="led_from"):
    """To a door that stands by: where the leader is now."""

    whereabouts: Annotated[bytes, Meta(max_length=WHEREABOUTS_BYTES)]


class DoorAnswer(ChildWord, frozen=True, kw_only=True, tag="answer"):
    caller: Caller
    message: Annotated[bytes, Meta(max_length=CONTROL_FRAME_BYTES)]


class StatusNow(ChildWord, frozen=True, kw_only=True, tag="status"):
    status: Annotated[bytes, Meta(max_length=CONTROL_BIN_BYTES)]


class ModelNow(ChildWord, frozen=True, kw_only=True, tag="model"):
    """What those are told who come without a trainer."""

    model: ModelSchema


# ---- from the front door -------------------------------------------------------------------------------


class Brings(ChildWord, frozen=True, kw_only=True, tag="brings"):
    """Somebody whose hello is signed and fits the run."""

    caller: Caller
    hello: Hello
    nonce: Bytes32
    came_from: Annotated[str, Meta(max_length=128)]


class Saw(ChildWord, frozen=True, kw_only=True, tag="saw"):
    """A connection that proved this key came from there, and says that it is a member's."""

    key: Bytes32
    endpoint: Annotated[str, Meta(max_length=ADDRESS_CHARS)]


class WantsStatus(ChildWord, frozen=True, kw_only=True, tag="wants_status"):
    pass


class FramesCounted(ChildWord, frozen=True, kw_only=True, tag="counted"):
    """Since the last time; said twice a second, so that its silence means that it hangs.  Of a gateway, too: what it
    passed on counts where it is decided."""

    arrived: Annotated[int, Meta(ge=0, lt=1 << 32)]
    counters: Annotated[dict[Verdict, Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=16)]
    connections: Annotated[int, Meta(ge=0, lt=1 << 32)]
    undelivered: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    notes: Annotated[tuple[Annotated[str, Meta(max_length=300)], ...], Meta(max_length=8)] = ()


ToDoor = DoorSettings | LedFrom | DoorAnswer | StatusNow | ModelNow
FromDoor = Listening | CannotListen | Brings | Saw | WantsStatus | FramesCounted

TO_DOOR: msgspec.msgpack.Decoder[ToDoor] = msgspec.msgpack.Decoder(ToDoor)
FROM_DOOR: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)


# ---- front door process ------------------------------------------------------------------------------------

NOTES_PER_S = 16.0  # as many as it says itself; of one that was taken over, people's log takes no more


def settings_of(facts: DoorFacts, secret: bytes, listen: ListenOn, limits: DoorLimits) -> DoorSettings:
    return DoorSettings(
        name=facts.name,
        run_id=facts.run_id,
        manifest=facts.manifest,
        secret=secret,
        host=listen.host,
        port=listen.port,
        limits=limits,
    )


class DoorProcess(KeptChild[DoorSettings, FromDoor]):
    name, lost = "front door", "{}; members are not affected"
    module = "farflung.coordinator.door.front_door"
    heard = FROM_DOOR

    def __init__(self, begin: DoorSettings, note: Callable[[str], None], spawn: Spawn = started) -> None:
        super().__init__(begin, note, spawn)
        self.memory_bytes = begin.limits.memory_bytes
        self._notes: Quota[str] = Quota(NOTES_PER_S, NOTES_PER_S)

    def stand_by(self, whereabouts: bytes) -> None:
        """Of who leads, from now on; also for a door that is started again."""
        if self.begin.stands_by != whereabouts:
            self.begin = msgspec.structs.replace(self.begin, stands_by=whereabouts)
            self.send(LedFrom(whereabouts=whereabouts))

    def receive(self, now: float) -> Iterator[FromDoor]:
        for word in super().receive(now):
            for note in word.notes if isinstance(word, FramesCounted) else ():
                if self._notes.take("", now):
                    self._note(note)
            yield word
