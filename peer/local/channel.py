"""The message channel between the agent and the trainer of one peer, on their own machine.

Called by the agent (`LocalServer`) and by the trainer (`LocalClient`).  Must not know what the messages mean.

    FOLDER/trainer.sock   the channel; the folder is private: see memory.py
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from farflung.peer.local.words import FromTrainer, Stop, ToTrainer, from_trainer, to_bytes, to_trainer
from farflung.protocol.errors import UserError
from farflung.protocol.process.sockets import LOCAL_CHANNEL, opened

log = logging.getLogger(__name__)

_LAST_WORDS_MS = 500  # how long a closing socket tries to deliver what was said last


class ChannelGreeting(Enum):
    WAITING = "a new trainer connected and waits to be told what the run is"


WAITING = ChannelGreeting.WAITING


class LocalServer:
    """The agent's end.  It talks to one trainer at a time: the newest connection wins."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self.socket = opened(self._context, zmq.ROUTER, LOCAL_CHANNEL)
        self.socket.bind(_address(folder))
        self._trainer: bytes | None = None

    def recv_nowait(self) -> tuple[bytes, FromTrainer | ChannelGreeting] | None:
        """The next message of the trainer, or None; the socket is then empty, as edge-triggered pollers need."""
        while True:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            identity, payload = parts[0], parts[-1]
            if payload == b"" and len(parts) == 2:
                self._welcome(identity)
                return identity, WAITING
            if identity != self._trainer or len(parts) != 2:
                log.warning("dropped a local message that is not from the trainer in charge")
                continue
            try:
                return identity, from_trainer(payload)
            except msgspec.MsgspecError as error:
                log.warning("dropped a malformed message of the trainer: %s", error)

    def _welcome(self, identity: bytes) -> None:
        before, self._trainer = self._trainer, identity
        if before is not None and before != identity:
            # Usually it is dead and this goes nowhere; alive, it would wait for ever and write into the slots.
            stop = Stop(code="replaced", reason="another trainer has connected to this peer's agent")
            self.socket.send_multipart([before, to_bytes(stop)])

    def send(self, message: ToTrainer) -> None:
        """Goes nowhere without a trainer: the next one is told what it needs when it attaches."""
        if self._trainer is not None:
            self.socket.send_multipart([self._trainer, to_bytes(message)])

    def close(self) -> None:
        self.socket.close(linger=_LAST_WORDS_MS)
        self._context.term()


ELSEWHERE = (
    "the run is only in the process that called farflung.join: read run.batches and take steps there, with "
    "DataLoader(..., num_workers=0); how workers can read for it says docs/data.md"
)


class LocalClient:
    """The trainer's end.  Waits for an agent that has not opened its socket yet.

    A process that the script forked, such as a worker of a DataLoader, has a copy of it that hears nothing, for ever:
    there it is refused.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self.socket = opened(self._context, zmq.DEALER, LOCAL_CHANNEL)
        self.socket.connect(_address(folder))
        self.socket.send(b"")

    def send(self, message: FromTrainer) -> None:
        self._refuse_elsewhere()
        self.socket.send(to_bytes(message))

    def recv(self, timeout_s: float) -> ToTrainer | None:
        self._refuse_elsewhere()
        if not self.socket.poll(round(1000 * timeout_s)):
            return None
        try:
            return to_trainer(self.socket.recv())
        except msgspec.MsgspecError as error:
            text = f"cannot read the agent's message: {error}; do agent and trainer run the same farflung version?"
            raise UserError(text) from None

    def close(self) -> None:
        self.socket.close(linger=_LAST_WORDS_MS)
        self._context.term()

    def _refuse_elsewhere(self) -> None:
        if os.getpid() != self._pid:
            raise UserError(ELSEWHERE)


def those_that_hear(clients: Sequence[LocalClient], timeout_s: float) -> list[LocalClient]:
    """For one process that plays many trainers: which of them have a word to read, once one has or the time is over."""
    poller = zmq.Poller()
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
    ready = dict(poller.poll(max(0, math.ceil(1000 * timeout_s))))
    return [client for client in clients if client.socket in ready]


def _address(folder: Path) -> str:
    path = folder / "trainer.sock"
    if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
        raise UserError(f"{path} is too long for a local socket; set TMPDIR to a shorter path")
    return f"ipc://{path}"
