"""The agent's connections to the coordinator: to the door, and, once let in, to the members' port.

Called by the agent's loop, which polls `sockets()`.  It carries messages and closes what the machine asks to
close; when to knock, and what silence means, is the machine's business, and which of several addresses is tried when,
that of doors.py.  It also tells how long answers take.

While nobody can be reached at a door one word waits for it, the newest: a door that hears ten knocks at once, when a
line heals, answers with ten challenges, and each hello would be to another one than it remembers.  The first door that
answers a knock is the one: the others are hung up at, and what is said next is said there.  A coordinator that stands
by does not count: it only tells where to knock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from farflung.peer.line.doors import PATIENCE_S, Doors
from farflung.protocol import messages
from farflung.protocol.errors import Counters, FrameError
from farflung.protocol.join_url import Address, JoinUrl
from farflung.protocol.messages import (
    DOOR_OUT,
    MEMBER_OUT,
    Beat,
    FromDoor,
    FromMember,
    Hello,
    Knock,
    Message,
    Refuse,
    Tick,
    Welcome,
)
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.process.sockets import (
    CONTROL_CLIENT,
    DOOR_CLIENT,
    Keys,
    Options,
    curve_client,
    opened,
)

_FROM_DOOR = frozenset(DOOR_OUT)
_FROM_MEMBERS = frozenset(MEMBER_OUT)
_GOODBYE_MS = 1000  # a last word may still leave; a dead coordinator must not hold us


@dataclass
class _Door:
    socket: zmq.Socket[bytes]
    waits: FromDoor | None = None  # what could not be said there yet


class ControlLink:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        url: JoinUrl,
        keys: Keys,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: CURVE public and secret key of this session, z85.  The coordinator's key is pinned by the URL."""
        self._context = context
        self._url = url
        self._keys = keys
        self._counters = counters
        self._clock = clock
        self._plan = Doors(url.addresses)
        self._doors: dict[Address, _Door] = {}
        self._knock: Knock | None = None  # for doors that are tried later
        self._members: zmq.Socket[bytes] | None = None
        self._greeted_at: float | None = None  # with a hello that is not answered yet
        self._heard_at = clock()  # of the coordinator that let me in
        self.sent_bytes = self.received_bytes = 0  # of messages, without what encryption and TCP add

    @property
    def at(self) -> Address:
        """Where the coordinator answered last."""
        return self._plan.at

    def look_at(self, places: tuple[Address, ...]) -> None:
        """Where it may be from now on, in order of preference."""
        self._plan.look_at(places)

    def shun(self) -> None:
        """Who answered last is a coordinator that another one has replaced: others are tried before it."""
        self._hang_up()
        self._plan.shun(self._clock())

    def sockets(self) -> Iterator[zmq.Socket[bytes]]:
        for door in self._doors.values():
            yield door.socket
        if self._members is not None:
            yield self._members

    def to_door(self, message: FromDoor) -> None:
        if isinstance(message, Knock):
            self._knock = message
            self._doubt(self._clock())
            self._plan.knock(self._clock(), self._clock() - self._heard_at)
            for door in self._doors.values():
                door.waits = message
        else:
            if isinstance(message, Hello) and self._greeted_at is None:
                self._greeted_at = self._clock()
            self._door_at(self._plan.at).waits = message
        self.on_tick()

    def _doubt(self, now: float) -> None:
        """A door may answer for a coordinator that stands still, and keep everybody from the one that took over."""
        if self._greeted_at is None or now - self._greeted_at < PATIENCE_S:
            return
        self._greeted_at = None
        if self._plan.doubt(now):
            self._hang_up()

    def on_tick(self) -> None:
        for place in self._plan.due(self._clock()):
            if place not in self._doors:
                self._door_at(place).waits = self._knock
        for door in self._doors.values():
            if door.waits is not None and self._send(door.socket, door.waits):
                door.waits = None

    def _door_at(self, place: Address) -> _Door:
        if place not in self._doors:
            self._doors[place] = _Door(self._dial(place, DOOR_CLIENT))
        return self._doors[place]

    def to_members(self, message: FromMember) -> None:
        if self._members is not None:
            self._send(self._members, message)

    def enter_members(self, port: int) -> None:
        """Hangs up at the door: who is in must not take the place of who knocks."""
        self.leave_members()
        self._hang_up()
        self._members = self._dial(Address(self.at.host, port), CONTROL_CLIENT)

    def leave_members(self) -> None:
        if self._members is not None:
            self._members.close(linger=_GOODBYE_MS)
            self._members = None

    def receive(self) -> Iterator[Message]:
        """What came from the coordinator; anything that is not a message of its kind ends in a counter."""
        for place, door in list(self._doors.items()):
            for message in self._receive_from(door.socket, _FROM_DOOR):
                if isinstance(message, Welcome | Refuse):
                    self._greeted_at = None
                if not isinstance(message, StandsBy):  # whoever leads is still to answer
                    self._choose(place)
                yield message
        if self._members is not None:
            yield from self._receive_from(self._members, _FROM_MEMBERS)

    def _receive_from(self, socket: zmq.Socket[bytes], allowed: frozenset[str]) -> Iterator[Message]:
        while not socket.closed:
            try:
                raw = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.received_bytes += len(raw)
            self._heard_at = self._clock()
            try:
                yield messages.decode(raw, allowed)
            except FrameError as error:
                self._counters.count(error.verdict)

    def _choose(self, place: Address) -> None:
        """The door there answered: nobody waits at the others any more."""
        self._plan.answered(place)
        for other in [each for each in self._doors if each != place]:
            self._doors.pop(other).socket.close(linger=0)

    def close(self) -> None:
        self.leave_members()
        self._hang_up()

    def _hang_up(self) -> None:
        self._plan.hang_up()
        for place in list(self._doors):
            self._doors.pop(place).socket.close(linger=0)

    def _send(self, socket: zmq.Socket[bytes], message: Message) -> bool:
        """False: nobody is there yet, or the queue is full because nobody reads.  Later beats repeat every message."""
        raw = messages.encode(message)
        try:
            socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.sent_bytes += len(raw)
        return True

    def _dial(self, place: Address, preset: Options) -> zmq.Socket[bytes]:
        curve = curve_client(self._keys, self._url.key)
        socket = opened(self._context, zmq.DEALER, preset, curve)
        socket.connect(f"tcp://{place}")
        return socket


# ---- how long the coordinator takes to answer ---------------------------------------------------------


ON_WAY_MOST = 64  # beats without an answer; the oldest are forgotten


class Took(NamedTuple):
    both_ways_s: float
    there: float  # seconds, on two clocks that began at different times: only differences between these mean anything


class BeatClock:
    def __init__(self) -> None:
        self._said_at: dict[int, float] = {}  # seq -> when it was handed to the socket

    def on_said(self, message: object, now: float) -> None:
        if isinstance(message, Beat):
            self._said_at[message.seq] = now
            for seq in list(self._said_at)[:-ON_WAY_MOST]:
                del self._said_at[seq]

    def on_heard(self, message: object, now: float) -> Took | None:
        """What this answer took, if it answers a beat."""
        if not isinstance(message, Tick) or message.answers not in self._said_at:
            return None
        said_at = self._said_at[message.answers]
        self._said_at = {seq: at for seq, at in self._said_at.items() if seq > message.answers}
        return Took(now - said_at, message.heard_s - said_at)

    def forget(self) -> None:
        """The connection was made anew: what is under way is lost."""
        self._said_at.clear()
