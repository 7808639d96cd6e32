"""What a guest of the relay says before it is joined to anybody: SOCKS5 (RFC 1928), as far as libzmq speaks it.  Pure.

Fed by relay.py with what arrives.  The relay dials nobody: the only request that it understands is CONNECT to a name,
and the name is the ticket.  Whoever asks for `where` is told from where it comes: two sockets of the coordinator that
see two ports of one mean a router past which nobody can be met.  Must not know what a ticket is.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MOST_BYTES = 600  # of a greeting and a request together: 255 methods, and a name of 255 letters
_VERSION, _NO_PASSWORD, _CONNECT, _BY_NAME = 5, 0, 1, 3
CHOSEN = bytes((_VERSION, _NO_PASSWORD))
NONE_CHOSEN = bytes((_VERSION, 0xFF))


def answer(code: int) -> bytes:
    """To a request: 0 is success.  Where it leads is nobody's business."""
    return bytes((_VERSION, code, 0, 1)) + bytes(6)


def seen(host: str, port: int) -> bytes:
    """To whoever asks where it is: its own address, as it is seen here."""
    ip = ipaddress.ip_address(host.removeprefix("::ffff:").partition("%")[0])
    kind = _IPV4 if ip.version == 4 else _IPV6
    return bytes((_VERSION, _NOT_ALLOWED_CODE, 0, kind)) + ip.packed + port.to_bytes(2, "big")


WHERE = b"where"  # no ticket is so short
_IPV4, _IPV6, _NOT_ALLOWED_CODE = 1, 4, 2
JOINED = answer(0)
NOT_ALLOWED = answer(2)
_NOT_KNOWN, _NO_NAME = answer(7), answer(8)


@dataclass
class SocksGreeting:
    """The first bytes of one connection."""

    name: bytes = b""  # once it has asked
    over: bool = False  # what it said is of no use: the connection is to be closed, after the reply
    _unread: bytes = b""
    _greeted: bool = False
    _heard: int = field(default=0)

    def feed(self, data: bytes) -> bytes:
        """What to reply now; nothing where more is to come."""
        self._heard += len(data)
        self._unread += data
        if self._heard > MOST_BYTES:
            self.over = True
            return b""
        reply = b""
        if not self._greeted:
            reply = self._greet()
        if self._greeted and not (self.over or self.name):
            reply += self._ask()
        return reply

    def _greet(self) -> bytes:
        said = self._unread
        if said[:1] not in (b"", bytes((_VERSION,))):
            self.over = True  # a browser, a scanner: not one byte for it
            return b""
        if len(said) < 2 or len(said) < 2 + said[1]:
            return b""
        self._unread, methods = said[2 + said[1] :], said[2 : 2 + said[1]]
        self._greeted = True
        self.over = _NO_PASSWORD not in methods
        return NONE_CHOSEN if self.over else CHOSEN

    def _ask(self) -> bytes:
        said = self._unread
        if len(said) < 5:
            return b""
        version, command, _, kind, length = said[:5]
        if version != _VERSION or command != _CONNECT or kind != _BY_NAME:
            self.over = True
            return _NO_NAME if command == _CONNECT else _NOT_KNOWN
        whole = 5 + length + 2  # and a port, which means nothing here
        if len(said) < whole:
            return b""
        self.name = said[5 : 5 + length]
        # Whoever has not been joined yet has nothing to say: more bytes than these are not of our peers.
        self.over = len(said) > whole or not self.name
        return b""
