"""A channel of words between a process and a child of its (child.py).

A child may talk to strangers, so its words are bounded and typed like anybody's (msgpack, nothing is executed).  The
channel never blocks: a word that does not fit is not said, and whoever waited for it asks again.  Must not know the
words: whoever opens a channel brings the decoder of those that the other side may say.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from farflung.protocol.limits import CONTROL_FRAME_BYTES

WORD_BYTES = CONTROL_FRAME_BYTES + 8192
WORDS_PER_TURN = 64

Said = TypeVar("Said")

_encoder = msgspec.msgpack.Encoder()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # a word must fit into it whole
        end.setblocking(False)
    return ends


def packed(word: object) -> bytes:
    return _encoder.encode(word)


class Channel(Generic[Said]):
    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Said]) -> None:
        self.socket = end
        self.closed = False  # by the other side
        self._decoder = decoder

    def send(self, word: object) -> bool:
        """False: the other side does not read, or is gone."""
        return self.send_raw(packed(word))

    def send_raw(self, raw: bytes) -> bool:
        try:
            self.socket.send(raw)
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            return False
        return True

    def receive(self, most: int = WORDS_PER_TURN) -> Iterator[Said]:
        """What has come so far, a bounded number; a word that is none ends the channel."""
        for _ in range(most):
            try:
                raw = self.socket.recv(WORD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if not raw:
                self.closed = True
                return
            try:
                yield self._decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.closed = True
                return

    def wait(self, most_s: float) -> None:
        """Until something has come, or the other side is gone.  By poll(2): descriptors may have any number."""
        looking = select.poll()
        looking.register(self.socket, select.POLLIN)
        looking.poll(round(1000 * most_s))
