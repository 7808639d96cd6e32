"""A child that does what a test says: it listens, dies, says nothing, too much, or something that is too long."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from farflung.protocol.errors import UserError
from farflung.protocol.process.child import (
    WORD_BYTES,
    CannotListen,
    Channel,
    ChildSettings,
    ChildWord,
    KeptChild,
    Listening,
    live,
    serve_parent,
)


class TrialSettings(ChildSettings, frozen=True, kw_only=True, tag="begin"):
    does: str = ""


class Echo(ChildWord, frozen=True, kw_only=True, tag="echo"):
    text: str = ""


class TrialChild(KeptChild[TrialSettings, Listening | CannotListen | Echo]):
    name, module, memory_bytes = "trial", "rig.trial_child", 1 << 30
    heard = msgspec.msgpack.Decoder(Listening | CannotListen | Echo)


class Trial:
    def __init__(self, begin: TrialSettings, channel: Channel[Any]) -> None:
        if begin.does == "cannot listen":
            raise UserError("port 1 is taken" + "!" * 2000)
        self._begin, self._channel = begin, channel

    def run(self) -> None:
        if self._begin.does == "dies":
            os._exit(3)
        if self._begin.does != "says nothing":
            self._channel.send(Listening(port=self._begin.port or 7))
        if self._begin.does == "says too much":
            while not self._channel.closed:
                self._channel.send(Echo())
        if self._begin.does == "says what is too long":
            self._channel.send_raw(bytes(WORD_BYTES + 1))
        while not self._channel.closed:
            self._channel.wait(1.0)
            for word in self._channel.receive():
                self._channel.send(word)


def serve(end: socket.socket) -> None:
    serve_parent(Channel(end, msgspec.msgpack.Decoder(TrialSettings | Echo)), TrialSettings, Trial)


if __name__ == "__main__":
    live(serve)
