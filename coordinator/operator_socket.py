"""The operator's socket: a unix socket in the data folder that only the user who runs the coordinator can open.

Called by the server, which polls it.  One order a connection, as a line of JSON, and one line of JSON back.  Whoever
reads slowly or says nothing waits for itself alone: nothing here blocks.  `ask` is the other end, for the command line.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from farflung.protocol.errors import Unreachable, UserError
from farflung.protocol.messages import Order, Reply

SOCKET_NAME = "operator.sock"
LINE_BYTES = 64 * 1024
REPLY_BYTES = 4 << 20
TALKERS = 8
PATIENCE_S = 5.0  # with whoever does not say its order
ANSWER_S = 30.0  # a coordinator that waits for a slow disk is there all the same
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end: pid, uid, gid

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
log = logging.getLogger("farflung.coordinator")


@dataclass
class _Talker:
    line: socket.socket
    until: float
    heard: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)


class OperatorSocket:
    """`obey(order)` answers.  Poll `fileno`, then call `serve_waiting`; call it now and then in any case."""

    def __init__(self, folder: Path, obey: Callable[[Order], Reply]) -> None:
        self._folder = folder
        self._obey = obey
        self._talkers: list[_Talker] = []
        self._spare: int | None = None  # a descriptor, for an operator that comes when there is none left
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            with _short_path(folder) as path:
                # One that is there already is a dead coordinator's: this one holds the journal's lock.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                before = os.umask(0o177)
                try:
                    self._listener.bind(path)
                finally:
                    os.umask(before)
            self._listener.listen(TALKERS)
        except OSError as error:
            self._listener.close()
            raise UserError(f"{folder / SOCKET_NAME}: cannot make this socket: {error.strerror}") from error
        self._keep_spare()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        for talker in self._talkers:
            talker.line.close()
        self._give_spare()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError), _short_path(self._folder) as path:
            os.unlink(path)

    def serve_waiting(self, now: float) -> None:
        self._accept(now)
        for talker in list(self._talkers):
            # What it has said counts first: after a standstill of this machine everybody's time is over.
            if not self._go_on(talker) or now >= talker.until:
                talker.line.close()
                self._talkers.remove(talker)
        self._keep_spare()

    def _accept(self, now: float) -> None:
        while len(self._talkers) < TALKERS:
            line = self._next_line()
            if line is None:
                return
            line.setblocking(False)
            credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(credentials)
            if uid in (os.getuid(), 0):
                self._talkers.append(_Talker(line, now + PATIENCE_S))
            else:
                log.warning("operator socket: user %d was turned away", uid)
                line.close()

    def _next_line(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._give_spare():
                return None  # nobody is waiting, or who was waiting has gone
        try:
            return self._listener.accept()[0]
        except OSError:  # somebody else of this process was quicker; the next turn tries again
            return None

    def _keep_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):  # there is none at this moment
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _give_spare(self) -> bool:
        if self._spare is None:
            return False
        os.close(self._spare)
        self._spare = None
        return True

    def _go_on(self, talker: _Talker) -> bool:
        """False when there is no more to say to it."""
        try:
            if not talker.reply:
                piece = talker.line.recv(LINE_BYTES)
                talker.heard += piece
                if not piece or len(talker.heard) > LINE_BYTES:
                    return False
                if not talker.heard.endswith(b"\n"):
                    return True
                talker.reply += msgspec.json.encode(self._answer(bytes(talker.heard))) + b"\n"
            sent = talker.line.send(talker.reply)
            del talker.reply[:sent]
            return bool(talker.reply)
        except BlockingIOError:
            return True
        except OSError:  # it hung up
            return False

    def _answer(self, line: bytes) -> Reply:
        try:
            order = _orders.decode(line)
        except msgspec.MsgspecError as error:
            return Reply(ok=False, text=f"not an order that this coordinator knows: {error}")
        return self._obey(order)


def ask(folder: Path, order: Order) -> Reply:
    """The coordinator's answer; Unreachable if none is running on this folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(ANSWER_S)
        try:
            with _short_path(folder) as path:
                line.connect(path)
            line.sendall(msgspec.json.encode(order) + b"\n")
            return msgspec.json.decode(_read_line(line), type=Reply)
        except PermissionError:
            raise UserError(
                f"{folder / SOCKET_NAME}: only the user that runs the coordinator may give it orders"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreachable(
                f"no coordinator answers in {folder} ({error}); start it there with farflung coordinate, and name its "
                "run.toml or its data folder here; one that stands by takes no orders, the one that leads does"
            ) from error


def _read_line(line: socket.socket) -> bytes:
    heard = bytearray()
    until = time.monotonic() + ANSWER_S
    while not heard.endswith(b"\n"):
        piece = line.recv(LINE_BYTES)
        if not piece or len(heard) > REPLY_BYTES or time.monotonic() > until:
            raise OSError("it hung up without an answer")
        heard += piece
    return bytes(heard)


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Of the socket in the folder: the path of a unix socket has at most 107 bytes, and a folder's may be longer."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)
