"""Terms of a run, amended by a host with a key of its own.

For tests of amendments, at both sides of the wire.
"""

from __future__ import annotations

from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.protocol.manifest import Manifest
from farflung.protocol.run_terms import Terms, encoded
from farflung.protocol.signing import Amendment, curve_key_of

RUN_ID, FIRST = bytes(16), Manifest()
HOST, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([each]) * 32) for each in (1, 2))
PUBLIC = HOST.public_key().public_bytes_raw()
PINNED = curve_key_of(PUBLIC)


def signed(amendment: Amendment, key: Ed25519PrivateKey = HOST, run_id: bytes = RUN_ID) -> Amendment:
    public = key.public_key().public_bytes_raw()
    return msgspec.structs.replace(amendment, proof=public + key.sign(amendment.statement(run_id)))


def amendment(terms: Terms, version: int, era: int = 0, **changes: dict[str, Any]) -> Amendment:
    """The next one, as the host makes it."""
    return signed(Amendment(terms.count + 1, version, era, encoded(changes), terms.newest.digest))


def terms_of(*changes: tuple[int, dict[str, Any]], era: int = 0) -> Terms:
    terms = Terms(FIRST)
    for version, each in changes:
        terms = terms.plus(amendment(terms, version, era, **each))
    return terms


PERIOD_10, PERIOD_20 = {"round": {"sync_every": 10}}, {"round": {"sync_every": 20}}
