"""What peers keep of the books, signed: enough to go on from, where the journal is lost with its disk.  Pure.

Made by keeping.py as soon as a commit is written; read by restoring.py, and by the ledger, which puts it back with the
record `Restored`.  Must not know the ledger.  Each head names all that came before it (`Link`), so two heads of one
number are a fork that shows.

What the books of a commit say is true of that moment.  What was granted, released or said after it is not in them: a
lease that is younger than the commit is void, its samples are leased again, and whoever worked on them drops that work.
No sample of a commit that was put back is leased again.  Numbers of rounds, leases and seats go on far ahead, so that
none is given twice.  Bans, invitations, strikes and the evidence are not kept by peers: they are the folder's alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from farflung.coordinator.ledger.leases import Leases
from farflung.coordinator.ledger.snapshot import unpacked
from farflung.protocol.digests import hash_bytes
from farflung.protocol.limits import FRAGMENTS_MAX
from farflung.protocol.model_schema import ModelSchema
from farflung.protocol.round_words import Commit, Count, Hash, PeerName
from farflung.protocol.signing import KeptCommit, name_of_commit


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


def books_in(kept: KeptCommit) -> Books | None:
    """None: they are not what was signed, or an older farflung can't read them."""
    try:
        books = _books.decode(kept.books) if kept.is_whole else None
        fits = books is not None and len(books.fragments) == len(kept.head.versions)
        leases = unpacked(books.leases, Leases) if books is not None and fits else None
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, ValueError):
        return None
    return books if leases is not None else None
