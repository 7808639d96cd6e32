"""The coordinator's hold on its front door: what it is told, and what people are told of it.

Called by the server.  Members have another socket, in the coordinator's own process: whatever becomes of the front
door, they are not touched.  Must not know what strangers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.front_door_words import (
    FROM_DOOR,
    DoorLimits,
    DoorSettings,
    FramesCounted,
    FromDoor,
    LedFrom,
)
from farflung.coordinator.door.hello_check import DoorFacts
from farflung.coordinator.door.listener import ListenOn
from farflung.protocol.process.child import KeptChild, Spawn, started

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
