"""What a lean connection says, sealed: the hello that opens it, and the frames that follow.  Pure.

Called by lean.py, which moves the bytes.  The secret of a connection comes over the encrypted line that
the two peers have already (CURVE over ZeroMQ): one asks with its half of the secret, the other grants with the rest, a
ticket and a port.  So whoever knows the secret was shown to be the contact, and nobody can learn it later: CURVE's own
keys are gone with their connection, and the secret with this one.

An attacker on the way sees tickets, lengths and times.  Each direction has a key of its own, so that nothing can be
sent back to whoever said it.  What is sealed is counted, and the count is the nonce: what is left out, repeated,
swapped, changed or cut short does not open, and after that nothing does.  A key seals no more than is safe.

Must not know sockets, peers, or what a frame is about.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farflung.protocol.frames import Payload
from farflung.protocol.limits import BULK_HEADER_BYTES

HALF_BYTES, TICKET_BYTES, TAG_BYTES = 32, 16, 16
_KEY_BYTES = 32
_MAGIC = b"FFL\x01"
_GRANT = struct.Struct(f"<H{TICKET_BYTES}s{HALF_BYTES}s")
_LENGTH = struct.Struct("<I")

HELLO_BYTES = len(_MAGIC) + TICKET_BYTES + TAG_BYTES
HEAD_BYTES = _LENGTH.size + BULK_HEADER_BYTES + TAG_BYTES
# Of one key, and the rest of the frame that reaches it.  Far below what AES-GCM allows for counted nonces; at
# 10 Gbit/s a quarter of an hour.
SEALED_BYTES_MOST = 1 << 40


class BadRecord(Exception):
    """It is not what the other side said next."""


class Grant(NamedTuple):
    port: int
    ticket: bytes
    half: bytes

    def pack(self) -> bytes:
        return _GRANT.pack(*self)


def grant_of(raw: Payload) -> Grant | None:
    return Grant(*_GRANT.unpack(raw)) if len(raw) == _GRANT.size else None


class Direction:
    """What one side says to the other, in order.  After something that does not open, nothing does."""

    def __init__(self, key: bytes) -> None:
        self._cipher: AESGCM | None = AESGCM(key)
        self._count = self._bytes = 0

    @property
    def is_spent(self) -> bool:
        return self._bytes >= SEALED_BYTES_MOST

    def seal(self, plain: Payload, beside: bytes | None = None) -> bytes:
        """`beside`: what travels open, and counts."""
        assert self._cipher is not None
        self._bytes += len(plain)
        return self._cipher.encrypt(self._next(), plain, beside)

    def open(self, sealed: Payload, beside: bytes | None = None) -> bytes:
        """Refused, for good, where this is not what was sealed next."""
        if self._cipher is None:
            raise BadRecord
        try:
            return self._cipher.decrypt(self._next(), sealed, beside)
        except InvalidTag:
            self._cipher = None
            raise BadRecord from None

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12)


class SealedDirections(NamedTuple):
    """The two directions of one connection, as one of its ends has them."""

    out: Direction
    back: Direction


def ways_of(asked: bytes, grant: Grant, dialler: bytes, listener: bytes, dials: bool) -> SealedDirections:
    """`asked`: the dialler's half; `dialler`, `listener`: the keys by which CURVE knows them."""
    whom = b"farflung lean 1" + dialler + listener
    kdf = HKDF(SHA256(), 2 * _KEY_BYTES, salt=grant.ticket, info=whom)
    keys = kdf.derive(asked + grant.half)
    there, back = Direction(keys[:_KEY_BYTES]), Direction(keys[_KEY_BYTES:])
    return SealedDirections(there, back) if dials else SealedDirections(back, there)


# ---- the hello, and its answer: both know the secret -------------------------------------------------------


def hello(ticket: bytes, out: Direction) -> bytes:
    named = _MAGIC + ticket
    return named + out.seal(b"", named)


def ticket_in(raw: bytes) -> bytes:
    """Of a hello, whoever says it; b"" where it is none."""
    whole = len(raw) == HELLO_BYTES and raw.startswith(_MAGIC)
    return raw[len(_MAGIC) : len(_MAGIC) + TICKET_BYTES] if whole else b""


def check_hello(raw: bytes, back: Direction) -> None:
    back.open(raw[-TAG_BYTES:], raw[:-TAG_BYTES])


def answer(ticket: bytes, out: Direction) -> bytes:
    return out.seal(b"", ticket)


def check_answer(raw: bytes, ticket: bytes, back: Direction) -> None:
    back.open(raw, ticket)


# ---- frames: how long the payload is, the header, the payload -------------------------------------------------


def sealed_frame(header: bytes, payload: Payload, out: Direction) -> list[bytes]:
    """In pieces: the payload is read once, and written where the kernel takes it."""
    length = _LENGTH.pack(len(payload))
    head = length + out.seal(header, length)
    return [head, out.seal(payload)] if len(payload) else [head]


def sealed_payload_bytes(head: Payload) -> int:
    """That follow this head: so much memory is taken, if that is no more than is allowed."""
    (length,) = _LENGTH.unpack_from(head)
    return int(length) + TAG_BYTES if length else 0


def opened_header(head: Payload, back: Direction) -> bytes:
    head = memoryview(head)
    return back.open(head[_LENGTH.size :], bytes(head[: _LENGTH.size]))
