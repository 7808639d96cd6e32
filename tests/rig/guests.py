"""A peer that comes to the door, in tests on virtual time: its keys follow from its number."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.protocol.digests import hash_bytes
from farflung.protocol.signing import peer_id_of


@dataclass
class Guest:
    number: int
    comes_from: str = "192.0.2.7"
    restarts: int = 0
    session: bytes = b""
    seq: int = 0

    @property
    def signer(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hash_bytes(b"identity", bytes([self.number])))

    @property
    def identity(self) -> bytes:
        return self.signer.public_key().public_bytes_raw()

    @property
    def peer(self) -> str:
        return peer_id_of(self.identity)

    @property
    def process(self) -> bytes:
        return hash_bytes(b"process", bytes([self.number, self.restarts]))[:16]

    @property
    def key(self) -> bytes:
        return hash_bytes(b"key", self.process)
