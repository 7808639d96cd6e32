"""A run as its coordinator wrote and signed it before its disk was lost, and the peers that keep commits of it.

Used by tests/coordinator/restoring/ and tests/coordinator/standby/test_restored_store.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from farflung.coordinator.ledger.ledger import Ledger, LedgerRules
from farflung.coordinator.ledger.records import (
    Admitted,
    CommittedRound,
    DataFixed,
    DigestFixed,
    Genesis,
    Granted,
    ModelFixed,
    Record,
    Started,
    Vouched,
)
from farflung.coordinator.restoring.kept_books import kept_commit
from farflung.peer.restoring.fellow_search import KeptCommits
from farflung.protocol.manifest import Manifest
from farflung.protocol.messages import Committed, Lease
from farflung.protocol.mode_words import Keep, KeptReceipts
from farflung.protocol.model_schema import ModelSchema, TensorSpec
from farflung.protocol.round_words import Commit, Used
from farflung.protocol.signing import curve_key_of, peer_id_of

RUN_ID = bytes(range(16))
MANIFEST = Manifest.from_toml('[run]\nname = "lost"\n[round]\nkeep_results = 4\n', "test")
MODEL = ModelSchema((TensorSpec("w", (2, 4), "float32", "param"),), 4, 2, 2, bytes(32))


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def public_of(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


HOST = key_of(9)
ANN, BOB = (peer_id_of(public_of(key_of(each))) for each in (1, 2))


@dataclass
class Host:
    """A coordinator's ledger, and what it signed after each commit."""

    run_id: bytes = RUN_ID
    key: Ed25519PrivateKey = HOST
    incarnation: int = 1
    records: list[Record] = field(default_factory=list)
    told: list[Committed | Keep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(LedgerRules(8, 4))
        self.write(
            Started(incarnation=self.incarnation),
            ModelFixed(model=MODEL, peer=ANN),
            DataFixed(samples=1000, peer=ANN),
            Admitted(peer=ANN, name="ann", session=bytes(16)),
            Admitted(peer=BOB, name="bob", session=bytes(16)),
            Genesis(digest=bytes(32), peer=ANN),
            Vouched(peer=ANN),
            Vouched(peer=BOB),
        )

    def write(self, *records: Record) -> None:
        for record in records:
            self.records.append(record)
            self.ledger.apply(record)

    def commit(self, samples: int = 16) -> None:
        """Ann learned from what she was leased just now."""
        ledger = self.ledger
        start, lease, version = ledger.leases.cursor, ledger.leases.next_id, ledger.version + 1
        self.write(Granted(peer=ANN, lease=Lease.at(lease, 0, start, start + samples, (start,))))
        made = Commit(version, version + 100, (ANN, BOB), (1.0, 1.0), bytes([version, samples]) * 32, "fp32")
        self.write(
            CommittedRound(
                commit=made, used={ANN: (Used(lease, start + samples),)}, excluded={}, tokens=7, steps=1, loss=1.5,
                seconds=1.0, tx_bytes=1, tokens_by={ANN: 7},
            )
        )  # fmt: skip
        self.tell(Committed, commit=made, nonce=bytes(32))
        self.write(DigestFixed(version=version, digest=bytes([version]) * 32))

    def tell(self, word: type[Committed] | type[Keep], **said: Any) -> None:
        kept = kept_commit(self.ledger, self.run_id, MANIFEST.digest, self.prove)
        assert kept is not None
        self.told.append(word(session=bytes(16), seq=1, kept=kept, **said))

    def prove(self, statement: bytes) -> bytes:
        return public_of(self.key) + self.key.sign(statement)


def keeper(
    number: int,
    host: Host,
    upto: int | None = None,
    pinned: Ed25519PrivateKey | None = None,
    books: int | None = None,
) -> KeptCommits:
    """A peer that heard the commits until this one, and has the books of so many of them; None: of all."""
    kept = KeptCommits(curve_key_of(public_of(pinned or host.key)), public_of(key_of(number)))
    for place, each in enumerate(host.told[:upto]):
        assert each.kept is not None
        has_books = books is None or place < books
        kept.hear(each if has_books else msgspec.structs.replace(each, kept=each.kept.without_books))
    kept.about = KeptReceipts(identity=bytes(32), kept=None, model=MODEL, manifest=MANIFEST.canonical())
    return kept


def host_at(version: int, **values: object) -> Host:
    host = Host(**values)  # type: ignore[arg-type]
    for _ in range(version):
        host.commit()
    return host
