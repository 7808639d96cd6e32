"""What peers keep of the books, signed: enough to go on from, where the journal is lost with its disk.  Pure.

Called by the core, which signs it as soon as a commit is written, and by the ledger for the record `Restored`, which
puts it back.  Each head names all that came before it (`Link`), so two heads of one number are a fork that shows.

What the books of a commit say is true of that moment.  What was granted, released or said after it is not in them: a
lease that is younger than the commit is void, its samples are leased again, and whoever worked on them drops that work.
No sample of a commit that was put back is leased again.  Numbers of rounds, leases and seats go on far ahead, so that
none is given twice.  Bans, invitations, strikes and the evidence are not kept by peers: they are the folder's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.ledger.eras import Holder, Mark
from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.ledger.snapshot import packed, unpacked
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import FRAGMENTS_MAX, KEPT_BOOKS_BYTES
from farflung.protocol.model_schema import BOOKS_FRAGMENT, ModelSchema
from farflung.protocol.round_words import Commit, Count, Hash, PeerName
from farflung.protocol.signing import Head, KeptCommit, name_of_commit

if TYPE_CHECKING:
    from farflung.coordinator.ledger.ledger import FragmentBook, Ledger
    from farflung.coordinator.ledger.records import Restored

HOLDERS_KEPT = 256  # of a fragment, those that brought most
DIGESTS_IN_BOOKS = 2  # older ones stand in older books
NUMBERS_AHEAD = 1 << 20  # more than a coordinator gives between two commits


@dataclass(frozen=True)
class Link:
    """The newest step of the run's history, and a name of all of them."""

    number: int = 0
    before: bytes = bytes(32)
    after: bytes = bytes(32)
    incarnation: int = 0
    commits: tuple[bytes, ...] = ()

    @property
    def order(self) -> tuple[int, int]:
        return self.incarnation, self.number

    def then(self, incarnation: int, commits: Iterable[Commit], what: bytes = b"") -> Link:
        """`what`: names a step without commits."""
        named = tuple(map(name_of_commit, commits))
        after = hash_bytes(self.after, incarnation.to_bytes(8, "big"), what, *named)
        return Link(self.number + 1, self.after, after, incarnation, named)


class FragmentBooks(Struct, frozen=True, array_like=True):
    digests: tuple[tuple[Count, Hash], ...]
    vouched: tuple[PeerName, ...]
    holders: tuple[tuple[PeerName, Annotated[int, Meta(ge=-1)], Count], ...]  # what it may hold, its tokens
    dropped_round: Count


class Books(Struct, frozen=True, array_like=True):
    round_no: Count
    tokens: Count
    loss: float | None
    delivered: bool
    era_reason: str
    leases: bytes  # as in a folded ledger
    cursor: tuple[Count, Count]
    last_seat: Count
    table_no: Count
    model: bytes  # its hash
    fragments: Annotated[tuple[FragmentBooks, ...], Meta(max_length=FRAGMENTS_MAX)]


_books: msgspec.msgpack.Decoder[Books] = msgspec.msgpack.Decoder(Books)


def name_of_model(model: ModelSchema) -> bytes:
    return hash_bytes(msgspec.msgpack.encode(model))


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


def books_in(kept: KeptCommit) -> Books | None:
    """None: they are not what was signed, or an older farflung can't read them."""
    try:
        books = _books.decode(kept.books) if kept.is_whole else None
        fits = books is not None and len(books.fragments) == len(kept.head.versions)
        leases = unpacked(books.leases, Leases) if books is not None and fits else None
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError):
        return None
    return books if leases is not None else None


# ---- putting it back --------------------------------------------------------------------------------------------


def put_back(ledger: Ledger, record: Restored) -> None:
    """The books are those of the newest commit that was shown, or what this journal says, if it knows as much."""
    ledger.restored_because = record.reason
    newest = record.kept
    books = books_in(newest) if newest is not None else None
    if newest is not None and books is not None and newest.head.order > ledger.link.order:
        _put_back(ledger, newest.head, books)
        _fill_in(ledger, record)
    ledger.leases.next_id += NUMBERS_AHEAD
    ledger.round_no += NUMBERS_AHEAD
    ledger.batches.last_seat += NUMBERS_AHEAD
    for book in ledger.books:
        book.open_round = 0


def _put_back(ledger: Ledger, head: Head, books: Books) -> None:
    ledger.link = Link(head.number, head.before, head.after, head.incarnation, head.commits)
    ledger.incarnation = max(ledger.incarnation, head.incarnation)
    ledger.era, ledger.era_reason, ledger.delivered = head.era, books.era_reason, books.delivered
    ledger.tokens, ledger.loss, ledger.abandoned = books.tokens, books.loss, None
    ledger.round_no = max(ledger.round_no, books.round_no)
    ledger.leases = unpacked(books.leases, Leases)
    ledger.batches.begin_again(books.cursor, books.last_seat, books.table_no + NUMBERS_AHEAD)
    for number, (book, said) in enumerate(zip(ledger.books, books.fragments, strict=True)):
        book.version = head.versions[number]
        book.digests, book.shown, book.commits, book.marks = dict(said.digests), {}, {}, {}
        book.norms, book.rates = {}, {}
        book.vouched = set(said.vouched)
        book.holders = {peer: Holder(reached, tokens) for peer, reached, tokens in said.holders}
        book.dropped_round, book.dropped_at = said.dropped_round, -1
        book.marks[book.version] = _mark(books, ledger.leases, number)
        if number == BOOKS_FRAGMENT:
            ledger.committed_tokens.update(
                {p: t - ledger.committed_tokens[p] for p, _, t in said.holders if t}
            )


def _mark(books: Books, leases: Leases, fragment: int) -> Mark:
    return Mark(leases.reach(fragment), books.tokens, books.loss, books.cursor)


def _fill_in(ledger: Ledger, record: Restored) -> None:
    """What older commits say of older versions, to which the run may go back, as far as they are shown."""
    lowest = [book.version for book in ledger.books]
    for kept in record.older:  # the newest first
        books = books_in(kept)
        leases = unpacked(books.leases, Leases) if books is not None else None
        for number, version in enumerate(kept.head.versions if books is not None else ()):
            book = ledger.books[number]
            assert books is not None and leases is not None
            if version > lowest[number]:
                continue  # the run went back behind it since
            lowest[number] = version
            book.marks.setdefault(version, _mark(books, leases, number))
            for of, digest in books.fragments[number].digests:
                if of <= version:
                    book.digests.setdefault(of, digest)
    for commit in record.commits:
        book = ledger.books[commit.fragment]
        if book.version - ledger.keep_results < commit.version <= book.version:
            book.commits[commit.version] = commit
    for book in ledger.books:
        # To a version of which nobody knows what it had learned from the run must not go back: 0 is no such one.
        book.digests = {v: d for v, d in book.digests.items() if v in book.marks or v == 0}
