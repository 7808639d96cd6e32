"""A gateway: a process beside the coordinator that holds members' connections, and decides nothing.

Started by the coordinator (gateways.py) where `--gateways` asks for it, and again if it dies.  Handshakes, encryption,
floods, broken frames and half-open connections cost this process and not the coordinator; what members say goes on
in lots, each message with the key that its connection proved (ZAP): so nobody speaks as another one by coming through
here.  Who may come in, it is told.

Where the coordinator takes nothing more, nothing more is read: TCP then holds back who sends.  Must not know what a
message means; the one that it answers for is `Look`, which is about the connection itself.
"""

from __future__ import annotations

import socket
import time
from collections import deque

import zmq

from farflung.coordinator.door.allowance import Allowance, Tally
from farflung.coordinator.door.front_door_process import FramesCounted
from farflung.coordinator.door.gateways import (
    KEYS_AT_ONCE,
    LOT_BYTES,
    LOT_FRAMES,
    TO_GATEWAY,
    Ended,
    FromGateway,
    GatewaySettings,
    Heard,
    Let,
    Looked,
    Misbehaved,
    Say,
    Shut,
    ToGateway,
)
from farflung.coordinator.door.keys import CurveKeys
from farflung.coordinator.door.listener import GOODBYE_MS, Arrival, Listener
from farflung.protocol import messages
from farflung.protocol.errors import Counters, FrameError, UserError, Verdict
from farflung.protocol.messages import MEMBER_IN
from farflung.protocol.mode_words import Look
from farflung.protocol.process.child import Channel, Listening, live, packed, serve_parent
from farflung.protocol.process.descriptors import network_at, room_for_connections
from farflung.protocol.process.networks import LEFT_OPEN_S, Lines
from farflung.protocol.process.sockets import ZapHandler, take_all_descriptors

TICK_S = 0.1
TELL_EVERY_S = 0.5
STRIKES = 3  # malformed frames of one key, or floods, before it is cut off
WAITING_MOST = 8  # lots that the coordinator has not taken: then nothing more is read
LOOK_AGAIN_MS = 5  # while any wait
_OF_MEMBERS = frozenset(MEMBER_IN)


