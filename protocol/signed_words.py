"""What exactly a signature of a member covers: of a hello, a hash list, and of a digest that it claims.  Pure.

Called by whoever signs (the peer) and whoever checks (the front door, the witness, the audit).  Must not know keys.
"""

from __future__ import annotations

import msgspec

from farflung.protocol.digests import hash_bytes
from farflung.protocol.messages import Hello, Sent


def hello_part(hello: Hello, nonce: bytes) -> bytes:
    """The bytes that a hello's signature covers: everything in it, and the challenge."""
    return b"farflung/hello/1\0" + nonce + bare_hash(hello)


def sent_part(run_id: bytes, sent: Sent) -> bytes:
    """The bytes that the signature of a hash list covers: all of it, and the run."""
    return b"farflung/sent/1\0" + run_id + bare_hash(sent)


def claim_part(run_id: bytes, era: int, fragment: int, version: int, digest: bytes) -> bytes:
    """The bytes that a member signs when it shows the hashes behind a digest: I calculated this state."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (era, fragment, version))
    return b"farflung/claim/1\0" + run_id + numbers + digest


def bare_hash(signed: msgspec.Struct) -> bytes:
    """Of a message without its own signature."""
    return hash_bytes(msgspec.msgpack.encode(msgspec.structs.replace(signed, signature=b"")))
