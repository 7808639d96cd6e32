"""The door of a coordinator that puts its run together again: the socket and the clock around `Restoring`.

Where the mode begins: the core asks for `ask_peers` (coordinator/run_lead.py) for `--restored`, before the journal is
written and the server begins, for a folder as for a store that this process leads; it listens where the front door
will.  Who asks for the status is told why it waits.  Decides nothing.  In the run machine the mode is `Keepers`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from farflung.coordinator.door.allowance import Quota
from farflung.coordinator.door.keys import CoordinatorKeys
from farflung.coordinator.door.listener import Listener, ListenOn
from farflung.coordinator.ledger.run_store import RunRecords
from farflung.coordinator.modes.registry import ModeTools
from farflung.coordinator.restoring.kept_books import Keepers, KeptSteps, Restored
from farflung.coordinator.restoring.restoration import Restoring, asking
from farflung.coordinator.run.core import Core
from farflung.coordinator.run.round_driver import RoundDriver
from farflung.protocol import messages
from farflung.protocol.errors import FrameError, UserError
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import DOOR_IN, FromDoor
from farflung.protocol.process.networks import network_of
from farflung.protocol.process.sockets import ZapHandler

TICK_S = 0.1
FRAMES_PER_S, FRAMES_BURST = 200.0, 1000.0  # of one network: a peer shows 64 commits, each in an answer
_AT_DOOR = frozenset(DOOR_IN)

log = logging.getLogger("farflung.coordinator")


LedgerPart = KeptSteps
RECORDS = (Restored,)


def made(core: Core, drivers: Sequence[RoundDriver], tools: ModeTools) -> Keepers:
    return Keepers(core)


def ask_peers(
    manifest: Manifest,
    keys: CoordinatorKeys,
    copy: RunRecords | None,
    listen: ListenOn,
    asked_to_stop: Callable[[], bool],
) -> RunRecords | None:
    """What the run is, by what peers show; None: it was told to stop before that was known."""
    key = keys.signing.public_key().public_bytes_raw()
    machine = asking(manifest, key, copy, os.urandom(32), time.monotonic())
    with zmq.Context() as context:
        zap = ZapHandler(context)
        zap.set_policy("door", lambda key: True)
        try:
            listener = Listener(context, "door", keys, listen.host, listen.port)
        except UserError:
            zap.close()
            raise
        try:
            return _Loop(machine, zap, listener, asked_to_stop).run()
        finally:
            listener.close()
            zap.close()


class _Loop:
    def __init__(
        self, machine: Restoring, zap: ZapHandler, listener: Listener, stop: Callable[[], bool]
    ) -> None:
        self._machine, self._zap, self._listener, self._stop = machine, zap, listener, stop
        self._frames: Quota[str] = Quota(FRAMES_PER_S, FRAMES_BURST)

    def run(self) -> RunRecords | None:
        poller = zmq.Poller()
        for readable in (self._zap.socket, *self._listener.readable):
            poller.register(readable, zmq.POLLIN)
        while not self._stop():
            poller.poll(round(TICK_S * 1000))
            self._zap.serve_waiting()
            self._listener.take_ended()
            for arrival in self._listener.arrivals():
                if self._frames.take(network_of(arrival.came_from), time.monotonic()):
                    self._hear(arrival.routing_id + arrival.key, arrival.routing_id, arrival.payload)
            found = self._machine.due(time.monotonic())
            for note in self._machine.take_notes():
                log.warning("%s", note)
            if found is not None:
                return found
        return None

    def _hear(self, caller: bytes, routing_id: bytes, raw: bytes | None) -> None:
        try:
            message = cast(FromDoor, messages.decode(raw or b"", _AT_DOOR))
        except FrameError as error:
            log.debug("frame dropped: %s", error)
            return
        answer = self._machine.on_door(caller, message, time.monotonic())
        if answer is not None:
            self._listener.send(routing_id, messages.encode(answer))
