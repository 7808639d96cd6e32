"""What peers are to keep of the books, made and signed as soon as a commit is written.  Pure.

Called by the core, once for each step of the run's history.  What it says is told in kept_books.py, and put back by the
ledger.  Must not know who is told.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farflung.coordinator.ledger.kept_books import Books, FragmentBooks, name_of_model
from farflung.coordinator.ledger.ledger import FragmentBook, Ledger
from farflung.coordinator.ledger.snapshot import packed
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import KEPT_BOOKS_BYTES
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.signing import Head, KeptCommit

HOLDERS_KEPT = 256  # of a fragment, those that brought most
DIGESTS_IN_BOOKS = 2  # older ones stand in older books


def kept_commit(
    ledger: Ledger, run_id: bytes, manifest: bytes, prove: Callable[[bytes], bytes]
) -> KeptCommit | None:
    """None: there is nothing to keep yet, no key to sign it with, or it is too long.  `manifest`: the digest of what
    the run began with."""
    link = ledger.link
    if not link.number or ledger.model is None:
        return None
    raw = msgspec.msgpack.encode(_books_of(ledger, ledger.model))
    if len(raw) > KEPT_BOOKS_BYTES:
        return None
    head = Head(
        run_id,
        manifest,
        link.number,
        link.before,
        link.after,
        link.incarnation,
        ledger.era,
        tuple(book.version for book in ledger.books),
        link.commits,
        hash_bytes(raw),
    )
    proof = prove(head.statement)
    return KeptCommit(msgspec.structs.replace(head, proof=proof), raw) if proof else None


def _books_of(ledger: Ledger, model: ModelSchema) -> Books:
    batches = ledger.batches
    return Books(
        ledger.round_no,
        ledger.tokens,
        ledger.loss,
        ledger.delivered,
        ledger.era_reason,
        packed(ledger.leases),
        batches.cursor,
        batches.last_seat,
        batches.table_no,
        name_of_model(model),
        tuple(map(_fragment_of, ledger.books)),
    )


def _fragment_of(book: FragmentBook) -> FragmentBooks:
    most = sorted(book.holders.items(), key=lambda held: (-held[1].tokens, held[0]))[:HOLDERS_KEPT]
    return FragmentBooks(
        tuple(sorted(book.digests.items())[-DIGESTS_IN_BOOKS:]),
        tuple(peer for peer, _ in most if peer in book.vouched),
        tuple((peer, holder.reached, holder.tokens) for peer, holder in most),
        book.dropped_round,
    )
