"""Tickets for the relay: who may meet whom there, and until when.  Pure.

Written for the members by routes.py, read by the relay (coordinator/relay/).  A ticket is for one side of one pair of
one run, and ends.  It is signed, so that a relay needs no secret to know a guest, and nobody can make one up.  A peer
asks its SOCKS proxy for it, so it has the letters of a host's name.  Must not know sockets or members.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass

from farflung.coordinator.roster.ways import PAIR_BYTES
from farflung.protocol.signing import verify

SIGNATURE_BYTES = 64
_FORM = b"\x01"  # its six highest bits begin the name: libzmq wants a letter or a digit there
_BODY_BYTES = 1 + 1 + 4 + PAIR_BYTES
NAME_CHARS = (4 * (_BODY_BYTES + SIGNATURE_BYTES) + 2) // 3

# The ed25519 key and signature of a statement; empty where there is no key.
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Ticket:
    pair: bytes
    side: int  # 0: of the lower of the two keys
    until_s: int  # on the monotonic clock of the machine that the coordinator is on

    @property
    def body(self) -> bytes:
        return _FORM + bytes((self.side,)) + self.until_s.to_bytes(4, "big") + self.pair


@dataclass(frozen=True, slots=True)
class TicketScope:
    """For whom tickets are good: not for another run, nor after a restart, when the clock may be another.  And not at
    another relay: each sees its guests' tickets, and must not use them elsewhere."""

    run_id: bytes
    incarnation: int
    relay: str = ""  # the member that offers it; empty: the coordinator's own

    def statement(self, ticket: Ticket) -> bytes:
        where = self.run_id + self.incarnation.to_bytes(8, "big") + self.relay.encode()
        return b"farflung/relay/1\0" + where + ticket.body


def side_of(mine: bytes, theirs: bytes) -> int:
    return int(mine > theirs)


def written(ticket: Ticket, run: TicketScope, sign: Sign) -> str:
    """Its name; empty where nobody can sign."""
    proof = sign(run.statement(ticket))
    signature = proof[-SIGNATURE_BYTES:]
    if len(signature) != SIGNATURE_BYTES:
        return ""
    return base64.urlsafe_b64encode(ticket.body + signature).decode("ascii").rstrip("=")


def read(name: bytes, run: TicketScope, public: bytes) -> Ticket | None:
    """None: that is no ticket of this run.  Whether it has ended is the reader's to say."""
    if len(name) != NAME_CHARS:
        return None
    try:
        raw = base64.b64decode(name + b"=" * (-len(name) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    body, signature = raw[:_BODY_BYTES], raw[_BODY_BYTES:]
    if body[:1] != _FORM or body[1] not in (0, 1):
        return None
    ticket = Ticket(body[6:], body[1], int.from_bytes(body[2:6], "big"))
    return ticket if verify(public, run.statement(ticket), signature) else None
