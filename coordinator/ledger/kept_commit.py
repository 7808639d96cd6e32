"""What peers are to keep of the books, made and signed as soon as a commit is written.  Pure.

Called by the core, once for each step of the run's history.  What it says is told in kept_books.py, and put back by the
ledger.  Must not know who is told.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farflung.coordinator.ledger.kept_books import Books, FragmentBooks, kept_leases, name_of_model
from farflung.coordinator.ledger.ledger import FragmentBook, Ledger
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import KEPT_BOOKS_BYTES
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.signing import KeptCommit, SignedHead

HOLDERS_KEPT = 256  # of a fragment, those that brought most
HOLDERS_BYTES = KEPT_BOOKS_BYTES * 3 // 4  # of all fragments; the rest is for leases
DIGESTS_IN_BOOKS = 2  # older ones stand in older books
LENGTH_BYTES = 8  # more than msgpack needs to say how long the leases are


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
    head = SignedHead(
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
    """Of many fragments with many peers each, those who brought most: to keep less is better than to keep nothing."""
    holders = HOLDERS_KEPT
    while True:
        books = _books_with(ledger, model, holders)
        size_bytes = len(msgspec.msgpack.encode(books))
        if size_bytes <= HOLDERS_BYTES or not holders:
            break
        holders //= 2
    room_bytes = KEPT_BOOKS_BYTES - size_bytes - LENGTH_BYTES
    return msgspec.structs.replace(books, leases=kept_leases(ledger.leases, room_bytes))


def _books_with(ledger: Ledger, model: ModelSchema, holders: int) -> Books:
    batches = ledger.batches
    return Books(
        ledger.round_no,
        ledger.tokens,
        ledger.loss,
        ledger.delivered,
        ledger.era_reason,
        b"",
        batches.cursor,
        batches.last_seat,
        batches.table_no,
        name_of_model(model),
        tuple(_fragment_of(book, holders) for book in ledger.books),
    )


def _fragment_of(book: FragmentBook, holders: int) -> FragmentBooks:
    most = sorted(book.holders.items(), key=lambda held: (-held[1].tokens, held[0]))[:holders]
    return FragmentBooks(
        tuple(sorted(book.digests.items())[-DIGESTS_IN_BOOKS:]),
        tuple(peer for peer, _ in most if peer in book.vouched),
        tuple((peer, holder.reached, holder.tokens) for peer, holder in most),
        book.dropped_round,
    )