class Gateway:
    """`run` returns when the coordinator is gone."""

    def __init__(self, begin: GatewaySettings, channel: Channel[ToGateway]) -> None:
        self._channel = channel
        self._allowed: set[bytes] = set()
        self._allowance = Allowance(begin.heartbeat_s, begin.fragments)
        self._strikes: Tally[bytes] = Tally()
        self._lines = Lines(room_for_connections())
        self._waiting: deque[bytes] = deque()  # words for the coordinator, packed
        self._counters = Counters()
        self._arrived = self._undelivered = 0
        self._told = Counters()
        self._told_at = float("-inf")
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self._zap = ZapHandler(self._context)
        self._zap.set_policy("members", self._allowed.__contains__)
        keys = CurveKeys(zmq.curve_public(begin.secret), begin.secret)
        try:
            self._listener = Listener(
                self._context, "members", keys, begin.host, begin.port, self._on_accepted
            )
        except UserError:
            self._context.destroy(linger=0)
            raise

    def run(self) -> None:
        self._pass_on(Listening(port=self._listener.port))
        frames, news = self._listener.readable
        next_tick = 0.0
        while not self._channel.closed:
            poller = zmq.Poller()
            readables = [self._zap.socket, news, self._channel.socket]
            for readable in readables if self._is_full else [*readables, frames]:
                poller.register(readable, zmq.POLLIN)
            wait_ms = max(0, round((next_tick - time.monotonic()) * 1000))
            poller.poll(min(wait_ms, LOOK_AGAIN_MS) if self._waiting else wait_ms)
            # In this order: whom the coordinator has let in must not be turned away, and descriptors are used again
            # (see the server).
            self._hear_coordinator()
            self._zap.serve_waiting()
            self._read_news()
            if not self._is_full:
                self._read_frames(time.monotonic())
            self._flush()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._on_tick(now)
        self.close()

    def close(self) -> None:
        self._listener.close(0)
        self._zap.close()
        self._context.destroy(linger=0)

    # ---- connections -------------------------------------------------------------------------------------

    def _on_accepted(self, descriptor: int) -> list[int]:
        """Before its handshake: which connections are to be cut."""
        self._on_ended([descriptor])  # the one that had this number before
        return self._lines.comes(descriptor, network_at(descriptor))

    def _on_ended(self, descriptors: list[int]) -> None:
        routes = [route for route in map(self._lines.ends, descriptors) if route]
        for at in range(0, len(routes), KEYS_AT_ONCE):
            self._pass_on(Ended(routes=tuple(routes[at : at + KEYS_AT_ONCE])))

    def _read_news(self) -> None:
        ended, verdicts = self._listener.take_ended()
        for verdict in verdicts:
            self._arrived += 1
            self._counters.count(verdict)
        self._on_ended(ended)

    def _cut_off(self, key: bytes, now: float) -> None:
        """What it sends is not read any more; a last word may still leave before its connections are closed."""
        self._strikes[key] = STRIKES
        self._allowed.discard(key)
        self._lines.send_away(key, now + GOODBYE_MS / 1000)
        for descriptor in self._lines.silent():
            self._listener.cut(descriptor)

    def _stays(self, key: bytes) -> bool:
        return key in self._allowed and self._strikes.get(key, 0) < STRIKES

    # ---- frames ------------------------------------------------------------------------------------------

    def _read_frames(self, now: float) -> None:
        lot: list[tuple[bytes, bytes, bytes]] = []
        size = 0
        for arrival in self._listener.arrivals():
            for descriptor in self._lines.heard(arrival.descriptor, arrival.routing_id, arrival.key):
                self._listener.cut(descriptor)
            if not self._stays(arrival.key):
                self._lines.send_away(arrival.key, now + GOODBYE_MS / 1000)
            raw = self._judged(arrival, now)
            if raw is None:
                continue
            if lot and size + len(raw) > LOT_BYTES:
                self._pass_on(Heard(lot=tuple(lot)))
                lot, size = [], 0
            lot.append((arrival.routing_id, arrival.key, raw))
            size += len(raw)
        for at in range(0, len(lot), LOT_FRAMES):
            self._pass_on(Heard(lot=tuple(lot[at : at + LOT_FRAMES])))

    def _judged(self, arrival: Arrival, now: float) -> bytes | None:
        """What is to be passed on of it, nearly always all."""
        key = arrival.key
        if self._strikes.get(key, 0) >= STRIKES:
            self._drop(Verdict.UNAUTHORISED)
            return None
        if not self._allowance.takes(key, now):
            if self._allowance.is_flood(key):
                self._strike(arrival, f"more than {self._allowance.per_s:.0f} messages a second", now)
            self._drop(Verdict.OVERSIZE)
            return None
        try:
            if arrival.payload is None:
                raise FrameError(Verdict.MALFORMED, "a control message is exactly one frame")
            message = messages.decode(arrival.payload, _OF_MEMBERS)
        except FrameError as error:
            if error.verdict == Verdict.MALFORMED:
                self._strike(arrival, "malformed frames", now)
            self._drop(error.verdict)
            return None
        if not isinstance(message, Look):
            return arrival.payload
        endpoint = self._listener.comes_from(arrival)
        if endpoint:
            self._pass_on(Looked(key=key, endpoint=endpoint))
        self._drop(Verdict.ACCEPTED)
        return None

    def _drop(self, verdict: Verdict) -> None:
        self._arrived += 1
        self._counters.count(verdict)

    def _strike(self, arrival: Arrival, why: str, now: float) -> None:
        if self._strikes.add(arrival.key) == STRIKES:
            self._pass_on(Misbehaved(route=arrival.routing_id, key=arrival.key, why=why))
            self._cut_off(arrival.key, now)

    # ---- the coordinator ---------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= WAITING_MOST

    def _pass_on(self, word: FromGateway) -> None:
        self._waiting.append(packed(word))

    def _flush(self) -> None:
        while self._waiting and self._channel.send_raw(self._waiting[0]):
            self._waiting.popleft()

    def _hear_coordinator(self) -> None:
        for word in self._channel.receive():
            match word:
                case Say(lot=lot):
                    for route, raw in lot:
                        self._undelivered += not self._listener.send(route, raw)
                case Let(keys=keys):
                    self._allowed.update(keys)
                case Shut(key=key, cut=cut):
                    self._allowed.discard(key)
                    self._lines.send_away(key, time.monotonic() + LEFT_OPEN_S)
                    if cut:
                        self._cut_off(key, time.monotonic())
                case _:
                    pass  # not its word to say

    def _on_tick(self, now: float) -> None:
        for descriptor in self._lines.due(now, self._stays):
            self._listener.cut(descriptor)
        if now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        said = FramesCounted(
            arrived=self._arrived,
            counters=self._counters.since(self._told),
            connections=len(self._lines),
            undelivered=self._undelivered,
        )
        self._told, self._arrived, self._undelivered = self._counters.copy(), 0, 0
        self._pass_on(said)


def serve(end: socket.socket) -> None:
    serve_parent(Channel(end, TO_GATEWAY), GatewaySettings, Gateway)


if __name__ == "__main__":
    take_all_descriptors()
    live(serve)
