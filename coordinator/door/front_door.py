"""The front door: the process that strangers can reach.  It holds nothing that a member needs.

Started by the coordinator (front_door_process.py), which starts it again if it dies: of a flood that fills its
memory, of a bug in a parser, of anything.  Before a frame is parsed, its connection and its network must be within
their limits. It answers knocks and probes, and passes on hellos that are signed and fit the run; who comes in is
decided elsewhere.

It is no wall against somebody who takes it over: it runs as the same user and knows the coordinator's CURVE key.  But
the coordinator checks signatures again, so not even then does anybody come in under another's name.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from typing import cast

import zmq

from farflung.coordinator.door.allowance import Quota, Tally
from farflung.coordinator.door.dialer import Caller, Dialer, Prober
from farflung.coordinator.door.front_door_process import (
    LOOKS_PER_S,
    TO_DOOR,
    Brings,
    DoorAnswer,
    DoorSettings,
    FramesCounted,
    LedFrom,
    ModelNow,
    Saw,
    StatusNow,
    ToDoor,
    WantsStatus,
)
from farflung.coordinator.door.hello_check import UNPROVEN, DoorFacts, Doorkeeper, HelloPassed, refuse
from farflung.coordinator.door.keys import CurveKeys
from farflung.coordinator.door.listener import Arrival, Listener
from farflung.protocol import messages
from farflung.protocol.errors import Counters, FrameError, UserError, Verdict
from farflung.protocol.messages import (
    DOOR_IN,
    AskStatus,
    FromDoor,
    Hello,
    Knock,
    Message,
    Probe,
    Refuse,
    StatusReply,
)
from farflung.protocol.mode_words import StandsBy
from farflung.protocol.process.child import Channel, Listening, live, packed, serve_parent
from farflung.protocol.process.descriptors import network_at, room_for_connections
from farflung.protocol.process.networks import StrangerCounts, network_of
from farflung.protocol.process.sockets import ZapHandler

TICK_S = 0.1
TELL_EVERY_S = 0.5
STATUS_FRESH_S = 0.2  # so old a status may be; a flood of questions costs the coordinator no more than that
ASKERS_MOST = 1024
STRIKES = 3  # malformed frames of one key before nothing more of it is parsed
KEY_BYTES = 32
BURST_S = 3.0
BUSY_RETRY_S = 2.0
HELLOS_AT_ONCE, HELLO_RETRY_S = 1000.0, 0.5  # a whole run may come at once
WAITING_BYTES_MOST = 16 << 20  # of hellos that the coordinator, which waits for its disk, has not taken
LOOK_AGAIN_MS = 5  # while any wait
BYTES_BURST = 24 << 20  # the doctor's measurement of a fast line
NICE = 10  # members' business goes first
_AT_DOOR = frozenset(DOOR_IN)

log = logging.getLogger("farflung.coordinator")


class FrontDoor:
    """`run` returns when the coordinator is gone."""

    def __init__(self, begin: DoorSettings, channel: Channel[ToDoor]) -> None:
        limits = begin.limits
        self._channel = channel
        self._keeper = Doorkeeper(DoorFacts(begin.name, begin.run_id, begin.manifest))
        self._led_from = begin.stands_by  # None: from here
        most = min(limits.connections, room_for_connections())
        self._crowd = StrangerCounts(most, limits.connections_of_network, limits.silent_s)
        self._frames: Quota[str] = Quota(limits.frames_per_s, BURST_S * limits.frames_per_s)
        self._bytes: Quota[str] = Quota(limits.bytes_per_s, float(BYTES_BURST))
        self._hellos: Quota[str] = Quota(limits.hellos_per_s, HELLOS_AT_ONCE)
        self._looks: Quota[str] = Quota(LOOKS_PER_S, LOOKS_PER_S)
        self._told_busy: Quota[str] = Quota(1.0, 1.0)
        self._strikes: Tally[bytes] = Tally()
        self._counters = Counters()
        self._arrived = 0
        self._told = Counters()
        self._told_arrived = 0
        self._last_told = float("-inf")
        self._notes: list[str] = []
        self._crowded_networks: Quota[str] = Quota(1 / 60.0, 1.0)  # for people, once a minute for each
        self._status = b""
        self._status_at = self._asked_at = float("-inf")
        self._askers: list[bytes] = []
        self._waiting: deque[bytes] = deque()  # for the coordinator, packed
        self._waiting_bytes = 0
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self._zap = ZapHandler(self._context)
        self._zap.set_policy("door", lambda key: True)
        keys = CurveKeys(zmq.curve_public(begin.secret), begin.secret)
        try:
            self._listener = Listener(self._context, "door", keys, begin.host, begin.port, self._on_accepted)
        except UserError:
            self._context.destroy(linger=0)
            raise
        self._dialer = Dialer(self._context, (keys.public, keys.secret))
        self._prober = Prober(self._dialer, self._say)

    def run(self) -> None:
        self._channel.send(Listening(port=self._listener.port))
        poller = zmq.Poller()
        for readable in (self._zap.socket, *self._listener.readable, self._channel.socket):
            poller.register(readable, zmq.POLLIN)
        next_tick = 0.0
        while not self._channel.closed:
            wait_ms = max(0, round((next_tick - time.monotonic()) * 1000))
            poller.poll(min(wait_ms, LOOK_AGAIN_MS) if self._waiting else wait_ms)
            self._zap.serve_waiting()
            self._read_news()
            for arrival in self._listener.arrivals():
                self._on_frame(arrival, time.monotonic())
            self._pass_on()
            self._hear_coordinator()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                for target, reached in self._dialer.verdicts():
                    self._prober.on_verdict(target, reached)
                self._ask_for_status(now)
                self._tell(now)
        self.close()

    def close(self) -> None:
        self._dialer.close()
        self._listener.close(0)
        self._zap.close()
        self._context.destroy(linger=0)

    # ---- connections -------------------------------------------------------------------------------------

    def _on_accepted(self, descriptor: int) -> list[int]:
        """Before its handshake: which connections are to be cut."""
        now, network = time.monotonic(), network_at(descriptor)
        cut = self._crowd.comes(descriptor, network, now)
        if descriptor in cut and self._crowded_networks.take(network, now):
            whose = f"from {network}" if network else "in all"
            self._notes.append(f"front door: too many connections {whose}; more are turned away")
        return cut

    def _read_news(self) -> None:
        ended, verdicts = self._listener.take_ended()
        for descriptor in ended:
            self._crowd.ends(descriptor)
        for verdict in verdicts:
            self._arrived += 1
            self._counters.count(verdict)

    # ---- frames ------------------------------------------------------------------------------------------

    def _on_frame(self, arrival: Arrival, now: float) -> None:
        self._arrived += 1
        self._crowd.heard(arrival.descriptor, now)
        if not self._is_within_limits(arrival, now):
            self._counters.count(Verdict.OVERSIZE)
            return
        message = self._decode(arrival)
        if message is None:
            return
        caller = arrival.routing_id + arrival.key
        verdict = Verdict.ACCEPTED
        match message:
            case Knock() | AskStatus() if self._led_from is not None:
                wrong = self._keeper.wrong_run(message.run)
                self._say(arrival.routing_id, wrong or StandsBy(whereabouts=self._led_from))
            case Knock():
                self._say(arrival.routing_id, self._keeper.knock(caller, message, os.urandom(32)))
            case Hello():
                verdict = self._on_hello(arrival, caller, message, now)
            case Probe():
                endpoint = self._listener.comes_from(arrival)
                self._prober.on_probe(Caller(arrival.routing_id, arrival.came_from, endpoint), message, now)
                if message.look and endpoint and self._looks.take("", now):
                    self._channel.send(Saw(key=arrival.key, endpoint=endpoint))  # a lost one is shown again
        self._counters.count(verdict)
        # After it was counted: the coordinator is told all counts with it.
        if isinstance(message, AskStatus) and self._led_from is None:
            self._on_asked(arrival.routing_id, self._keeper.wrong_run(message.run), now)

    def _is_within_limits(self, arrival: Arrival, now: float) -> bool:
        """Nothing of the frame is looked at but its length."""
        network = network_of(arrival.came_from)
        size = float(len(arrival.payload or b""))
        if not network:
            return True
        if self._frames.take(network, now) and self._bytes.take(network, now, size):
            return True
        if self._told_busy.take(network, now):
            why = f"too much comes from your network ({network}); try again in some seconds"
            self._say(arrival.routing_id, refuse("busy", why, BUSY_RETRY_S))
        return False

    def _decode(self, arrival: Arrival) -> FromDoor | None:
        if self._strikes.get(arrival.key, 0) >= STRIKES:
            self._counters.count(Verdict.UNAUTHORISED)
            self._listener.cut(arrival.descriptor)
            return None
        try:
            if arrival.payload is None:
                raise FrameError(Verdict.MALFORMED, "a control message is exactly one frame")
            return cast(FromDoor, messages.decode(arrival.payload, _AT_DOOR))
        except FrameError as error:
            self._counters.count(error.verdict)
            if error.verdict == Verdict.MALFORMED:
                self._strikes.add(arrival.key)
            return None

    def _on_hello(self, arrival: Arrival, caller: bytes, hello: Hello, now: float) -> Verdict:
        said = self._keeper.examine(caller, arrival.key, hello, arrival.came_from)
        if isinstance(said, Refuse):
            self._say(arrival.routing_id, said)
            return Verdict.UNAUTHORISED if said.code in UNPROVEN else Verdict.ACCEPTED
        if not (self._hellos.take("", now) and self._bring(caller, said)):
            why = "too many want to come in at this moment; try again in a moment"
            self._say(arrival.routing_id, refuse("busy", why, HELLO_RETRY_S))
        return Verdict.ACCEPTED

    def _bring(self, caller: bytes, passed: HelloPassed) -> bool:
        """False: too much waits for the coordinator already."""
        came_from = passed.came_from[:128]
        raw = packed(Brings(caller=caller, hello=passed.hello, nonce=passed.nonce, came_from=came_from))
        if self._waiting_bytes + len(raw) > WAITING_BYTES_MOST:
            return False
        self._waiting.append(raw)
        self._waiting_bytes += len(raw)
        return True

    def _pass_on(self) -> None:
        while self._waiting and self._channel.send_raw(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())

    def _say(self, routing_id: bytes, message: Message) -> None:
        """A caller that does not read it asks again."""
        self._listener.send(routing_id, messages.encode(message))

    # ---- the status --------------------------------------------------------------------------------------

    def _on_asked(self, routing_id: bytes, wrong: Refuse | None, now: float) -> None:
        if wrong is not None:
            self._say(routing_id, wrong)
        elif now - self._status_at < STATUS_FRESH_S:
            self._say(routing_id, StatusReply(status=self._status))
        elif len(self._askers) < ASKERS_MOST:
            self._askers.append(routing_id)
            self._ask_for_status(now)

    def _ask_for_status(self, now: float) -> None:
        if self._askers and now - self._asked_at >= STATUS_FRESH_S:
            self._asked_at = now
            self._tell(now, at_once=True)  # what the status says of frames is then as new as the rest
            self._channel.send(WantsStatus())

    def _hear_coordinator(self) -> None:
        for word in self._channel.receive():
            if isinstance(word, DoorAnswer):
                self._listener.send(word.caller[:-KEY_BYTES], word.message)
            elif isinstance(word, LedFrom):
                self._led_from = word.whereabouts
            elif isinstance(word, ModelNow):
                self._keeper.model = word.model
            elif isinstance(word, StatusNow):
                self._status, self._status_at = word.status, time.monotonic()
                askers, self._askers = self._askers, []
                for routing_id in askers:
                    self._say(routing_id, StatusReply(status=self._status))

    def _tell(self, now: float, at_once: bool = False) -> None:
        if not at_once and now - self._last_told < TELL_EVERY_S:
            return
        said = FramesCounted(
            arrived=self._arrived - self._told_arrived,
            counters=self._counters.since(self._told),
            connections=len(self._crowd),
            notes=tuple(self._notes[:8]),
        )
        if self._channel.send(said):
            self._told, self._told_arrived = self._counters.copy(), self._arrived
            self._notes, self._last_told = [], now


def serve(end: socket.socket) -> None:
    serve_parent(Channel(end, TO_DOOR), DoorSettings, FrontDoor)


if __name__ == "__main__":
    live(serve, NICE)
