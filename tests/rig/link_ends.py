"""The ends of lines between two peers that can't dial each other, in one process: for tests of the two ways.

Each end is a real link with keys of its own; `until` takes their turns in one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from farflung.collectives.link.link import Relayed
from farflung.collectives.link.zmq_link import ZmqLink
from farflung.protocol.frames import Frame, Header, Kind, Spoiled, with_payload
from farflung.protocol.process.sockets import curve_raw
from farflung.protocol.round_words import Contact
from rig.relay_rig import RelayRig
from rig.waiting import eventually

TAG = b"run-tag!"
PAYLOAD_MAX = 1 << 20


@dataclass(eq=False)
class End:
    name: str
    got: list[tuple[str, Frame]] = field(default_factory=list)
    spoiled: int = 0

    def __post_init__(self) -> None:
        keys = zmq.curve_keypair()
        self.link = ZmqLink(keys)
        self.link.expect(self.name, TAG, PAYLOAD_MAX)
        self.key = curve_raw(keys[0])
        self.contact = Contact(self.name, self.name, self.key, "")

    def turn(self) -> None:
        poller = zmq.Poller()
        for each, events in self.link.sockets():
            poller.register(each, events)
        poller.poll(2)
        for sender, came in self.link.receive():
            if isinstance(came, Spoiled):
                self.spoiled += 1
            else:
                self.got.append((sender, Frame(came.header, bytes(came.payload))))
        self.link.flush()
        self.link.on_tick()


def until(ends: tuple[End, ...], wanted: Callable[[], object], what: str) -> None:
    def look() -> object:
        for each in ends:
            each.turn()
        return wanted()

    eventually(look, what)


def frame(chunk: int, payload: bytes) -> Frame:
    return with_payload(Header(Kind.CONTRIBUTION, TAG, round_no=1, chunk=chunk), payload)


def ways(rig: RelayRig, ends: tuple[End, End]) -> tuple[Relayed, Relayed]:
    ann, bob = ends
    return rig.way(ann.key, bob.key), rig.way(bob.key, ann.key)
